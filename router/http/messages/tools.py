"""Tools and thinking in Anthropic's API: what clients send, and what it is in the words of chats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator

from baton.errors import InvalidRequest
from baton.messages.request_limits import MAX_TOOLS, MAX_WORDS
from router.http.bodies.fields import Ignored, NotServed, OnlyFalse
from router.http.bodies.strict import Bounded, Strict
from router.http.bodies.tools import Distinct, NamedFunction, NamedTool, ToolBody, ToolFields, ToolName
from router.http.chat_plan import reasoning_variables

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
