"""The items of a response while the model writes them: reasoning, messages and calls, one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from baton.text.tool_calls.events import CallEnded, Content
from router.http.parsed_text import AnswerPart, CallArguments, NamedCall, Reasoning
from router.http.responses.items import CallItem, Item, MessageItem, ReasoningItem
from router.http.responses.objects import as_text, status_of

Kind = Literal["message", "reasoning", "function_call"]
_PREFIXES: Mapping[Kind, str] = {
    "message": MessageItem.prefix,
    "reasoning": ReasoningItem.prefix,
    "function_call": CallItem.prefix,
}


@dataclass(slots=True)
class OutputItem:
    """One item."""

    kind: Kind
    id: str
    place: int
    """Its place among the items of the response."""
    call_id: str = ""
    name: str = ""
    status: str = ""
    """How the item ended; empty until then."""
    pieces: list[str] = field(default_factory=list)
    logprobs: list[str] = field(default_factory=list)
    """Log-probabilities as the entries of lists in JSON."""

    @property
    def text(self) -> str:
        """The text so far; the arguments, if the item is a call."""
        return "".join(self.pieces)

    @property
    def all_logprobs(self) -> str:
        """The log-probabilities so far, as a list in JSON."""
        return f"[{', '.join(self.logprobs)}]"

    def part(self, text: str, logprobs: str = "[]") -> str:
        """The item's one part with this text, in JSON."""
        if self.kind == "reasoning":
            return as_text({"type": "reasoning_text", "text": text})
        part: dict[str, Any] = {"type": "output_text", "text": text, "annotations": []}
        return f'{as_text(part)[:-1]},"logprobs":{logprobs}}}'

    def begun(self) -> str:
        """The item as OpenAI's object, before its text."""
        return self._object("in_progress", "", "")

    def ended(self) -> str:
        """The item as OpenAI's object, at its end."""
        text = self.text
        return self._object(self.status, text, self.part(text, self.all_logprobs))

    def _object(self, status: str, text: str, part: str) -> str:
        if self.kind == "function_call":
            return as_text(CallItem(self.id, (text,), self.call_id, self.name, status).as_object())
        more: dict[str, Any] = {"summary": []} if self.kind == "reasoning" else {"role": "assistant"}
        found = {"id": self.id, "type": self.kind, **more, "status": status}
        return f'{as_text(found)[:-1]},"content":[{part}]}}'

    def as_item(self) -> Item:
        """The item for the conversation."""
        texts = (self.text,)
        match self.kind:
            case "reasoning":
                return ReasoningItem(self.id, texts, self.status)
            case "function_call":
                return CallItem(self.id, texts, self.call_id, self.name, self.status)
            case _:
                return MessageItem(self.id, texts, "assistant", self.status)


@dataclass(frozen=True, slots=True)
class Begun:
    """An item has begun."""

    item: OutputItem


@dataclass(frozen=True, slots=True)
class Grown:
    """An item has got more text, or log-probabilities."""

    item: OutputItem
    text: str
    logprobs: str
    """Entries of a list in JSON."""


@dataclass(frozen=True, slots=True)
class Ended:
    """An item is complete, or was cut off."""

    item: OutputItem


Change = Begun | Grown | Ended


class Output:
    """The items of one response.

    One begins when the one before it has ended. An answer without any text is an empty message. Log-probabilities are
    those of all tokens, in messages alone: the tokens before a message, which are of reasoning or markers, come with
    its first text.
    """

    def __init__(self, name: str, first_number: int) -> None:
        """`name` is in the ids of all items, and so is their number, from `first_number` on."""
        self._name = name
        self._first_number = first_number
        self._items: list[OutputItem] = []
        self._open: OutputItem | None = None
        self._logprobs: list[str] = []
        """Log-probabilities that no item has yet."""

    @property
    def items(self) -> list[OutputItem]:
        """All items so far."""
        return self._items

    def take(self, parts: Iterable[AnswerPart], logprobs: str = "") -> list[Change]:
        """Take what the next tokens add. `logprobs`: theirs, as the entries of a list in JSON."""
        if logprobs:
            self._logprobs.append(logprobs)
        changes: list[Change] = []
        for part in parts:
            match part:
                case Reasoning(text):
                    changes += self._grow("reasoning", text)
                case Content(text):
                    changes += self._grow("message", text)
                case NamedCall(_, call_id, name):
                    changes += self._begin("function_call", call_id, name)
                case CallArguments(_, text):
                    changes += self._grow("function_call", text)
                case CallEnded(is_complete):
                    changes += self._end("completed" if is_complete else "incomplete")
        return changes

    def finish(self, parts: Iterable[AnswerPart], finish_reason: str) -> list[Change]:
        """Take what the end of the text adds, and end the last item."""
        changes = self.take(parts)
        if not self._items:
            changes += self._begin("message")
        if self._open is not None and self._open.kind == "message" and self._logprobs:
            changes += self._grow("message", "")
        return changes + self._end(status_of(finish_reason))

    def _grow(self, kind: Kind, text: str) -> list[Change]:
        changes = self._begin(kind) if self._open is None or self._open.kind != kind else []
        item = self._items[-1]
        item.pieces.append(text)
        logprobs = ""
        if kind == "message":
            logprobs = ", ".join(self._logprobs)
            item.logprobs += self._logprobs
            self._logprobs = []
        return [*changes, Grown(item, text, logprobs)]

    def _begin(self, kind: Kind, call_id: str = "", name: str = "") -> list[Change]:
        ended = self._end("completed")
        place = len(self._items)
        item_id = f"{_PREFIXES[kind]}_{self._name}_{self._first_number + place}"
        self._open = OutputItem(kind, item_id, place, call_id, name)
        self._items.append(self._open)
        return [*ended, Begun(self._open)]

    def _end(self, status: str) -> list[Change]:
        item, self._open = self._open, None
        if item is None:
            return []
        item.status = status
        return [Ended(item)]
