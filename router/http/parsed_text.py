"""How the text of a chat's answer is split into reasoning, content and tool calls, and what clients get of each.

A sequence's parts are a function of its text alone, so a stream that goes on at another router, or after a failover,
has the same parts.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from baton.errors import ConfigError
from baton.text.model_template import ModelTemplate
from baton.text.reasoning import ReasoningCounter, ReasoningSplitter
from baton.text.tool_calls.call_parser import MAX_CALLS
from baton.text.tool_calls.events import Arguments, CallBegun, CallEnded, Content, ToolEvent
from baton.text.tool_calls.formats import FORMATS, ToolFormat, format_of_template, template_reasons

_SHORT_ID_CHARS = 9
_ID_CHARS = 24


Spelling = Callable[[int], bytes]
"""The bytes that a token stands for, or a name of the token."""


def as_token_id(token_id: int) -> bytes:
    """A token's spelling that tells tokens with the same text apart; as in vLLM."""
    return b"token_id:%d" % token_id


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The next piece of the reasoning, which comes before everything else."""

    text: str


@dataclass(frozen=True, slots=True)
class NamedCall:
    """The beginning of a call. Until its `CallEnded`, its `CallArguments` follow, and nothing else."""

    index: int
    """Its place among the calls of the answer."""
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of a call's arguments."""

    index: int
    """The call's place among the calls of the answer."""
    text: str


AnswerPart = Reasoning | Content | NamedCall | CallArguments | CallEnded
"""The parts of an answer, in the order in which the model wrote them."""
Delta = dict[str, Any]
"""What a piece of text adds to a message, as in OpenAI's streams; empty: nothing."""


@dataclass(frozen=True, slots=True)
class AnswerParsers:
    """How calls and reasoning of one model are found."""

    tools: ToolFormat | None
    """The format of calls; None: the model calls no tools."""
    tool_call_parser: str | None
    """The name of that format."""
    reasons: bool
    """Whether the model may write `<think>…</think>` before its answer."""

    @classmethod
    def of(cls, tool_call_parser: str, reasoning_parser: str, template: ModelTemplate | None) -> AnswerParsers:
        """The parsers that the settings name.

        `auto` stands for those that fit the model: the one that its files name, or that its chat template describes.
        Raises ConfigError if there is no parser of such a name.
        """
        source = template.source if template is not None else ""
        name: str | None = tool_call_parser
        if name == "auto":
            name = (template.tool_call_parser if template is not None else "") or format_of_template(source)
        if name not in (None, "none", *FORMATS):
            raise ConfigError(f"there is no parser of tool calls {name!r:.80}; there are {', '.join(FORMATS)} and none")
        reasons = template_reasons(source) if reasoning_parser == "auto" else reasoning_parser == "think"
        tools = FORMATS.get(name or "")
        return cls(tools, name if tools is not None else None, reasons)


@dataclass(frozen=True, slots=True)
class TextParsing:
    """How the texts of one answer are parsed."""

    tools: ToolFormat | None = None
    """The format of the calls that are looked for; None: none are."""
    names: Sequence[str] = ()
    """The names of the request's tools."""
    max_calls: int = MAX_CALLS
    prompt_end: str = ""
    """The beginning of the first call, which stands at the end of the prompt."""
    reasons: bool = False
    is_open: bool = False
    """Whether the prompt has opened the reasoning."""
    spelling: Spelling = as_token_id
    """The bytes of tokens, by which those of the reasoning are counted."""

    @property
    def is_needed(self) -> bool:
        """Whether anything is looked for."""
        return self.reasons or self.tools is not None

    def sequence(self, request_id: str, index: int) -> ParsedSequence:
        """The parser of one sequence of an answer."""
        return ParsedSequence(self, f"{request_id}.{index}")


class ParsedSequence:
    """The parts of one sequence."""

    def __init__(self, parsing: TextParsing, name: str) -> None:
        """`name`: unique. Calls get their ids from it, so that they are the same in a resumed stream."""
        self._name = name
        self._has_short_ids = parsing.tools is not None and parsing.tools.has_short_ids
        self._reasoning = ReasoningSplitter(is_open=parsing.is_open) if parsing.reasons else None
        self._reasoning_counter = ReasoningCounter(parsing.spelling)
        self._calls = parsing.tools.parser(parsing.names, parsing.max_calls) if parsing.tools is not None else None
        if self._calls is not None and parsing.prompt_end:
            self._calls.push(parsing.prompt_end)
        self._given = parsing.prompt_end
        """Text of the prompt that the parser may still return as content, if the call in it is cut off."""
        self._num_calls = 0
        self._is_called = False
        """Whether there was a call with whole arguments."""

    def push(self, text: str) -> Delta:
        """What the next piece of the text adds."""
        return _delta(self.parts(text))

    def finish(self, text: str = "") -> Delta:
        """What the last piece of the text adds, and all that was held."""
        return _delta(self.last_parts(text))

    def parts(self, text: str) -> list[AnswerPart]:
        """The parts, or their next pieces, that the next piece of the text adds."""
        reasoning, rest = self._reasoning.push(text) if self._reasoning is not None else ("", text)
        return self._parts(reasoning, self._calls.push(rest) if self._calls is not None else [Content(rest)])

    def last_parts(self, text: str = "") -> list[AnswerPart]:
        """The parts, or their last pieces, that the last piece of the text adds, and all that was held."""
        reasoning, rest = self._reasoning.push(text) if self._reasoning is not None else ("", text)
        if self._reasoning is not None:
            last_reasoning, last = self._reasoning.finish()
            reasoning, rest = reasoning + last_reasoning, rest + last
        if self._calls is None:
            return self._parts(reasoning, [Content(rest)])
        return self._parts(reasoning, [*self._calls.push(rest), *self._calls.finish()])

    def count(self, token_ids: Sequence[int]) -> None:
        """Count the next tokens of the output, for `num_reasoning_tokens`."""
        if self._reasoning is not None:
            self._reasoning_counter.push(token_ids)

    @property
    def num_reasoning_tokens(self) -> int:
        """How many of the tokens that were counted are reasoning; see `ReasoningCounter`. Known after `finish`."""
        has_reasoning = self._reasoning is not None and self._reasoning.has_reasoning
        return self._reasoning_counter.num_tokens if has_reasoning else 0

    def finish_reason(self, reason: str) -> str:
        """The finish reason for clients: `tool_calls` for a text that ended by itself and calls a tool."""
        return "tool_calls" if reason == "stop" and self._is_called else reason

    def _parts(self, reasoning: str, events: Iterable[ToolEvent]) -> list[AnswerPart]:
        parts: list[AnswerPart] = [Reasoning(reasoning)] if reasoning else []
        for event in events:
            match event:
                case Content(text):
                    text, self._given = text.removeprefix(self._given), ""
                    if text:
                        parts.append(Content(text))
                case CallBegun(name):
                    self._given = ""
                    parts.append(NamedCall(self._num_calls, self._id(self._num_calls), name))
                    self._num_calls += 1
                case Arguments(text):
                    parts.append(CallArguments(self._num_calls - 1, text))
                case CallEnded(is_complete):
                    self._is_called |= is_complete
                    parts.append(event)
        return parts

    def _id(self, index: int) -> str:
        digest = hashlib.sha256(f"{self._name}.{index}".encode()).digest()
        letters = base64.b32encode(digest).decode().lower()
        return letters[:_SHORT_ID_CHARS] if self._has_short_ids else f"call_{letters[:_ID_CHARS]}"


def _delta(parts: Iterable[AnswerPart]) -> Delta:
    """What the parts add to a message, which has one content, whatever stands between its calls."""
    delta: Delta = {}
    for part in parts:
        match part:
            case Reasoning(text):
                delta["reasoning_content"] = text
            case Content(text):
                delta["content"] = delta.get("content", "") + text
            case NamedCall(index, call_id, name):
                call = {"index": index, "id": call_id, "type": "function"}
                delta.setdefault("tool_calls", []).append(call | {"function": {"name": name, "arguments": ""}})
            case CallArguments(index, text):
                calls = delta.setdefault("tool_calls", [])
                if not calls:
                    calls.append({"index": index, "function": {"arguments": ""}})
                calls[-1]["function"]["arguments"] += text
    return delta


class ParsedMessage:
    """A whole message, made of the deltas of one sequence."""

    def __init__(self) -> None:
        self._texts: dict[str, list[str]] = {"content": [], "reasoning_content": []}
        self._calls: list[dict[str, Any]] = []
        self._arguments: list[list[str]] = []

    def add(self, delta: Delta) -> None:
        for field, texts in self._texts.items():
            if field in delta:
                texts.append(delta[field])
        for part in delta.get("tool_calls", ()):
            if "id" in part:
                self._calls.append(part)
                self._arguments.append([])
            self._arguments[part["index"]].append(part["function"]["arguments"])

    def fields(self) -> dict[str, Any]:
        """The message in OpenAI's format."""
        content, reasoning = ("".join(texts) for texts in self._texts.values())
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if self._calls:
            message["content"] = content or None
            message["tool_calls"] = [
                {
                    "id": call["id"],
                    "type": "function",
                    "function": {"name": call["function"]["name"], "arguments": "".join(arguments)},
                }
                for call, arguments in zip(self._calls, self._arguments, strict=True)
            ]
        return message
