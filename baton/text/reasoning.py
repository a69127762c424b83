"""Splits a model's reasoning, `<think>…</think>` at the beginning of its text, from its answer, piece by piece.

The rules:

1. Reasoning stands at the beginning: behind white space and `<think>`, or, where the prompt has opened the block, from
   the first character on. A text that ends before `</think>` is reasoning as a whole. Later markers are plain text.
2. The MAX_SPACES characters of white space next to a marker belong to it. No other text is lost.
3. Held is at most a marker with that white space. The parts are a function of the text: how it was cut into pieces
   changes only the cuts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, auto

BEGIN = "<think>"
END = "</think>"
MAX_SPACES = 64
_END_BYTES = END.encode()


def opens_reasoning(prompt: str) -> bool:
    """Whether a prompt's text ends within a block of reasoning that it has opened itself."""
    return prompt[-len(BEGIN) - MAX_SPACES :].rstrip().endswith(BEGIN)


class _State(Enum):
    BEGIN = auto()
    BEHIND_BEGIN = auto()
    REASONING = auto()
    BEHIND_END = auto()
    ANSWER = auto()


class ReasoningCounter:
    """Counts the tokens of the reasoning with which an output begins, if it begins with reasoning.

    They are all tokens up to the one with which `</think>` is complete, or all tokens of an output without it: markers,
    and white space before the reasoning and in front of `</think>`, count as reasoning, and white space behind it does
    not. A token that ends `</think>` and begins the answer counts as reasoning. The count is a function of the tokens,
    so drafts, joined chunks and resumed streams don't change it.
    """

    __slots__ = ("_end", "_is_over", "_spelling", "num_tokens")

    def __init__(self, spelling: Callable[[int], bytes]) -> None:
        """`spelling`: the bytes that a token stands for."""
        self._spelling = spelling
        self._end = b""
        """The last bytes, of which `</think>` may be the continuation."""
        self._is_over = False
        self.num_tokens = 0

    def push(self, token_ids: Sequence[int]) -> None:
        """Take the next tokens of the output."""
        if self._is_over:
            return
        for token in token_ids:
            self.num_tokens += 1
            self._end += self._spelling(token)
            if _END_BYTES in self._end:
                self._is_over = True
                return
            self._end = self._end[1 - len(_END_BYTES) :]


class ReasoningSplitter:
    """Splits one text into its reasoning and the rest."""

    __slots__ = ("_held", "_is_open", "_num_skipped", "_state", "has_reasoning")

    def __init__(self, *, is_open: bool) -> None:
        """`is_open`: the prompt has opened the reasoning."""
        self._is_open = is_open
        self._state = _State.BEGIN
        self._held = ""
        self._num_skipped = 0
        self.has_reasoning = False
        """Whether the text so far begins with reasoning, which may be empty."""

    @property
    def is_undecided(self) -> bool:
        """Whether it is not known yet if the text begins with reasoning."""
        return self._state is _State.BEGIN and not self._is_open

    def push(self, text: str) -> tuple[str, str]:
        """Take the next piece; returns what is certain of the reasoning, and of the rest."""
        if self._state is _State.ANSWER:
            return "", text
        self._held += text
        return self._split(is_last=False)

    def finish(self) -> tuple[str, str]:
        """Return what was held, when no text follows. Idempotent."""
        return self._split(is_last=True)

    def _split(self, *, is_last: bool) -> tuple[str, str]:
        reasoning = answer = ""
        if self._state is _State.BEGIN:
            self._begin(is_last=is_last)
        if self._state is _State.BEHIND_BEGIN:
            self._skip_spaces(_State.REASONING)
        if self._state is _State.REASONING:
            reasoning = self._reasoning(is_last=is_last)
        if self._state is _State.BEHIND_END:
            self._skip_spaces(_State.ANSWER)
        if self._state is _State.ANSWER:
            answer, self._held = self._held, ""
        return reasoning, answer

    def _begin(self, *, is_last: bool) -> None:
        rest = self._held.lstrip()
        num_spaces = len(self._held) - len(rest)
        may_open = num_spaces <= MAX_SPACES
        if may_open and rest.startswith(BEGIN):
            self._held, self._state = rest[len(BEGIN) :], _State.BEHIND_BEGIN
            self.has_reasoning = True
        elif not may_open or is_last or not BEGIN.startswith(rest):
            self._state = _State.BEHIND_BEGIN if self._is_open else _State.ANSWER
            self.has_reasoning = self._is_open

    def _skip_spaces(self, then: _State) -> None:
        window = self._held[: MAX_SPACES - self._num_skipped]
        rest = window.lstrip()
        self._num_skipped += len(window) - len(rest)
        self._held = self._held[len(window) - len(rest) :]
        if self._held:
            self._state, self._num_skipped = then, 0

    def _reasoning(self, *, is_last: bool) -> str:
        start = self._held.find(END)
        if start >= 0:
            text, self._held = self._held[:start], self._held[start + len(END) :]
            self._state = _State.BEHIND_END
            return text[: _without_spaces(text)]
        if is_last:
            text, self._held = self._held, ""
            return text
        start = self._held.rfind(END[0], max(0, len(self._held) - len(END) + 1))
        before = self._held[:start] if start >= 0 and END.startswith(self._held[start:]) else self._held
        sure = _without_spaces(before)
        text, self._held = self._held[:sure], self._held[sure:]
        return text


class AnswerFinder:
    """Finds where the answer begins in a text that may begin with reasoning; no text is left out."""

    __slots__ = ("_held", "_splitter")

    def __init__(self, *, is_open: bool) -> None:
        """`is_open`: the prompt has opened the reasoning."""
        self._splitter = ReasoningSplitter(is_open=is_open)
        self._held = ""

    def push(self, text: str) -> tuple[str, str]:
        """Take the next piece; returns what is certain of the text before the answer, and of the answer."""
        return self._parted(text, self._splitter.push(text)[1])

    def finish(self) -> tuple[str, str]:
        """Return what was held, when no text follows. Idempotent."""
        return self._parted("", self._splitter.finish()[1])

    def _parted(self, text: str, answer: str) -> tuple[str, str]:
        text, self._held = self._held + text, ""
        if self._splitter.is_undecided:
            self._held = text
            return "", ""
        return text[: len(text) - len(answer)], answer


def _without_spaces(text: str) -> int:
    """The length of a text without the white space at its end that belongs to a marker."""
    return max(len(text.rstrip()), len(text) - MAX_SPACES)
