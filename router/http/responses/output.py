"""The items of a response while the model writes them: reasoning, messages and calls, one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from router.http.answer_items import AnswerItems, Begun, Ended, Grown, ItemChange, ItemKind
from router.http.parsed_text import AnswerPart, NamedCall
from router.http.responses.items import CallItem, Item, MessageItem, ReasoningItem
from router.http.responses.objects import as_text, status_of

Kind = Literal["message", "reasoning", "function_call"]
_KINDS: Mapping[ItemKind, Kind] = {"text": "message", "reasoning": "reasoning", "call": "function_call"}
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
class OutputGrown:
    """An item has got more text, or log-probabilities."""

    item: OutputItem
    text: str
    logprobs: str
    """Entries of a list in JSON."""


@dataclass(frozen=True, slots=True)
class OutputEnded:
    """An item is complete, or was cut off: its status says which."""

    item: OutputItem


Change = Begun[OutputItem] | OutputGrown | OutputEnded


class Output:
    """The items of one response.

    Log-probabilities are those of all tokens, in messages alone: the tokens before a message, which are of reasoning or
    markers, come with its first text.
    """

    def __init__(self, name: str, first_number: int) -> None:
        """`name` is in the ids of all items, and so is their number, from `first_number` on."""
        self._name = name
        self._first_number = first_number
        self._items = AnswerItems(self._new)
        self._logprobs: list[str] = []
        """Log-probabilities that no item has yet."""

    @property
    def items(self) -> Sequence[OutputItem]:
        """All items so far."""
        return self._items.items

    def take_logprobs(self, logprobs: str) -> None:
        """Take the log-probabilities of the next tokens, as the entries of a list in JSON."""
        if logprobs:
            self._logprobs.append(logprobs)

    def take(self, parts: Iterable[AnswerPart]) -> list[Change]:
        """Take what the next tokens add."""
        return list(map(self._changed, self._items.take(parts)))

    def finish(self, parts: Iterable[AnswerPart], finish_reason: str) -> list[Change]:
        """Take what the end of the text adds, and end the last item, which gets the last log-probabilities."""
        changes = self.take(parts)
        for change in self._items.finish(is_complete=status_of(finish_reason) == "completed"):
            if isinstance(change, Ended) and change.item.kind == "message" and self._logprobs:
                changes.append(self._grown(change.item, ""))
            changes.append(self._changed(change))
        return changes

    def _new(self, kind: ItemKind, place: int, call: NamedCall | None) -> OutputItem:
        own = _KINDS[kind]
        item = OutputItem(own, f"{_PREFIXES[own]}_{self._name}_{self._first_number + place}", place)
        if call is not None:
            item.call_id, item.name = call.id, call.name
        return item

    def _changed(self, change: ItemChange[OutputItem]) -> Change:
        """Change the item as it was said; returns what that is for clients."""
        match change:
            case Grown(item, text):
                return self._grown(item, text)
            case Ended(item, is_complete):
                item.status = "completed" if is_complete else "incomplete"
                return OutputEnded(item)
            case Begun():
                return change

    def _grown(self, item: OutputItem, text: str) -> OutputGrown:
        item.pieces.append(text)
        if item.kind != "message":
            return OutputGrown(item, text, "")
        logprobs, self._logprobs = self._logprobs, []
        item.logprobs += logprobs
        return OutputGrown(item, text, ", ".join(logprobs))
