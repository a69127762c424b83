"""The bodies of OpenAI's API of responses. Names of fields are OpenAI's.

As in `router.http.bodies`, an unknown field is refused by its name, and so is one that is known but not served.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator

from baton.errors import InvalidRequest
from baton.messages.generation import GenerateRequest
from baton.messages.request_limits import MAX_MESSAGES
from baton.messages.sampling import SamplingDefaults
from router.http.bodies.constraints import ANY_OBJECT
from router.http.bodies.fields import NotServed
from router.http.bodies.strict import Strict

_LOGPROBS = "message.output_text.logprobs"
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
"""What a client may ask to be included; answers have no items to which any but the first applies."""
_ROLES = ("user", "assistant", "system", "developer")
_ITEM_FIELDS = {"type", "id", "role", "status", "content", "phase"}
_PART_FIELDS = {"type", "text", "annotations", "logprobs"}
_MAX_METADATA, _MAX_METADATA_KEY, _MAX_METADATA_VALUE = 16, 64, 512

InputMessage = tuple[str, tuple[str, ...]]
"""A message of the input: its role, and the text of its parts."""


def _input(value: Any) -> Sequence[InputMessage]:
    if isinstance(value, str):
        return (("user", (value,)),)
    if not isinstance(value, list) or not value:
        raise ValueError("must be a string or a list of messages")
    if len(value) > MAX_MESSAGES:
        raise ValueError(f"has {len(value)} items; at most {MAX_MESSAGES} are taken")
    return tuple(_input_message(item, place) for place, item in enumerate(value))


def _input_message(item: Any, place: int) -> InputMessage:
    if not isinstance(item, dict):
        raise ValueError(f"item {place} must be an object")
    if (kind := item.get("type")) not in (None, "message"):
        named = f"of the type {kind[:40]!r}" if isinstance(kind, str) else "of a type that is no text"
        raise ValueError(f"item {place} is {named}; only items of the type 'message' are served")
    _check_fields(item, _ITEM_FIELDS, f"item {place}")
    if item.get("role") not in _ROLES:
        raise ValueError(f"item {place} needs a role, one of {', '.join(_ROLES)}")
    if item.get("phase") not in (None, "final_answer"):
        raise ValueError(f"item {place} has a phase, which is not served")
    content = item.get("content")
    if isinstance(content, str):
        return item["role"], (content,)
    if not isinstance(content, list):
        raise ValueError(f"item {place} needs a content, a string or a list of text parts")
    return item["role"], tuple(_text(part, f"item {place}, part {number}") for number, part in enumerate(content))


def _text(part: Any, name: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in ("input_text", "output_text"):
        named = f"is of the type {kind[:40]!r}" if isinstance(kind, str) else "has no type"
        raise ValueError(f"{name} {named}; only 'input_text' and 'output_text' are served")
    _check_fields(part, _PART_FIELDS, name)
    if not isinstance(part.get("text"), str):
        raise ValueError(f"{name} needs a text")
    if part.get("annotations"):
        raise ValueError(f"{name} has annotations, which are not served")
    text: str = part["text"]
    return text


def _check_fields(found: Mapping[str, Any], known: set[str], name: str) -> None:
    if unknown := next((field for field in found if field not in known), None):
        raise ValueError(f"{name} has the unknown field {unknown[:40]!r}")


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
    verbosity: Literal["medium"] | None = None


class ResponseStreamOptions(Strict):
    """What a stream contains beside the events of every stream."""

    include_obfuscation: Literal[False] | None = None


class ResponsesBody(Strict):
    """POST /v1/responses"""

    input: Annotated[Sequence[InputMessage], PlainValidator(_input, json_schema_input_type=str | list[dict[str, Any]])]
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
    include: list[Includable] | None = None
    text: TextConfig | None = None
    metadata: Annotated[Mapping[str, str], PlainValidator(_metadata, json_schema_input_type=dict[str, str])] = Field(
        default_factory=dict
    )

    # Not OpenAI's: the same as in chats.
    seed: int | None = None
    priority: int | None = None
    cache_salt: str | None = None

    # Only these values are served.
    background: Literal[False] | None = None
    parallel_tool_calls: bool | None = None
    prompt_cache_retention: Literal["in_memory"] | None = None
    service_tier: Literal["auto", "default"] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    truncation: Literal["disabled"] | None = None

    # Ignored: they change no answer.
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    user: str | None = None

    # Known, but not served.
    background_options: NotServed = None
    context_management: NotServed = None
    conversation: NotServed = None
    max_tool_calls: NotServed = None
    moderation: NotServed = None
    prompt: NotServed = None
    prompt_cache_options: NotServed = None
    reasoning: NotServed = None
    tools: NotServed = None

    @property
    def num_logprobs(self) -> int | None:
        """The number of log-probabilities for the core; raises InvalidRequest for a number that is not included."""
        if _LOGPROBS in (self.include or ()):
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise InvalidRequest("top_logprobs", f"needs include with {_LOGPROBS}")
        return None

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
            json_schema=self._format.as_schema() if self._format is not None else None,
            priority=self.priority or 0,
            cache_salt=self.cache_salt or "",
        )

    def echoed(self, defaults: SamplingDefaults) -> dict[str, Any]:
        """The fields of a response that repeat the request's, or the defaults in their place, first the model's own."""
        wanted = self._format.as_object() if self._format is not None else {"type": "text"}
        return {
            "background": False,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": None,
            "metadata": self.metadata,
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id,
            "prompt_cache_key": self.prompt_cache_key,
            "reasoning": {"effort": None, "summary": None},
            "safety_identifier": self.safety_identifier,
            "service_tier": "default",
            "temperature": _first(self.temperature, defaults.temperature, 1.0),
            "text": {"format": wanted, "verbosity": "medium"},
            "tool_choice": self.tool_choice or "auto",
            "tools": [],
            "top_logprobs": self.top_logprobs or 0,
            "top_p": _first(self.top_p, defaults.top_p, 1.0),
            "truncation": "disabled",
            "user": self.user,
        }


def _first(*numbers: float | None) -> float | None:
    """The first number that is set."""
    return next((number for number in numbers if number is not None), None)
