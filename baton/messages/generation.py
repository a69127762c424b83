"""The messages between clients and routers: a request, and the events of its response stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from baton.messages.adapters import AdapterSource
from baton.messages.logprob_rows import joined_logprobs
from baton.messages.node_model import Capability
from baton.messages.pooling import NO_POOLING_FILES, ModelPooling, PoolingRequest
from baton.messages.sampling import RepetitionDetection, SamplingDefaults, TokenLogprobs
from baton.messages.speculation import NO_DRAFTS, DraftCounts
from baton.model_formats.encoder_decoders import EncoderDecoder
from baton.values import value


@dataclass(frozen=True, slots=True)
class PromptEmbeds:
    """Rows of a prompt, as the model's embedding would give them for tokens."""

    data: bytes
    """The bytes of a safetensors file with one tensor [rows, numbers in a row]; see
    `baton.messages.prompt_rows`."""
    start: int | None = None
    """The position of the first row in a prompt of token ids, whose ids there are ignored; None, for the only one of a
    request: the rows come before the prompt, which may be missing."""


Delivery = Literal["stream", "whole", "json"]
"""How a client gets an answer: as a stream, to which it may come back for a part; only when it is complete; or with
log-probabilities that are kept as JSON until it is complete. Nobody comes back for a part of the last two."""
ReasoningBegin = Literal["none", "closed", "open"]
"""Whether a text may begin with reasoning: not at all, behind a marker, or at once, where the prompt has opened it."""


@value(frozen=True, slots=True)
class GenerateRequest:
    """A client's request as it arrived, before any check. None stands for an absent field."""

    prompt: str | Sequence[int] | None
    request_id: str = ""
    model: str = ""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    top_n_sigma: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] = ()
    bad_words: Sequence[str] = ()
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int | None = None
    best_of: int | None = None
    beam_width: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | None = None
    json_schema: str | None = None
    """The JSON schema that the output must satisfy, as text; `{"type": "object"}` permits any JSON object."""
    regex: str | None = None
    choice: Sequence[str] = ()
    grammar: str | None = None
    """What else the output must be; see `SamplingParams`."""
    constraint_field: str = ""
    """The client's field that says what the output must be, for refusals; empty: it is the one of the core's name."""
    repetition_detection: RepetitionDetection | None = None
    speculation: bool | None = None
    """Whether nodes that draft tokens draft this request's; None: they do."""
    priority: int = 0
    cache_salt: str = ""
    tenant: str = ""
    """The owner of the request, found by the API key of the call; clients can't set it."""
    min_priority: int | None = None
    """The smallest priority that this API key may ask for; None: the router's setting says it."""
    service_class: str = ""
    """The class that this API key's requests have, of `baton.security.quotas.KeyClass`; empty: the priority says it."""
    weight: float = 1.0
    """How much of the service the tenant gets beside others that wait. Like the class, only the router sets it."""
    is_further_part: bool = False
    """Whether its call has another part that counts as the request in quotas of requests."""
    ttft_slo_ms: float | None = None
    """Objective: the longest time to the first token, from the request's arrival at the router."""
    tpot_slo_ms: float | None = None
    """Objective: the longest mean time per output token after the first."""
    traceparent: str = ""
    """W3C trace context of the client, as received: not checked."""
    call: int = 0
    """The number of the client's call for this request, counted from 1; 0: the client does not number its calls."""
    pooling: PoolingRequest | None = None
    """The vector that the client asks for, made of the prompt; None: tokens are generated."""
    shown_tokens: Sequence[int] = ()
    """Special tokens whose texts are part of the output's text. Like the next two, only the HTTP service sets it."""
    is_parsed: bool = False
    """Whether the output's text is parsed as a whole, so that a resumed stream begins with `KnownText`."""
    reasoning: ReasoningBegin = "none"
    """Whether the output may begin with reasoning, in which stop strings mean nothing."""
    prompt_embeds: Sequence[PromptEmbeds] = ()
    """Rows in place of parts of the prompt."""
    images: Sequence[bytes] = ()
    """Encoded images, in the order of their places in the prompt: a text has the model's image token once for each, a
    prompt of token ids once for each row of an image."""
    audio: bytes = b""
    """Speech for a model that writes it down: one channel of 16-bit little-endian PCM, 16,000 samples a second, at most
    MAX_AUDIO_BYTES. The prompt is then the beginning of what its decoder writes, as token ids."""
    delivery: Delivery = "stream"
    """How the client gets the answer. Only the HTTP service sets it."""
    schemas: Mapping[str, str] = field(default_factory=dict)
    """JSON schemas that are checked and otherwise not used, by the field that a refusal names."""


@value(frozen=True, slots=True)
class Accepted:
    """The first event of a stream: the router has admitted the request."""

    request_id: str
    seed: int
    prompt_tokens: int
    """The length of the prompt in tokens."""
    contexts: Sequence[Sequence[int]] = ((),)
    """For each prompt of the call, the last tokens of it that its outputs' texts depend on. Not sent to clients."""


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """The log-probabilities of the prompt's tokens from the second one on. Comes once, before all tokens."""

    positions: Sequence[TokenLogprobs]


@dataclass(slots=True)
class Chunk:
    """The next tokens of a sequence, and the text that they complete.

    One is made for each token, so this class is not frozen (see `RequestDelta`); treat it as if it were.
    """

    first_index: int
    """The output index of the first token."""
    token_ids: Sequence[int]
    text: str
    logprobs: Sequence[TokenLogprobs] = ()
    sequence_index: int = 0

    @property
    def next_position(self) -> int:
        """The output index behind this chunk. A chunk without tokens, the rest of a text, counts as one token."""
        return self.first_index + (len(self.token_ids) or 1)


@dataclass(slots=True)
class KnownText(Chunk):
    """Text that the client of a resumed stream has already, so that its tokens are none that come next."""

    known_token_ids: Sequence[int] = ()
    """The tokens of the text."""


def joined(chunks: Sequence[Chunk]) -> Chunk:
    """One chunk in place of several of one sequence that follow each other."""
    return Chunk(
        chunks[0].first_index,
        tuple(token for chunk in chunks for token in chunk.token_ids),
        "".join(chunk.text for chunk in chunks),
        joined_logprobs([chunk.logprobs for chunk in chunks if chunk.logprobs]),
        chunks[0].sequence_index,
    )


TakeChunk = Callable[[Chunk], bool]
"""Sends a chunk at once, without waiting; returns False if the chunk was not sent."""


@dataclass(frozen=True, slots=True)
class SequenceFinished:
    """One sequence of a request with several sequences ended; a request with one sequence has no such event."""

    sequence_index: int
    finish_reason: str
    """stop or length."""
    stop_reason: int | str | None
    completion_tokens: int


@value(frozen=True, slots=True)
class Path:
    """The nodes that served a request, for debugging. Sent as trailing metadata, not as a field of a message."""

    prefill_node: str
    """Empty when the decode node computed the prompt."""
    decode_node: str
    attempts: int
    """The number of attempts, the successful one included."""
    reason: str
    """Why the router chose these nodes."""


@value(frozen=True, slots=True)
class Finished:
    """The last event of a stream that ended without an error."""

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
    """Bytes of KV that were transferred between nodes."""
    path: Path
    embedding: bytes = b""
    """The vector, if the request is for one (an embedding, or the outputs of a classification head): float32,
    little-endian."""
    draft_counts: DraftCounts = NO_DRAFTS
    """Counts of the drafts of all sequences. Those of attempts that ended before the router resumed the request are
    missing."""
    bit_exact: bool | None = None
    """Whether its tokens are a function of the request alone: False if nodes of several numerics have computed them, or
    a node that is not bit-exact. None: an older router does not say it."""


GenerateEvent = Accepted | PromptLogprobs | Chunk | SequenceFinished | Finished


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A model that the cluster serves."""

    name: str
    max_model_len: int
    vocab_size: int
    has_end: bool = True
    """Whether the model has an end-of-sequence token. Not sent to clients."""
    embedding_size: int = 0
    """Numbers in an embedding; 0: the router has seen no node that computes embeddings. Not sent to clients."""
    fingerprint: str = ""
    """A name for the weights and the numerics of the nodes, OpenAI's `system_fingerprint`: equal names, equal tokens;
    empty: the router has seen no node, or one of them is not bit-exact."""
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    """The sampling parameters of a request that leaves them unset. HTTP clients see them in /v1/models."""
    permits_extra_keys: bool = False
    """Whether objects may have further keys where their JSON schema does not say. Not sent to clients."""
    row_width: int = 0
    """The number of values in a row that takes a token's place in a prompt; 0: the model takes no rows, or the router
    has seen no node. Not sent to clients."""
    capabilities: frozenset[Capability] = frozenset()
    """The model's capabilities; empty: the router has seen no node."""
    pooling: ModelPooling = NO_POOLING_FILES
    """The kinds of vectors that the model makes. Not sent to clients."""
    source: EncoderDecoder | None = None
    """The model's encoder and decoder; None: it has not both. Not sent to clients."""
    adapters: Mapping[str, AdapterSource] = field(default_factory=dict)
    """The adapters that clients may name as their model, by name."""
    parent: str = ""
    """The model of which this one is an adapter; empty: this is no adapter."""
    root: str = ""
    """The directory of the adapter's files; empty: this is no adapter."""

    def with_adapters(self) -> Sequence[ModelCard]:
        """This model and a card for each adapter, as clients see them."""
        cards = [
            replace(self, name=name, adapters={}, parent=self.name, root=source.directory)
            for name, source in self.adapters.items()
        ]
        return [self, *cards]
