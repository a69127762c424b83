"""Makes text from the tokens of a sequence, piece by piece, and cuts it at the first stop string of the answer.

Reasoning before the answer is not searched: a stop string there would end the answer before it has begun.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.messages.generation import Chunk, ReasoningBegin
from baton.messages.sampling import TokenLogprobs
from baton.text.detokenizer import TextCodec
from baton.text.ends import StopStrings
from baton.text.reasoning import AnswerFinder


class TextStream:
    """The text of one sequence. It is made token by token, so the result does not depend on how tokens were grouped."""

    __slots__ = ("_answer", "_detokenizer", "_keeps_stop", "_min_tokens", "_plain", "_search", "num_tokens")

    def __init__(
        self,
        codec: TextCodec | None,
        stop: Sequence[str],
        min_tokens: int,
        *,
        keeps_stop: bool = False,
        shown_tokens: Sequence[int] = (),
        context: Sequence[int] = (),
        reasoning: ReasoningBegin = "none",
    ) -> None:
        """`keeps_stop`: the text ends with the stop string or the stop token's text, instead of before it.
        `shown_tokens`: special tokens that have a text here. `context`: the prompt's tokens that the text continues.
        `reasoning`: where the text may begin with reasoning.
        """
        self._detokenizer = codec.detokenizer(shown_tokens, context) if codec is not None else None
        self._keeps_stop = keeps_stop
        self._search = StopStrings(stop, keeps_found=keeps_stop)
        self._answer = AnswerFinder(is_open=reasoning == "open") if reasoning != "none" else None
        self._plain = self._detokenizer if self._search.is_off else None
        """The detokenizer, if there are no stop strings to search for: its text is given out as it is."""
        self._min_tokens = min_tokens
        self.num_tokens = 0
        """Number of tokens so far, or up to the token that completed a stop string."""

    @property
    def found(self) -> str | None:
        """The stop string that ended the text."""
        return self._search.found

    def push(
        self,
        first_index: int,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs] = (),
        *,
        ends_with_stop_token: bool = False,
    ) -> Chunk:
        """The chunk for these tokens, without those after a stop string."""
        if self._plain is not None and not ends_with_stop_token:
            self.num_tokens += len(token_ids)
            push = self._plain.push
            piece = push(token_ids[0]) if len(token_ids) == 1 else "".join(map(push, token_ids))
            return Chunk(first_index, token_ids, piece, logprobs)
        detokenizer = self._detokenizer
        if detokenizer is None:
            self.num_tokens += len(token_ids)
            return Chunk(first_index, token_ids, "", logprobs)
        text = []
        taken = 0
        for offset, token in enumerate(token_ids):
            if self.found is not None:
                break
            taken += 1
            is_stop_token = ends_with_stop_token and offset == len(token_ids) - 1
            if is_stop_token and not self._keeps_stop:
                continue
            before, piece = self._parted(detokenizer.push(token))
            text.append(before)
            # A text may not end before min_tokens, so a stop string that lies before them is plain text.
            is_searched = first_index + taken > self._min_tokens
            text.append(self._search.push(piece) if is_searched else piece)
        self.num_tokens += taken
        return Chunk(first_index, token_ids[:taken], "".join(text), logprobs[:taken])

    def finish(self) -> str:
        """The text that was held back, once no token follows. It may contain a stop string."""
        if self.found is not None or self._detokenizer is None:
            return ""
        before, piece = self._parted(self._detokenizer.finish())
        if self._answer is not None:
            last_before, last = self._answer.finish()
            before, piece = before + last_before, piece + last
        return before + self._search.push(piece) + self._search.finish()

    def _parted(self, piece: str) -> tuple[str, str]:
        """A piece of text as what is not searched, and what is."""
        return ("", piece) if self._answer is None else self._answer.push(piece)
