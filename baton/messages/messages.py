"""What routers, nodes and clients say to each other, as plain values. The codecs turn them into Protocol Buffers."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from baton.engine.batch import TokenLogprobs
from baton.engine.compute_path import ComputePath
from baton.engine.kv_cache.events import KVCacheEvent
from baton.engine.request import KVSource, Leg, SamplingParams
from baton.engine.sampling.repetition import RepetitionDetection
from baton.errors import TransferCause
from baton.ids import AttemptKey
from baton.values import value


class Role(enum.Enum):
    """What a process does in the cluster."""

    PREFILL = "prefill"
    DECODE = "decode"
    ROUTER = "router"

    __hash__ = object.__hash__  # by identity: Enum's own is a call into Python, in every lookup


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
    """How an attempt ended on a node."""

    STOP = "stop"
    LENGTH = "length"
    HANDED_OFF = "handed_off"
    ABORTED = "aborted"
    IGNORED = "ignored"
    ERROR = "error"
    KV_LOST = "kv_lost"
    REFUSED = "refused"
    MOVED = "moved"
    """Another router has adopted it."""
    UNKNOWN = "unknown"
    """There is nothing of it here to adopt."""
    INVALID = "invalid"
    """What it asks for can't be done, here or elsewhere: its error is the field's name, a colon and why."""
    REPETITION = "repetition"
    """Its output repeats itself, and the request asked for an error then. It would elsewhere, too."""

    __hash__ = object.__hash__


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
    """Of an embedding leg that ended well: float32, little-endian."""
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
    """Of prompts that wait or are being computed."""
    context_tokens: int = 0
    """What running sequences have in the cache."""

    @property
    def kv_usage(self) -> float:
        """Share of the blocks in use, 0 to 1."""
        return 1.0 - self.free_blocks / self.total_blocks if self.total_blocks else 0.0


@value(frozen=True, slots=True)
class KVCacheUpdate:
    """What the prefix cache took in and lost, numbered without gaps; without the tokens of what it took in."""

    first_sequence: int
    """A reader that does not stand here has missed something and asks with WatchKVCache for everything."""
    next_sequence: int
    events: Sequence[KVCacheEvent]
    restart: bool = False
    """Forget everything: what can be found follows, in this update and maybe in more that have no number of their own.
    """


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


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One moment on one node; `monotonic_ns` compares between the processes of one host."""

    seq: int
    monotonic_ns: int
    name: str
    attempt: AttemptKey
    value: int = 0
    detail: str = ""


@dataclass(frozen=True, slots=True)
class TraceStep:
    """One engine step that computed something; `monotonic_ns`: when it was committed."""

    seq: int
    monotonic_ns: int
    figures: StepFigures
    goes_on: bool
    """There was more to compute then: whatever passed until the next step was no idleness."""


@dataclass(frozen=True, slots=True)
class NodeTrace:
    """What happened on one node of late. `monotonic_ns`: its clock at the answer, so that all else is an age."""

    monotonic_ns: int
    events: Sequence[TraceEvent]
    steps: Sequence[TraceStep]


# What a node tells operators.


class HandoffSide(enum.Enum):
    """Which half of a hand-off a node has."""

    SENDER = "sender"
    """A lease: blocks that it promised to keep."""
    READER = "reader"
    """A transfer: blocks that are being filled."""


@dataclass(frozen=True, slots=True)
class OpenHandoff:
    """A lease or a transfer that is not over."""

    attempt: AttemptKey
    side: HandoffSide
    state: str
    """The state's name in `kv_transfer.sender.lease_machine` or `kv_transfer.receiver.transfer_machine`."""
    peer: str
    """The other node; empty while nobody reads."""
    peer_incarnation: str
    num_blocks: int
    """Of a lease, those offered so far; of a transfer, those that are to be filled; in quarantine, those that reads may
    still fill."""
    age_s: float


@dataclass(frozen=True, slots=True)
class EndedHandoffs:
    """How many of a reader's transfers ended so since its start."""

    peer: str
    outcome: str
    """arrived, or the value of a `TransferCause`."""
    count: int


@dataclass(frozen=True, slots=True)
class RefusedLink:
    """The latest link between this node and a peer that was refused, on whichever side."""

    peer: str
    cause: str
    """The value of a `TransferCause`."""
    story: str
    """Names both sides and what differs."""
    age_s: float
    count: int
    """How often in a row."""


@dataclass(frozen=True, slots=True)
class HandoffReport:
    """A node's part in hand-offs."""

    layout: str = ""
    """What a peer must have in common with it."""
    open: Sequence[OpenHandoff] = ()
    ended: Sequence[EndedHandoffs] = ()
    refused_links: Sequence[RefusedLink] = ()
    """Latest first."""


@dataclass(frozen=True, slots=True)
class NodeReport:
    """All that a node says of itself when it is asked."""

    description: NodeDescription
    load: LoadReport
    waiting_by_reason: Mapping[str, int] = field(default_factory=dict)
    handoff: HandoffReport = field(default_factory=HandoffReport)
    compute_paths: Sequence[ComputePath] = field(default_factory=list)
    """What computes the model's steps there, part by part."""


# Generation: what clients and the router's front say.


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
    """Whose it is, by the key that was shown; nothing that a client can say."""
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
    """Of all sequences."""
    cached_tokens: int
    queue_ms: float
    prefill_ms: float
    transfer_ms: float
    ttft_ms: float
    total_ms: float
    kv_bytes: int
    path: Path
    embedding: bytes = b""
    """Of a request that embeds: a vector of length 1, float32, little-endian."""


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


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """One process of the cluster as an operator sees it."""

    name: str
    role: str
    status: str
    incarnation: str
    address: str
    pid: int
    model: str
    running: int
    waiting: int
    kv_usage: float
    version: str = ""
    age_s: float = 0.0
    total_blocks: int = 0
    free_blocks: int = 0
    leased_blocks: int = 0
    quarantined_blocks: int = 0
    detail: str = ""
    bit_exact: bool = False
    cordoned: bool = False
    """No new requests for it, says an operator."""
    desired_role: str = ""
    """What an operator wants it to be; empty: what it was started as."""
    in_flight: int = 0
    """Legs that the router has sent there and that are not over."""

    @property
    def is_idle(self) -> bool:
        """Nothing runs or waits there, and none of its blocks is promised to anybody."""
        return not (self.running or self.waiting or self.leased_blocks or self.quarantined_blocks or self.in_flight)


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """How one router sees the cluster. `health` is ok, degraded or unavailable."""

    cluster: str
    health: str
    detail: str
    nodes: Sequence[NodeStatus]
