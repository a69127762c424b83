"""The bodies of Anthropic's API of messages. Names of fields are Anthropic's.

As in `router.http.bodies`, an unknown field is refused by its name, and so is one that is known but not served.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, model_validator

from baton.errors import InvalidRequest
from baton.messages.generation import GenerateRequest
from baton.messages.request_limits import MAX_MESSAGES, MAX_TOOLS, MAX_WORDS
from router.http.bodies.fields import Bounded, Ignored, NotServed, OnlyFalse, Stop, Strict, Treatment
from router.http.bodies.tools import Distinct, NamedFunction, NamedTool, ToolBody, ToolFields, ToolName
from router.http.chat_plan import ToolOffer, reasoning_variables
from router.http.messages.blocks import Content, ImageBlock, TextContent, check_role, template_messages, text_of

TOOL_FIELDS = ToolFields("input_schema", "tool_choice.name", "", "output_config.format")
MIN_THINKING_TOKENS = 1024
"""The smallest budget of thinking, as in Anthropic's API."""


def _custom(value: Any) -> str:
    if value in (None, "custom"):
        return "custom"
    named = f"is {value[:40]!r}" if isinstance(value, str) else "is no text"
    raise ValueError(f"{named}; only tools of the type 'custom' are served, which the client runs")


class CustomTool(Strict):
    """A tool that the model may call, and the client runs."""

    type: Annotated[str, PlainValidator(_custom, json_schema_input_type=Literal["custom"] | None)] = "custom"
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: Ignored = None
    eager_input_streaming: bool | None = None
    allowed_callers: Annotated[list[Literal["direct"]], Bounded(MAX_WORDS)] | None = None
    defer_loading: OnlyFalse = None
    input_examples: NotServed = None

    def as_tool(self) -> ToolBody:
        """The tool as chats have it."""
        return ToolBody.of(self.name, self.description, self.input_schema, self.strict)


Tools = Annotated[Annotated[list[CustomTool], Bounded(MAX_TOOLS)] | None, Distinct]


class ToolChoice(Strict):
    """Whether the model calls a tool: if it wants to (auto), always (any), this one (tool), or never (none)."""

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None

    def as_choice(self) -> str | NamedTool:
        """The choice as chats have it; raises InvalidRequest if type and name do not fit."""
        if (self.type == "tool") != (self.name is not None):
            raise InvalidRequest("tool_choice.name", "and the type tool need each other")
        if self.name is not None:
            return NamedTool(type="function", function=NamedFunction(name=self.name))
        return "required" if self.type == "any" else self.type


class ThinkingConfig(Strict):
    """Whether the model reasons before its answer."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Field(ge=MIN_THINKING_TOKENS)] | None = None
    display: Literal["summarized", "omitted"] | None = None

    def check(self) -> None:
        """Raises InvalidRequest if the type and other fields do not fit."""
        if (self.type == "enabled") != (self.budget_tokens is not None):
            raise InvalidRequest("thinking.budget_tokens", "and the type enabled need each other")
        if self.type == "disabled" and self.display is not None:
            raise InvalidRequest("thinking.display", "does not go with the type disabled")

    @property
    def is_on(self) -> bool:
        """Whether the model may reason."""
        return self.type != "disabled"


def functions(tools: Sequence[CustomTool] | None) -> Sequence[ToolBody]:
    """The tools as chats have them."""
    return [tool.as_tool() for tool in tools or ()]


def template_variables(thinking: ThinkingConfig | None, effort: str | None) -> Mapping[str, Any]:
    """The variables of a template that stand for thinking and its effort; None: the model's own."""
    if thinking is None:
        return reasoning_variables(effort)
    return {**reasoning_variables(effort if thinking.is_on else "none"), "enable_thinking": thinking.is_on}


_FORMAT = "output_config.format"
_NO_REASONING = (
    "can't be enabled: this model's chat template describes no reasoning "
    "(an operator may set --reasoning-parser think); type adaptive is taken"
)


class Turn(Strict):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Content

    @model_validator(mode="after")
    def _has_its_blocks(self) -> Turn:
        check_role(self.role, self.content)
        return self


class OutputFormat(Strict):
    """The schema that the text of the answer must fit."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    """What is wanted of the output."""

    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class CountBody(Strict):
    """POST /v1/messages/count_tokens: the fields that make the prompt."""

    model: str
    messages: Annotated[list[Turn], Field(min_length=1), Bounded(MAX_MESSAGES, "messages")]
    system: TextContent = ()
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    tools: Tools = None
    tool_choice: ToolChoice | None = None
    speed: Annotated[Literal["standard"] | None, Treatment.ONE_VALUE] = None

    # Every prompt's prefix is cached where it can be, and the whole conversation is read while it fits.
    cache_control: Ignored = None
    context_management: Ignored = None

    mcp_servers: NotServed = None
    thread: NotServed = None

    @property
    def is_prefilled(self) -> bool:
        """Whether the answer continues the last message, which is the beginning of it."""
        return self.messages[-1].role == "assistant"

    @property
    def format(self) -> OutputFormat | None:
        """What the text of the answer must fit; None: it may be any text."""
        return self.output_config.format if self.output_config is not None else None

    @property
    def images(self) -> list[bytes]:
        """The images of all messages, in order."""
        return [block.source.data for turn in self.messages for block in turn.content if isinstance(block, ImageBlock)]

    def conversation(self) -> Sequence[Mapping[str, Any]]:
        """The messages for the model's template; raises InvalidRequest for a last one that can't be continued."""
        messages = template_messages(text_of(self.system), self.messages)
        if self.is_prefilled:
            field, last = f"messages[{len(self.messages) - 1}].content", messages[-1]
            if last.get("tool_calls"):
                raise InvalidRequest(field, "has calls, so the answer can't continue it: their results come first")
            if not last["content"] or last["content"][-1].isspace():
                raise InvalidRequest(field, "must not be empty or end with whitespace, since the answer continues it")
        return messages

    def offer(self) -> ToolOffer:
        """The tools, and the choice among them; raises InvalidRequest."""
        choice = self.tool_choice
        return ToolOffer(
            functions(self.tools),
            choice.as_choice() if choice is not None else None,
            is_parallel=not (choice is not None and choice.disable_parallel_tool_use),
            constraint_field=_FORMAT if self.format is not None else None,
            fields=TOOL_FIELDS,
        )

    def variables(self) -> Mapping[str, Any]:
        """The variables of the template that stand for thinking and its effort."""
        return template_variables(self.thinking, self.output_config.effort if self.output_config is not None else None)

    @property
    def shows_thinking(self) -> bool:
        """Whether the answer has the text of its reasoning."""
        return self.thinking is None or self.thinking.display != "omitted"

    def check_thinking(self, *, reasons: bool) -> None:
        """Raises InvalidRequest for thinking that can't be. `reasons`: whether the model may reason at all."""
        if self.thinking is None:
            return
        self.thinking.check()
        if self.thinking.type != "enabled":
            return
        if not reasons:
            raise InvalidRequest("thinking", _NO_REASONING)
        if self.format is not None:
            raise InvalidRequest("thinking", f"does not go with {_FORMAT}, which holds from the first token on")
        if self.is_prefilled:
            raise InvalidRequest(
                "thinking", "does not go with a last message of the assistant, since the answer has begun"
            )


class MessagesBody(CountBody):
    """POST /v1/messages"""

    max_tokens: Annotated[int, Field(ge=1)]
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: Stop = ()

    # Not Anthropic's: the same as in chats.
    seed: int | None = None
    priority: int | None = None
    cache_salt: str | None = None

    service_tier: Ignored = None
    metadata: Ignored = None

    container: NotServed = None
    diagnostics: NotServed = None
    inference_geo: NotServed = None

    def check_thinking(self, *, reasons: bool) -> None:
        super().check_thinking(reasons=reasons)
        if self.thinking is not None and (self.thinking.budget_tokens or 0) >= self.max_tokens:
            raise InvalidRequest("thinking.budget_tokens", "must be less than max_tokens")

    def request(self, prompt: Sequence[int], request_id: str, max_tokens: int) -> GenerateRequest:
        """The request to the core."""
        return GenerateRequest(
            prompt=prompt,
            request_id=request_id,
            model=self.model,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
            max_tokens=max_tokens,
            stop=self.stop_sequences,
            json_schema=json.dumps(self.format.schema_) if self.format is not None else None,
            constraint_field=_FORMAT if self.format is not None else "",
            priority=self.priority or 0,
            cache_salt=self.cache_salt or "",
        )
