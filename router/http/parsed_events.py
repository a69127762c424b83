"""Writes the events of a chat's stream whose text is parsed: reasoning, content and tool calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

from baton.messages.generation import Chunk, KnownText
from router.http.answer_format import CHAT
from router.http.event_id import event_id
from router.http.events import NO_PROMPTS, AnswerOptions, EventWriter, Label
from router.http.logprobs import TokenTexts
from router.http.parsed_text import Delta, ParsedSequence

_json: Callable[[object], str] = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class ParsedEventWriter(EventWriter):
    """Writes one event for a chunk, as `EventWriter` does, but with the parts of its text.

    A chunk that adds nothing has no event, unless it has tokens that clients want. Text that was held until the end
    comes with the event that ends its sequence, and counts as one more position, so that a client which has it does not
    get it again.
    """

    def __init__(
        self,
        sequences: Sequence[ParsedSequence],
        label: Label,
        options: AnswerOptions,
        positions: Sequence[int],
        prompt_tokens: int,
        texts: Sequence[TokenTexts],
        prompts: Mapping[int, Sequence[int]] = NO_PROMPTS,
    ) -> None:
        super().__init__(CHAT, label, options, positions, prompt_tokens, texts, prompts)
        self._sequences = sequences
        self._begin = positions
        self._reached = [0] * len(positions)
        """The position of each sequence."""
        self._has_end = [False] * len(positions)
        """Whether the client has the text with which the sequence ended."""

    @property
    def num_reasoning_tokens(self) -> int:
        return sum(sequence.num_reasoning_tokens for sequence in self._sequences)

    def chunk(self, chunk: Chunk) -> bytes:
        index = chunk.sequence_index
        self._reached[index] = chunk.next_position
        if isinstance(chunk, KnownText):
            self._sequences[index].count(chunk.known_token_ids)
            self._sequences[index].push(chunk.text)
            return b""
        if not chunk.token_ids:
            self._has_end[index] = chunk.next_position <= self._begin[index]
            return super().chunk(chunk)
        self._sequences[index].count(chunk.token_ids)
        delta = self._sequences[index].push(chunk.text)
        self._ids[index] = event_id([chunk.next_position])
        self._num_tokens += len(chunk.token_ids)
        if self._is_plain:
            if not delta:
                return b""
            return self._event(f'{self._heads[index]}"delta":{_json(delta)[:-1]}{self._plain_after_text}')
        return self._event(f'{self._heads[index]}"delta":{_json(delta)[:-1]}{self._after_text(chunk)}')

    def end(self, index: int, finish_reason: str, stop_reason: int | str | None) -> bytes:
        held, self._held_texts[index] = self._held_texts[index], ""
        sequence = self._sequences[index]
        delta: Delta = sequence.finish(held)
        reached, begin = self._reached[index], self._begin[index]
        if self._has_end[index] or begin > reached:
            delta = {}
        elif delta and not held:
            self._ids[index] = event_id([reached + 1])
        reason = _json(sequence.finish_reason(finish_reason))
        after = f'"logprobs":null,"finish_reason":{reason},"stop_reason":{_json(stop_reason)}}}{self._after_choices()}'
        return self._event(f'{self._heads[index]}"delta":{_json(delta)},{after}')
