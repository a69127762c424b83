"""The items of an answer - its reasoning, its texts and its calls - of which at most one is open at a time.

OpenAI's API of responses calls them output items, Anthropic's API content blocks; the rules are the same in both:

1. An item begins with the first part of its kind, and each call is an item of its own.
2. The item that is open ends before the next one begins. A call ends when its arguments do. Arguments without an open
   call are a fault of the parser.
3. The end of the answer ends the last item. An answer without any parts has one item, an empty text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from baton.text.tool_calls.events import CallEnded, Content
from router.http.parsed_text import AnswerPart, CallArguments, NamedCall, Reasoning

T = TypeVar("T")
ItemKind = Literal["reasoning", "text", "call"]


@dataclass(frozen=True, slots=True)
class Begun(Generic[T]):
    """An item has begun."""

    item: T


@dataclass(frozen=True, slots=True)
class Grown(Generic[T]):
    """An item has got more text, or more of its arguments."""

    item: T
    text: str


@dataclass(frozen=True, slots=True)
class Ended(Generic[T]):
    """An item has ended."""

    item: T
    is_complete: bool
    """False: it was cut off."""


ItemChange = Begun[T] | Grown[T] | Ended[T]


class AnswerItems(Generic[T]):
    """The items of one answer, in the order in which the model writes them."""

    def __init__(self, new: Callable[[ItemKind, int, NamedCall | None], T]) -> None:
        """`new` makes an item of its kind, its place among the items, and the call that it is."""
        self._new = new
        self._items: list[T] = []
        self._open: ItemKind | None = None
        """The kind of the last item while that is open."""

    @property
    def items(self) -> Sequence[T]:
        """All items so far."""
        return self._items

    def take(self, parts: Iterable[AnswerPart]) -> list[ItemChange[T]]:
        """Take the next parts of the answer; returns how they change its items.

        Raises ValueError for arguments while no call is open.
        """
        changes: list[ItemChange[T]] = []
        for part in parts:
            match part:
                case Reasoning(text):
                    changes += self._grow("reasoning", text)
                case Content(text):
                    changes += self._grow("text", text)
                case NamedCall():
                    changes += self._begin("call", part)
                case CallArguments(_, text):
                    changes += self._grow("call", text)
                case CallEnded(is_complete):
                    changes += self._end(is_complete=is_complete)
        return changes

    def finish(self, *, is_complete: bool) -> list[ItemChange[T]]:
        """Take the end of the answer. `is_complete`: whether it ended by itself."""
        changes = [] if self._items else self._begin("text")
        return changes + self._end(is_complete=is_complete)

    def _grow(self, kind: ItemKind, text: str) -> list[ItemChange[T]]:
        if kind == "call" and self._open != kind:
            raise ValueError("arguments came while no call was open")
        changes = [] if self._open == kind else self._begin(kind)
        return [*changes, Grown(self._items[-1], text)]

    def _begin(self, kind: ItemKind, call: NamedCall | None = None) -> list[ItemChange[T]]:
        ended = self._end(is_complete=True)
        self._open = kind
        self._items.append(self._new(kind, len(self._items), call))
        return [*ended, Begun(self._items[-1])]

    def _end(self, *, is_complete: bool) -> list[ItemChange[T]]:
        kind, self._open = self._open, None
        return [] if kind is None else [Ended(self._items[-1], is_complete)]
