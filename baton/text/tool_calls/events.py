"""What a text with tool calls consists of. The sources of all events of a text, joined, are that text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader of the answer."""

    text: str

    @property
    def source(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call of a tool. Until it has ended, its arguments follow, and nothing else."""

    name: str
    source: str
    """The text from the format's marker up to the arguments."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """The next piece of a call's arguments, which are a JSON object."""

    text: str
    """The same JSON as in the source; only control characters in strings are escaped here, as JSON demands."""
    source: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """The end of a call."""

    is_complete: bool
    """Whether the arguments are a whole JSON object; not so if the text ended or became malformed within them."""

    @property
    def source(self) -> str:
        return ""


@dataclass(frozen=True, slots=True)
class Marker:
    """Text that belongs to the format alone: what ends a call, and white space around calls."""

    source: str


ToolEvent = Content | CallBegun | Arguments | CallEnded | Marker
