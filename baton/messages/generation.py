"""What clients ask for and what they hear: a request, and the events of its stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton.messages.sampling import RepetitionDetection, TokenLogprobs
from baton.values import value


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A client's request as it arrived. Nothing in it is checked yet; None means absent."""

    prompt: str | Sequence[int] | None
    request_id: str = ""
    model: str = ""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] = field(default_factory=dict)
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool | None = None
    logprobs: int | None = None
    n: int | None = None
    best_of: int | None = None
    beam_width: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | None = None
    json_schema: str | None = None
    """What the answer must fit, as text; `{"type": "object"}` is any JSON object."""
    repetition_detection: RepetitionDetection | None = None
    priority: int = 0
    cache_salt: str = ""
    tenant: str = ""
    """The owner of the request, by the key that was shown; a client can't say it."""
    ttft_slo_ms: float | None = None
    """The longest that the first token may take, from the request's arrival at the router."""
    tpot_slo_ms: float | None = None
    """The longest mean time per output token after the first."""
    traceparent: str = ""
    """W3C trace context of whoever asks, as it came: nothing in it is checked."""
    call: int = 0
    """The how-manieth call of its client for this request it is, from 1; 0: the client does not say."""
    embeds: bool = False
    """Its prompt's embedding is wanted, and nothing generated."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """The request was admitted."""

    request_id: str
    seed: int
    prompt_tokens: int


@dataclass(slots=True)
class Chunk:
    """Tokens that follow the ones before, with the text that became certain. Not frozen, as `RequestDelta`."""

    first_index: int
    token_ids: Sequence[int]
    text: str
    logprobs: Sequence[TokenLogprobs] = ()
    sequence_index: int = 0

    @property
    def next_position(self) -> int:
        """Where its sequence goes on: a chunk without tokens, the rest of a text, counts as one."""
        return self.first_index + (len(self.token_ids) or 1)


TakeChunk = Callable[[Chunk], bool]
"""Sends a chunk at once, without waiting; False: it was not sent."""


@dataclass(frozen=True, slots=True)
class SequenceFinished:
    """One of several sequences ended; a request of one has none of these."""

    sequence_index: int
    finish_reason: str
    """stop or length."""
    stop_reason: int | str | None
    completion_tokens: int


@value(frozen=True, slots=True)
class Path:
    """Which nodes served the request, for people who debug; travels as trailing metadata, never as a field."""

    prefill_node: str
    """Empty when the prompt was computed where it was decoded."""
    decode_node: str
    attempts: int
    reason: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The one terminal event of a stream that ended well."""

    finish_reason: str
    """stop or length; of sequence 0 where there are several."""
    stop_reason: int | str | None
    prompt_tokens: int
    completion_tokens: int
    """The tokens of all sequences together."""
    cached_tokens: int
    queue_ms: float
    prefill_ms: float
    transfer_ms: float
    ttft_ms: float
    total_ms: float
    kv_bytes: int
    path: Path
    embedding: bytes = b""
    """The embedding, where one was asked for: a vector of length 1, float32, little-endian."""


GenerateEvent = Accepted | Chunk | SequenceFinished | Finished


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A model that can be asked for."""

    name: str
    max_model_len: int
    vocab_size: int
    has_end: bool = True
    """Whether it has an end-of-sequence token. Clients are not told."""
    embedding_size: int = 0
    """Numbers in an embedding; 0: no node that gives any has been seen. Clients are not told."""
