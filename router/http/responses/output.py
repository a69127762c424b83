"""A response while the model writes it: tokens become items, and at the end the whole object."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from baton.messages.generation import Chunk, Finished
from router.http.answer_items import AnswerItems, Begun, Ended, Grown, ItemChange, ItemKind
from router.http.parsed_text import AnswerPart, NamedCall, ParsedSequence
from router.http.responses.items import CallItem, Item, MessageItem, ReasoningItem


@dataclass(frozen=True, slots=True)
class ResponseDraft:
    """What is known of a response before its items.

    Its methods write JSON, since the items have log-probabilities, which are written piece by piece: a million numbers
    at once would hold the event loop.
    """

    id: str
    created_at: int
    """Seconds since the epoch."""
    model: str
    echoed: Mapping[str, Any]
    """Fields that repeat the request's."""
    has_logprobs: bool

    def in_progress(self) -> str:
        """The response before its end."""
        return self._object("in_progress")

    def failed(self, message: str) -> str:
        """The response of a request that failed."""
        return self._object("failed", error={"code": "server_error", "message": message})

    def ended(self, output: str, finish_reason: str, finished: Finished, num_reasoning_tokens: int, now: float) -> str:
        """The response at its end, complete or cut by its length.

        `output`: its items in JSON, separated by commas. `now`: seconds since the epoch.
        """
        status, usage = status_of(finish_reason), _usage(finished, num_reasoning_tokens)
        if status == "incomplete":
            return self._object(status, output, usage=usage, incomplete_details={"reason": "max_output_tokens"})
        return self._object(status, output, usage=usage, completed_at=int(now))

    def _object(self, status: str, output: str = "", **more: object) -> str:
        """The response with this status; `output`: its items, `more`: fields that are not null."""
        fields = {
            "id": self.id,
            "object": "response",
            "created_at": self.created_at,
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self.model,
            "usage": None,
            **self.echoed,
            **more,
        }
        return f'{as_text(fields)[:-1]},"output":[{output}]}}'


def status_of(finish_reason: str) -> str:
    """The status of a response that ended well."""
    return "incomplete" if finish_reason == "length" else "completed"


def as_text(body: Mapping[str, Any]) -> str:
    """An object as JSON, which may have text that is not valid Unicode."""
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"))


def _usage(finished: Finished, num_reasoning_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": finished.prompt_tokens,
        "input_tokens_details": {"cached_tokens": finished.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": finished.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
        "total_tokens": finished.prompt_tokens + finished.completion_tokens,
    }


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
        body = {"id": self.id, "type": self.kind, **more, "status": status}
        return f'{as_text(body)[:-1]},"content":[{part}]}}'

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


@dataclass(frozen=True, slots=True)
class EndedResponse:
    """A response that ended well."""

    json: str
    """The whole object, which may have text that is not valid Unicode."""
    status: str
    items: Sequence[OutputItem]


class ResponseInProgress:
    """One response, whose client gets it as a stream or as a whole.

    Log-probabilities are those of all tokens, in messages alone: the tokens before a message, which are of reasoning or
    markers, come with its first text.
    """

    def __init__(self, draft: ResponseDraft, sequence: ParsedSequence, name: str, first_number: int) -> None:
        """`sequence` parses the text. `name` is in the ids of all items, and so is their number, from `first_number`
        on.
        """
        self.draft = draft
        self._sequence = sequence
        self._name = name
        self._first_number = first_number
        self._items = AnswerItems(self._new)
        self._logprobs: list[str] = []
        """Log-probabilities that no item has yet."""
        self._finish_reason = ""

    @property
    def items(self) -> Sequence[OutputItem]:
        """All items so far."""
        return self._items.items

    def take_logprobs(self, logprobs: str) -> None:
        """Take the log-probabilities of the next tokens, as the entries of a list in JSON."""
        if logprobs:
            self._logprobs.append(logprobs)

    def take(self, chunk: Chunk) -> list[Change]:
        """Take tokens and their text, which is empty while a character is incomplete."""
        self._sequence.count(chunk.token_ids)
        return self._take(self._sequence.parts(chunk.text))

    def finish(self, finish_reason: str) -> list[Change]:
        """Take the end of the text, which ends the last item; that gets the last log-probabilities."""
        self._finish_reason = finish_reason
        changes = self._take(self._sequence.last_parts())
        for change in self._items.finish(is_complete=status_of(finish_reason) == "completed"):
            if isinstance(change, Ended) and change.item.kind == "message" and self._logprobs:
                changes.append(self._grown(change.item, ""))
            changes.append(self._changed(change))
        return changes

    def ended(self, finished: Finished, now: float) -> EndedResponse:
        """The response after its end. `now`: seconds since the epoch."""
        written = ",".join(item.ended() for item in self.items)
        num_reasoning_tokens = self._sequence.num_reasoning_tokens
        response = self.draft.ended(written, self._finish_reason, finished, num_reasoning_tokens, now)
        return EndedResponse(response, status_of(self._finish_reason), self.items)

    def _take(self, parts: Iterable[AnswerPart]) -> list[Change]:
        return list(map(self._changed, self._items.take(parts)))

    def _new(self, kind: ItemKind, index: int, call: NamedCall | None) -> OutputItem:
        own = _KINDS[kind]
        item = OutputItem(own, f"{_PREFIXES[own]}_{self._name}_{self._first_number + index}", index)
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
