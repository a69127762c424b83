"""The bodies of OpenAI's API of responses. Names of fields are OpenAI's.

As in `router.http.bodies`, an unknown field is refused by its name, and so is one that is known but not served.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator

from baton.errors import InvalidRequest
from baton.messages.generation import GenerateRequest
from baton.messages.request_limits import MAX_TOOLS, MAX_WORDS
from baton.messages.sampling import SamplingDefaults
from router.http.bodies.fields import (
    Bounded,
    Ignored,
    NotServed,
    OnlyFalse,
    ReasoningEffort,
    RepeatedText,
    Strict,
    Treatment,
)
from router.http.bodies.tools import (
    ChosenTools,
    Distinct,
    NamedFunction,
    NamedTool,
    ToolBody,
    ToolFields,
    ToolName,
    read_choice,
)
from router.http.chat_plan import ToolOffer
from router.http.completions.generation import ANY_OBJECT
from router.http.responses.items import Item, read_input

TOOL_FIELDS = ToolFields("parameters", "tool_choice.name", "tool_choice.tools", "text.format")


class FunctionTool(Strict):
    """A function that the model may call."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: OnlyFalse = None

    # Known, but not served.
    allowed_callers: NotServed = None
    output_schema: NotServed = None

    def as_tool(self) -> ToolBody:
        """The tool as chats have it."""
        return ToolBody.of(self.name, self.description, self.parameters, self.strict)

    def as_object(self) -> dict[str, Any]:
        """The tool as a response shows it."""
        return self.model_dump(include={"type", "name", "description", "parameters", "strict"})


class ChosenTool(Strict):
    """A function that is to be called, or that may be."""

    type: Literal["function"]
    name: ToolName


class AllowedTools(Strict):
    """The functions among which the model may choose."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenTool], Bounded(MAX_TOOLS)]


_CHOICES: Mapping[str, type[ChosenTool | AllowedTools]] = {"function": ChosenTool, "allowed_tools": AllowedTools}


def _tool_type(value: Any) -> Any:
    """A list of tools; raises ValueError for one that is no function, by its type."""
    for index, tool in enumerate(value[:MAX_TOOLS] if isinstance(value, list) else ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != "function":
            raise ValueError(f"has, at {index}, a tool of the type {kind[:40]!r}; only functions are served")
    return value


_choice = partial(read_choice, kinds=_CHOICES)
FunctionTools = Annotated[
    Annotated[list[FunctionTool], Bounded(MAX_TOOLS)] | None, BeforeValidator(_tool_type), Distinct
]
FunctionChoice = Annotated[
    Literal["none", "auto", "required"] | ChosenTool | AllowedTools | None,
    PlainValidator(
        _choice,
        json_schema_input_type=Literal["none", "auto", "required"] | ChosenTool | AllowedTools,
    ),
]


def choice_of(
    choice: Literal["none", "auto", "required"] | ChosenTool | AllowedTools | None, tools: Sequence[FunctionTool]
) -> ChosenTools:
    """The choice as chats have it; raises InvalidRequest for allowed tools that are none of these tools."""
    if isinstance(choice, ChosenTool):
        return ChosenTools(NamedTool(type="function", function=NamedFunction(name=choice.name)))
    if not isinstance(choice, AllowedTools):
        return ChosenTools(choice)
    return ChosenTools.among(choice.mode, [tool.name for tool in choice.tools], tools, TOOL_FIELDS)


_FORMAT = "text.format"
_LOGPROBS = "message.output_text.logprobs"
IMAGE_URLS = "message.input_image.image_url"
"""What a client asks for to have the images in a list of items."""
Includable = Literal[
    "message.output_text.logprobs",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]
"""What a client may ask to be included; to the items of answers here, only the first applies."""
_MAX_METADATA, _MAX_METADATA_KEY, _MAX_METADATA_VALUE = 16, 64, 512


def _metadata(value: Any) -> Mapping[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise ValueError("must be an object from names to strings")
    if len(value) > _MAX_METADATA:
        raise ValueError(f"has {len(value)} pairs; at most {_MAX_METADATA} are taken")
    if any(len(key) > _MAX_METADATA_KEY or len(text) > _MAX_METADATA_VALUE for key, text in value.items()):
        raise ValueError(f"may have keys of {_MAX_METADATA_KEY} and values of {_MAX_METADATA_VALUE} characters")
    return dict(value)


class TextFormat(Strict):
    """The format that the text of an answer must have."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = None

    def as_schema(self) -> str | None:
        """The schema as JSON, None for any text; raises InvalidRequest if type and schema do not fit."""
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise InvalidRequest("text.format.schema", "and the type json_schema need each other")
        if self.schema_ is None:
            return ANY_OBJECT if self.type == "json_object" else None
        return json.dumps(self.schema_)

    def as_object(self) -> dict[str, Any]:
        """The format as a response shows it."""
        if self.schema_ is None:
            return {"type": self.type}
        described = {"name": self.name or "schema", "schema": self.schema_, "description": self.description}
        return {"type": self.type, **described, "strict": bool(self.strict)}


class TextConfig(Strict):
    """What is wanted of the text of an answer."""

    format: TextFormat | None = None
    verbosity: Ignored = None


class ResponseStreamOptions(Strict):
    """What a stream contains beside the events of every stream."""

    include_obfuscation: Ignored = None


class ReasoningConfig(Strict):
    """How much the model is to reason. Its text is given whole, and so there are no summaries."""

    effort: ReasoningEffort | None = None
    summary: Ignored = None
    generate_summary: Ignored = None
    context: NotServed = None
    mode: NotServed = None


class ResponsesBody(Strict):
    """POST /v1/responses"""

    core_names = {  # noqa: RUF012
        "request_id": ("request_id", "x-request-id"),
        "prompt": ("prompt", "input"),
        "messages": ("messages", "input"),
        "images": ("images", "input"),
        "logprobs": ("logprobs", "top_logprobs"),
        "max_tokens": ("max_tokens", "max_output_tokens"),
    }

    input: Annotated[Sequence[Item], PlainValidator(read_input, json_schema_input_type=str | list[dict[str, Any]])]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: Annotated[list[Includable], Bounded(MAX_WORDS)] | None = None
    text: TextConfig | None = None
    tools: FunctionTools = None
    tool_choice: FunctionChoice = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningConfig | None = None
    metadata: Annotated[Mapping[str, str], PlainValidator(_metadata, json_schema_input_type=dict[str, str])] = Field(
        default_factory=dict
    )

    # Not OpenAI's: the same as in chats.
    seed: int | None = None
    priority: int | None = None
    cache_salt: str | None = None

    background: OnlyFalse = None
    truncation: Annotated[Literal["disabled"] | None, Treatment.ONE_VALUE] = None

    # Bookkeeping of the client, speed and cost change no answer, nor do bounds on hosted tools: there are none.
    context_management: Ignored = None
    max_tool_calls: Ignored = None
    prompt_cache_key: RepeatedText = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None
    safety_identifier: RepeatedText = None
    service_tier: Ignored = None
    user: RepeatedText = None

    background_options: NotServed = None
    conversation: NotServed = None
    moderation: NotServed = None
    prompt: NotServed = None

    @property
    def num_logprobs(self) -> int | None:
        """The number of log-probabilities for the core; raises InvalidRequest for a number that is not included.

        They are refused where calls may stand between messages: which tokens are whose is not known.
        """
        if _LOGPROBS in (self.include or ()):
            if self.tools and self.tool_choice != "none":
                raise InvalidRequest("include", f"{_LOGPROBS} does not go with tools that may be called")
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise InvalidRequest("top_logprobs", f"needs include with {_LOGPROBS}")
        return None

    def offer(self) -> ToolOffer:
        """The tools, and the choice among them; raises InvalidRequest."""
        tools = self.tools or []
        chosen = choice_of(self.tool_choice, tools)
        return ToolOffer(
            [tool.as_tool() for tool in tools],
            chosen.choice,
            self.parallel_tool_calls is not False,
            _FORMAT if self._schema is not None else None,
            TOOL_FIELDS,
            chosen.allowed,
        )

    @property
    def effort(self) -> ReasoningEffort | None:
        """How much the model is to reason; None: as much as it does."""
        return self.reasoning.effort if self.reasoning is not None else None

    @property
    def _schema(self) -> str | None:
        return self._format.as_schema() if self._format is not None else None

    @property
    def _format(self) -> TextFormat | None:
        return self.text.format if self.text is not None else None

    def request(self, prompt: Sequence[int], request_id: str, max_tokens: int) -> GenerateRequest:
        """The request to the core; raises InvalidRequest."""
        return GenerateRequest(
            prompt=prompt,
            request_id=request_id,
            model=self.model or "",
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            max_tokens=max_tokens,
            logprobs=self.num_logprobs,
            json_schema=self._schema,
            constraint_field=_FORMAT if self._schema is not None else "",
            priority=self.priority or 0,
            cache_salt=self.cache_salt or "",
        )

    def echoed(self, defaults: SamplingDefaults) -> dict[str, Any]:
        """The fields of a response that repeat the request's, or the defaults in their place, first the model's own."""
        wanted = self._format.as_object() if self._format is not None else {"type": "text"}
        choice = self.tool_choice or "auto"
        return {
            "background": False,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": None,
            "metadata": self.metadata,
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id,
            "prompt_cache_key": self.prompt_cache_key,
            "reasoning": {"effort": self.effort, "summary": None},
            "safety_identifier": self.safety_identifier,
            "service_tier": "default",
            "temperature": _first(self.temperature, defaults.temperature, 1.0),
            "text": {"format": wanted, "verbosity": "medium"},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [tool.as_object() for tool in self.tools or ()],
            "top_logprobs": self.top_logprobs or 0,
            "top_p": _first(self.top_p, defaults.top_p, 1.0),
            "truncation": "disabled",
            "user": self.user,
        }


def _first(*numbers: float | None) -> float | None:
    """The first number that is set."""
    return next((number for number in numbers if number is not None), None)
