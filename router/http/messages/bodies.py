"""The bodies of Anthropic's API of messages. Names of fields are Anthropic's.

As in `router.http.bodies`, an unknown field is refused by its name, and so is one that is known but not served.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator

from baton.errors import InvalidRequest
from baton.messages.generation import GenerateRequest
from router.http.bodies.fields import NotServed, Stop, bounded_messages
from router.http.bodies.strict import Strict

_BLOCK_FIELDS = {"type", "text", "cache_control", "citations"}


def _content(value: Any) -> str:
    """The text of a message; blocks are joined by newlines, as are the parts of a chat's message."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of text blocks")
    return "\n".join(_text_of(block, place) for place, block in enumerate(value))


def _text_of(block: Any, place: int) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind != "text":
        named = f"is of the type {kind[:40]!r}" if isinstance(kind, str) else "has no type"
        raise ValueError(f"block {place} {named}; only blocks of the type 'text' are served")
    if not isinstance(block.get("text"), str):
        raise ValueError(f"block {place} needs a text")
    if unknown := next((name for name in block if name not in _BLOCK_FIELDS), None):
        raise ValueError(f"block {place} has the unknown field {unknown[:40]!r}")
    if block.get("citations"):
        raise ValueError(f"block {place} has citations, which are not served")
    text: str = block["text"]
    return text


Content = Annotated[str, PlainValidator(_content, json_schema_input_type=str | list[dict[str, Any]])]


class Turn(Strict):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Content


class Disabled(Strict):
    """Thinking, which may only be off."""

    type: Literal["disabled"]


class ToolChoice(Strict):
    """The choice among no tools: either type means that none is called."""

    type: Literal["none", "auto"]
    disable_parallel_tool_use: bool | None = None


class OutputFormat(Strict):
    """The schema that the text of the answer must fit."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    """What is wanted of the output."""

    format: OutputFormat | None = None
    effort: NotServed = None


class CountBody(Strict):
    """POST /v1/messages/count_tokens: the fields that make the prompt."""

    model: str
    messages: Annotated[list[Turn], Field(min_length=1, fail_fast=True), BeforeValidator(bounded_messages)]
    system: Content = ""
    thinking: Disabled | None = None
    output_config: OutputConfig | None = None
    tool_choice: ToolChoice | None = None
    speed: Literal["standard"] | None = None

    # Ignored: every prompt's prefix is cached where it can be.
    cache_control: dict[str, Any] | None = None

    # Known, but not served.
    context_management: NotServed = None
    mcp_servers: NotServed = None
    tools: NotServed = None

    @property
    def is_prefilled(self) -> bool:
        """Whether the answer continues the last message, which is the beginning of it."""
        return self.messages[-1].role == "assistant"

    def conversation(self) -> Sequence[Mapping[str, str]]:
        """The messages for the model's template; raises InvalidRequest for a last one that can't be continued.

        Messages of the same role that follow each other are one, as in Anthropic's API: many templates want the roles
        to alternate.
        """
        turns = [("system", self.system)] if self.system else []
        for turn in self.messages:
            if turns and turns[-1][0] == turn.role:
                turns[-1] = (turn.role, f"{turns[-1][1]}\n{turn.content}")
            else:
                turns.append((turn.role, turn.content))
        last = turns[-1][1]
        if self.is_prefilled and (not last or last[-1].isspace()):
            message = "must not be empty or end with whitespace, since the answer continues it"
            raise InvalidRequest(f"messages[{len(self.messages) - 1}].content", message)
        return [{"role": role, "content": text} for role, text in turns]


class Metadata(Strict):
    """What a client says about a request."""

    user_id: str | None = None


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

    # Only these values are served.
    service_tier: Literal["auto", "standard_only"] | None = None

    # Ignored: it changes no answer.
    metadata: Metadata | None = None

    # Known, but not served.
    container: NotServed = None
    diagnostics: NotServed = None
    inference_geo: NotServed = None

    def request(self, prompt: Sequence[int], request_id: str, max_tokens: int) -> GenerateRequest:
        """The request to the core."""
        wanted = self.output_config.format if self.output_config is not None else None
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
            json_schema=json.dumps(wanted.schema_) if wanted is not None else None,
            priority=self.priority or 0,
            cache_salt=self.cache_salt or "",
        )
