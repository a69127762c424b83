"""Writes the server-sent events of a stream of completions or of a chat, with as little work for each as possible."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from baton.errors import BatonError
from baton.messages.generation import Chunk, Finished, KnownText
from router.http.completions.logprobs import CHAT, AnswerFormat, TokenTexts
from router.http.errors import error_event
from router.http.generating import event_id
from router.http.json_body import quote
from router.http.parsed_text import Delta, ParsedSequence

NO_PROMPTS: Mapping[int, Sequence[int]] = {}
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """What a client wants in an answer beside the text."""

    usage: bool = False
    usage_in_all: bool = False
    logprobs: bool = False
    token_ids: bool = False
    """The ids of the output's tokens, and those of the prompt."""
    tokens_as_ids: bool = False
    """Log-probabilities name a token by its id, not by its text."""
    prompt_logprobs: bool = False
    """The log-probabilities of the prompt in a field of their own."""
    output: bool = True
    """The output; False: only the prompt is of interest, and one token is generated in vain."""


@dataclass(frozen=True, slots=True)
class Label:
    """The fields that are the same in every object of one answer."""

    id: str
    model: str
    created: int
    """Seconds since the epoch."""
    fingerprint: str | None = None
    """See `ModelCard.fingerprint`."""

    def head(self, kind: str) -> str:
        """The beginning of an object, up to its choices."""
        name, model = quote(self.id), quote(self.model)
        made = f'"created":{self.created},"model":{model},"system_fingerprint":{json.dumps(self.fingerprint)}'
        return f'{{"id":{name},"object":"{kind}",{made},"choices":['


def usage_of(prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0) -> dict[str, object]:
    """OpenAI's usage object, without the details of the output, which are known at its end."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def final_usage(
    ends: Sequence[Finished], num_reasoning_tokens: int = 0, *, has_output: bool = True
) -> dict[str, object]:
    """OpenAI's usage object of an answer to prompts that ended so. `has_output`: whether the client wants the output.

    Tokens that nodes drafted are in the place of OpenAI's predicted outputs.
    """
    outputs = ends if has_output else ()
    usage = usage_of(
        sum(end.prompt_tokens for end in ends),
        sum(end.completion_tokens for end in outputs),
        sum(end.cached_tokens for end in ends),
    )
    details = {
        "reasoning_tokens": num_reasoning_tokens,
        "accepted_prediction_tokens": sum(end.draft_counts.num_accepted for end in outputs),
        "rejected_prediction_tokens": sum(end.draft_counts.num_rejected for end in outputs),
    }
    return {**usage, "completion_tokens_details": details}


class EventWriter:
    """Writes the events of one stream."""

    def __init__(
        self,
        answer_format: AnswerFormat,
        label: Label,
        options: AnswerOptions,
        positions: Sequence[int],
        prompt_tokens: int,
        texts: Sequence[TokenTexts],
        prompts: Mapping[int, Sequence[int]] = NO_PROMPTS,
        echoes: Sequence[str] = (),
    ) -> None:
        """`positions`: where each sequence of the stream begins, not 0 for one that the client continues. `texts`: how
        the tokens of each are shown. `prompts`: the token ids of prompts, which the stream returns once, by the first
        sequence of each; empty if it returns none. `echoes`: the text with which each sequence begins; empty: with
        none.
        """
        self._format = answer_format
        self._options = options
        self._ids = [event_id([position]) for position in positions]
        """The parts of the next event's id: each sequence's position. They are kept as text, since they may be many."""
        self._echoes = echoes
        self._prompt_tokens = prompt_tokens
        self._num_tokens = sum(positions)
        head = label.head(answer_format.event_name)
        self._head = head
        self._heads = [f'{head}{{"index":{index},' for index in range(len(positions))]
        self._plain_after_choices = '],"usage":null}\n\n' if options.usage else "]}\n\n"
        self._plain_after_text = (
            f'{answer_format.text_tail},"logprobs":null,"finish_reason":null}}{self._plain_after_choices}'
        )
        self._is_plain = not (options.logprobs or options.token_ids or options.usage_in_all)
        self._logprobs = [answer_format.logprobs(text, 0, 0) for text in texts] if options.logprobs else []
        self._held_texts = [""] * len(positions)
        """Text without tokens, which is sent with the event that ends its sequence."""
        self._prompt_ids = {
            index: f',"prompt_token_ids":{json.dumps(list(token_ids))}' for index, token_ids in prompts.items()
        }

    @property
    def num_sequences(self) -> int:
        return len(self._ids)

    @property
    def num_reasoning_tokens(self) -> int:
        """How many tokens of all sequences are reasoning; known at the end."""
        return 0

    def opening(self) -> bytes:
        """The events before all generated text: in chats they have the role, else the prompt if it is repeated."""
        if not self._format.opening:
            if not self._echoes:
                return b""
            after_text = f'{self._format.text_tail},"logprobs":null,"finish_reason":null}}{self._after_choices()}'
            texts = [f"{self._format.text_head}{quote(echo)}{after_text}" for echo in self._echoes]
            return b"".join(self._event(f"{head}{text}") for head, text in zip(self._heads, texts, strict=True))
        after_text = f'{self._format.opening},"logprobs":null,"finish_reason":null}}]'
        ids = self._prompt_ids.pop(0, "")
        # The prompt's ids are in the first event alone, since a prompt may be long and the sequences many.
        ends = [ids + self._after_choices()[1:], *[self._after_choices()[1:]] * (len(self._heads) - 1)]
        return b"".join(self._event(f"{head}{after_text}{end}") for head, end in zip(self._heads, ends, strict=True))

    def chunk(self, chunk: Chunk) -> bytes:
        """The event for tokens and their text. Text without tokens is kept for the event that ends its sequence."""
        index = chunk.sequence_index
        self._ids[index] = event_id([chunk.next_position])
        if not chunk.token_ids:
            self._held_texts[index] += chunk.text
            return b""
        self._num_tokens += len(chunk.token_ids)
        after_text = self._plain_after_text if self._is_plain else self._after_text(chunk)
        return self._event(f"{self._heads[index]}{self._format.text_head}{quote(chunk.text)}{after_text}")

    def end(self, index: int, finish_reason: str, stop_reason: int | str | None) -> bytes:
        """The event for the end of a sequence."""
        held, self._held_texts[index] = self._held_texts[index], ""
        answer_format = self._format
        # A chat's last event has an empty delta, unless there is text.
        text = '"delta":{' if not held and answer_format.opening else f"{answer_format.text_head}{quote(held)}"
        reasons = f'"finish_reason":{quote(finish_reason)},"stop_reason":{json.dumps(stop_reason)}'
        return self._event(
            f'{self._heads[index]}{text}{answer_format.text_tail},"logprobs":null,{reasons}}}{self._after_choices()}'
        )

    def finish(self, finished: Finished) -> bytes:
        """The last events of a request that ended well: its usage, if that is wanted, and the end."""
        if not self._options.usage:
            return DONE
        usage = json.dumps(final_usage([finished], self.num_reasoning_tokens))
        # The events before it may name a fingerprint all the same: where the nodes came later that made it untrue.
        bits = ',"bit_exact":false' if finished.bit_exact is False else ""
        return self._event(f'{self._head}],"usage":{usage}{bits}}}\n\n') + DONE

    def error(self, error: BatonError) -> bytes:
        """The last event of a request that failed."""
        return error_event(error)

    def _event(self, data: str) -> bytes:
        """The event with this data, which ends with the empty line."""
        return f"id: {'.'.join(self._ids)}\ndata: {data}".encode()

    def _after_text(self, chunk: Chunk) -> str:
        """The part after the text, of an event that has more than text."""
        parts = [self._format.text_tail]
        logprobs = self._logprobs[chunk.sequence_index].take(chunk.logprobs) if self._options.logprobs else None
        parts.append(f',"logprobs":{json.dumps(logprobs)},"finish_reason":null')
        if self._options.token_ids:
            parts.append(f',"token_ids":{json.dumps(list(chunk.token_ids))}')
            parts.append(self._prompt_ids.pop(chunk.sequence_index, ""))
        parts.append(f"}}{self._after_choices()}")
        return "".join(parts)

    def _after_choices(self) -> str:
        """The end of an event, after its choices."""
        if not self._options.usage_in_all:
            return self._plain_after_choices
        return f'],"usage":{json.dumps(usage_of(self._prompt_tokens, self._num_tokens))}}}\n\n'


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
