"""What routers and nodes say to each other."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from baton.errors import TransferCause
from baton.messages.ids import AttemptKey
from baton.messages.kv_cache import KVCacheUpdate
from baton.messages.sampling import SamplingParams, TokenLogprobs
from baton.values import value


class Role(enum.Enum):
    """What a process does in the cluster."""

    PREFILL = "prefill"
    DECODE = "decode"
    ROUTER = "router"

    __hash__ = object.__hash__  # by identity: Enum's own is a call into Python, in every lookup


@dataclass(frozen=True, slots=True)
class KVSource:
    """The prefill node whose blocks hold a request's prompt: where the decode node opens its link."""

    node_id: str
    incarnation: str
    address: str


class Leg(enum.Enum):
    """Which part of a request this node runs."""

    WHOLE = "whole"
    """Prompt and generation, both here."""
    PREFILL = "prefill"
    """Compute the tokens that came with the request, offer their blocks, sample the next one, end HANDED_OFF."""
    DECODE = "decode"
    """Pull those blocks from `kv_source`, then go on behind that token."""
    EMBED = "embed"
    """Compute the prompt, and end STOPPED with the embedding of its last token. Nothing is generated."""

    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class NodeDescription:
    """What one incarnation of a node is: its answer to a router, and (as JSON) its record in the registry."""

    node_id: str
    incarnation: str
    role: Role
    address: str
    pid: int
    version: str
    model: str
    model_fingerprint: str
    dtype: str
    numerics: str
    bit_exact: bool
    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    eos_token_ids: frozenset[int]
    on_transfer_failure: str = "reroute"
    """What a decode node does when a prompt's KV does not come: reroute, recompute or fail."""
    kv_layout: str = ""
    """What decides the keys of cached blocks, beside the fields above; see
    `baton.engine.kv_cache.block_hash.CacheKeyFields`."""
    block_bytes: int = 0
    """Bytes of one block, of all groups of layers."""
    max_num_seqs: int = 0
    """Sequences that it runs at once; 0: not known."""
    max_num_batched_tokens: int = 0
    """Tokens that it computes in one step; 0: not known."""
    link_protocol: int = 0
    """What it speaks with other nodes when KV is handed over; 0: not known."""
    embedding_size: int = 0
    """Numbers in an embedding of its model; 0: it gives none."""

    @property
    def kv_source(self) -> KVSource:
        """This node as the place where a decode node finds a prompt's KV."""
        return KVSource(self.node_id, self.incarnation, self.address)


@value(frozen=True, slots=True)
class Submit:
    """Router to node: run this leg of this attempt."""

    attempt: AttemptKey
    leg: Leg
    prompt_token_ids: Sequence[int]
    sampling_params: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    kv_source: KVSource | None = None
    output_token_ids: Sequence[int] = ()
    """What an earlier attempt generated: computed with the prompt, and generation goes on behind it."""
    traceparent: str = ""
    """W3C trace context of the request's span; empty: it is not traced."""
    takeover: int = 0
    """See `Adopt.takeover`."""

    @property
    def num_sequences(self) -> int:
        """How many the node computes at once; a prefill leg computes the prompt alone."""
        params = self.sampling_params
        return 1 if self.leg is Leg.PREFILL else params.beam_width or params.n


@value(frozen=True, slots=True)
class Abort:
    """Router to node: this attempt is over, free everything. Idempotent; unknown attempts are ignored."""

    attempt: AttemptKey
    reason: str
    sequence_index: int | None = None
    """Only this one of its sequences is over."""
    takeover: int = 0
    """See `Adopt.takeover`; an abort with a number below the owner's changes nothing."""


@dataclass(frozen=True, slots=True)
class WatchKVCache:
    """Router to node: tell from now on what the prefix cache takes in and loses, beginning with all that is in it."""


@dataclass(frozen=True, slots=True)
class Adopt:
    """Router to node: this attempt is mine from now on, tell me all that it brought so far and I do not have."""

    attempt: AttemptKey
    takeover: int = 0
    """The number of the client's call that the router serves: of several routers the one with the largest number owns
    the attempt, in whatever order their messages arrive. 0: a router that does not number."""
    num_tokens: Sequence[int] = ()
    """Tokens that the router has of each sequence; missing ones: none."""


RouterMessage = Submit | Abort | WatchKVCache | Adopt


class Outcome(enum.Enum):
    """How a request, or one of its sequences, ended on a node.

    This is the one list of ends: the engine's final statuses name theirs (`RequestStatus.outcome`), the node protocol
    carries it under the same names, and the router makes of it another attempt, an error, or the end of a stream. Only
    the two of FINISH_REASONS reach clients, as the value that the OpenAI API calls `finish_reason`.
    """

    STOP = "stop"
    """The output ended with a stop token; an embedding is complete."""
    LENGTH = "length"
    """The output has as many tokens as the request or the model permits."""
    HANDED_OFF = "handed_off"
    """The prefill leg is done, and the decode leg continues it."""
    ABORTED = "aborted"
    """A router or the node gave the request up."""
    IGNORED = "ignored"
    """The prompt does not fit into the node's KV cache."""
    ERROR = "error"
    """The node failed; the request is not to blame."""
    KV_LOST = "kv_lost"
    """The prompt's KV did not arrive from the other node. Another attempt may succeed."""
    REFUSED = "refused"
    """The node takes no requests at present."""
    MOVED = "moved"
    """Another router has adopted the attempt."""
    UNKNOWN = "unknown"
    """The node has nothing of the attempt that a router wanted to adopt."""
    INVALID = "invalid"
    """No node can do what the request asks for. The error is the field's name, a colon, and the reason."""
    REPETITION = "repetition"
    """The output repeats itself, and the request asked for an error in that case. Another node would repeat it too."""

    __hash__ = object.__hash__

    @property
    def ends_one_sequence(self) -> bool:
        """Whether the other sequences of the same request run on. Every other outcome is the end of all of them."""
        return self in _ENDS_ONE_SEQUENCE


FINISH_REASONS = frozenset({Outcome.STOP, Outcome.LENGTH})
"""Outcomes with which a sequence is complete. Their values are what clients read as `finish_reason`."""
_ENDS_ONE_SEQUENCE = FINISH_REASONS | {Outcome.ABORTED}


@value(frozen=True, slots=True)
class StageTimings:
    """What one node measured of one attempt: milliseconds on its own clock, tokens and bytes."""

    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    transfer_ms: float = 0.0
    cached_tokens: int = 0
    external_tokens: int = 0
    kv_bytes: int = 0
    intake_ms: float = 0.0
    """Since its blocks were reserved, until KV that was computed elsewhere had arrived."""
    decode_ms: float = 0.0
    """Since the prompt was computed or had arrived here, until this was told."""


@dataclass(slots=True)
class RequestDelta:
    """What one engine step brought for one attempt. One for each token: frozen, it would take six times as long to
    make; treat it as if it were.
    """

    attempt: AttemptKey
    first_index: int = 0
    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    outcome: Outcome | None = None
    stop_token_id: int | None = None
    error: str = ""
    timings: StageTimings | None = None
    sequence_index: int = 0
    transfer_cause: TransferCause | None = None
    """With an outcome for which KV did not come: why."""
    embedding: bytes = b""
    """The embedding, with the outcome of an embedding leg that ended well: float32, little-endian."""
    takeover: int = 0
    """With MOVED: the number of the router that owns the attempt; 0: it has none."""


@value(frozen=True, slots=True)
class LoadReport:
    """How busy a node is."""

    running: int = 0
    waiting: int = 0
    """For anything but remote KV."""
    waiting_for_remote_kvs: int = 0
    total_blocks: int = 0
    free_blocks: int = 0
    leased_blocks: int = 0
    quarantined_blocks: int = 0
    draining: bool = False
    uncomputed_tokens: int = 0
    """Tokens of prompts that wait or are being computed."""
    context_tokens: int = 0
    """What running sequences have in the cache."""

    @property
    def kv_usage(self) -> float:
        """Share of the blocks in use, 0 to 1."""
        return 1.0 - self.free_blocks / self.total_blocks if self.total_blocks else 0.0


@value(frozen=True, slots=True)
class StepFigures:
    """One engine step, for those who predict the next ones."""

    step_ms: float
    prefill_tokens: int
    """Computed of prompts, over all requests."""
    decode_sequences: int
    """That got a token without one of their prompts being computed..."""
    decode_context_tokens: int
    """... and what those had behind them."""


@value(frozen=True, slots=True)
class StepReport:
    """Node to router: one for each engine step, or ten a second where the router has no request on the node.

    Without deltas it is a sign of life too, at least every HEARTBEAT_S.
    """

    deltas: Sequence[RequestDelta]
    load: LoadReport
    kv_cache: KVCacheUpdate | None = None
    """Only for routers that watch it."""
    notice: str | None = None
    """What operators should know of the node from now on; empty: nothing any more. None: as before."""
    step: StepFigures | None = None
    """None where nothing was computed."""


NodeMessage = NodeDescription | StepReport

ENDED_WELL = "finished"
"""Why an attempt is aborted whose request has ended well."""

HEARTBEAT_S = 1.0
"""A node that is silent for three of these is taken for lost."""
