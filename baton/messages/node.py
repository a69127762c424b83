"""The messages between routers and nodes."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from baton.errors import TransferCause
from baton.messages.adapters import AdapterList, AdapterReport
from baton.messages.ids import AttemptKey, Peer
from baton.messages.kv_cache import KVCacheUpdate
from baton.messages.node_model import GENERATES, GENERATES_AND_EMBEDS, Capability, NodeShape
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import TokenLogprobs
from baton.messages.speculation import DraftCounts
from baton.values import value

ENDED_WELL = "finished"
"""`Abort.reason` of an abort that is sent because the request has ended without an error."""
HEARTBEAT_S = 1.0
"""The longest time between two reports of a node, in seconds. A node that is silent for three times as long is lost."""


class Role(enum.Enum):
    """The role of a process in the cluster."""

    PREFILL = "prefill"
    DECODE = "decode"
    ENCODE = "encode"
    """Makes rows of inputs (images, say) for other nodes, and runs no leg of a request."""
    ROUTER = "router"

    __hash__ = object.__hash__  # by identity: Enum's own __hash__ is Python code, which slows every look-up


class Leg(enum.Enum):
    """The part of a request that a node runs."""

    WHOLE = "whole"
    """Compute the prompt and generate the output."""
    PREFILL = "prefill"
    """Compute the tokens that came with the request, offer their blocks, sample the next token, end HANDED_OFF."""
    DECODE = "decode"
    """Read the prefill leg's blocks from `kv_source`, then generate behind the token that it sampled."""
    EMBED = "embed"
    """Compute the prompt, and end STOPPED with the vector that `RequestSpec.pooling` makes of it; generate nothing."""

    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class NodeDescription:
    """The properties of one incarnation of a node, with which it welcomes a router."""

    node_id: str
    incarnation: str
    role: Role
    address: str
    pid: int
    version: str
    model: str
    model_fingerprint: str
    """A hash over the model's configuration, weights and tokenizer: equal fingerprints mean equal models."""
    dtype: str
    numerics: str
    """The kernels that compute the model: nodes with equal numerics and models compute equal bits."""
    bit_exact: bool
    """Whether a token is a function of its request alone on this node (I1 in ARCHITECTURE.md)."""
    vocab_size: int
    max_model_len: int
    block_size: int
    """Tokens in a block."""
    num_blocks: int
    eos_token_ids: frozenset[int]
    on_transfer_failure: str = "reroute"
    """The action of a decode node when a prompt's KV does not arrive: reroute, recompute or fail."""
    kv_layout: str = ""
    """The further properties on which the keys of cached blocks depend; see
    `baton.engine.kv_cache.block_hash.CacheKeyFields`."""
    block_bytes: int = 0
    """Bytes of one block, of all groups of layers."""
    max_num_seqs: int = 0
    """Sequences that the node runs at once; 0: not known."""
    max_num_batched_tokens: int = 0
    """Tokens that the node computes in one step; 0: not known."""
    link_protocol: int = 0
    """Version of the protocol between nodes that hands KV over; 0: not known."""
    embedding_size: int = 0
    """Numbers in an embedding of the node's model; 0: the node computes no embeddings."""
    num_threads: int = 0
    """Threads that compute the node's model; 0: not known, or a GPU computes it."""
    tp: int = 0
    """Ranks that compute each layer together; 0: not known."""
    pp: int = 0
    """Stages of consecutive layers, of `tp` ranks each; 0: not known."""
    capabilities: frozenset[Capability] = frozenset()
    """What the node's model can be asked to do there; empty: a version that does not say it, see `can`."""
    row_width: int = 0
    """Numbers in a row of a span; 0: the node's model takes no spans."""
    most_short_tokens: int = 0
    """Tokens of the longest prompt with the rotary angles of short sequences; 0: those of all sequences are the same.
    The keys of a longer prompt's blocks are others."""
    bit_exact_reason: str = ""
    """Why it is not bit-exact; empty: it is, or a version that does not say it."""
    is_verified: bool = False
    """Whether the model's logits were those of transformers in a check at start."""
    why_unverified: str = ""
    """Why they were not, or were not compared; empty: they were, or a version that does not say it."""
    model_type: str = ""
    """The type of the node's model, as its config.json names it; empty: a version that does not say it."""
    kv_groups: int = 0
    """Groups of layers with blocks of their own; 0: a version that does not say it."""
    row_numerics: str = ""
    """Names what decides the rows of its encoder, beside model and dtype; empty: `numerics` does."""
    takes_moves: bool = False
    """Whether streams can be moved from and to it (`MoveOut`); False: an earlier version, or it decodes none."""
    kv_shape: str = ""
    """The dtype and the shape of its KV, where it may exchange that with nodes of other numerics whose KV has the same
    (`--pair-across-numerics`); empty: it exchanges KV with nodes of equal numerics alone, or an earlier version."""

    @property
    def can(self) -> frozenset[Capability]:
        """What the node's model can be asked to do there."""
        return self.capabilities or (GENERATES_AND_EMBEDS if self.embedding_size else GENERATES)

    @property
    def bits(self) -> str:
        """Names everything that decides the tokens, beside the request: nodes with equal `bits` give equal tokens.

        The dtype of the KV cache is part of `numerics` where it is not that of the model. Nodes that are not bit-exact
        have other `bits` than those that are, and equal ones say of them only that they serve the same model.
        """
        return bits_of(self.model_fingerprint, self.dtype, self.numerics, self.bit_exact)

    @property
    def family(self) -> str:
        """Names the nodes, of whatever numerics, with which it may exchange KV: those of equal `family`. Empty: none of
        other numerics. What they compute together is not bit-exact. A node that is not bit-exact by itself has none.
        """
        return (
            bits_of(self.model_fingerprint, self.dtype, self.kv_shape, True) if self.kv_shape and self.bit_exact else ""
        )

    @property
    def takes_pooling(self) -> bool:
        """Whether the node reads `RequestSpec.pooling`: one of an earlier version does not."""
        return bool(self.capabilities)

    @property
    def shape(self) -> NodeShape:
        """How the node's model is divided among ranks; one rank where that is not known."""
        return NodeShape.of(self.tp, self.pp)

    @property
    def rows_decided_by(self) -> Mapping[str, str]:
        """What decides which numbers its encoder makes of an input, by name: nodes with equal values make the same."""
        numerics = self.row_numerics or self.numerics
        return {"model_fingerprint": self.model_fingerprint, "dtype": self.dtype, "numerics": numerics}

    @property
    def as_peer(self) -> Peer:
        """This node as the place where another one finds what it needs."""
        return Peer(self.node_id, self.incarnation, self.address)


@lru_cache(maxsize=256)
def bits_of(model_fingerprint: str, dtype: str, numerics: str, bit_exact: bool) -> str:
    """A name for these values, see `NodeDescription.bits`; for `family` the shape of the KV is in place of numerics."""
    decided_by = "\n".join((model_fingerprint, dtype, numerics, *(() if bit_exact else ("not bit-exact",))))
    return hashlib.sha256(decided_by.encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class HeldPrefix:
    """The KV of a prompt's first tokens, which a node has in its prefix cache."""

    peer: Peer
    num_tokens: int


@value(frozen=True, slots=True)
class Submit:
    """Router to node: run this leg of this attempt."""

    attempt: AttemptKey
    leg: Leg
    spec: RequestSpec
    kv_source: Peer | None = None
    output_token_ids: Sequence[int] = ()
    """Tokens that an earlier attempt generated: they are computed with the prompt, and generation continues them."""
    traceparent: str = ""
    """W3C trace context of the request's span; empty: the request is not traced."""
    takeover: int = 0
    """See `Adopt.takeover`."""
    reader_block_size: int = 0
    """For a prefill leg: tokens in a block of the decode node that is to read the prompt; 0: as many as in one here."""
    turn: float | None = None
    """In how many seconds it is its turn on the node, see `router.admission.turns`; None: at once, as the router shares
    nothing among tenants, or is of an earlier version."""
    held_prefix: HeldPrefix | None = None
    """For a leg that computes the prompt: a node from which it may pull the KV of the first tokens, if it has them not
    itself; None: the router knows of none from which that would pay."""
    cut_by: int = 0
    """For a decode leg to which a stream is moved, see `MoveOut.cut_by`; 0: its source computes the prompt alone."""
    kv_bits: str = ""
    """For a decode leg that gets KV which nodes of other numerics have computed: a name of their bits. The blocks of
    such a leg are cached under keys of that name, since nothing that is bit-exact may find them. Empty: all of its KV
    is computed under the node's own numerics."""

    @property
    def num_sequences(self) -> int:
        """The number of sequences that the node computes at once; a prefill leg computes the prompt alone."""
        params = self.spec.sampling_params
        return 1 if self.leg is Leg.PREFILL else params.beam_width or params.n

    @property
    def num_tokens(self) -> int:
        """The number of tokens that its sequences begin with."""
        return len(self.spec.prompt_token_ids) + len(self.output_token_ids)


@value(frozen=True, slots=True)
class Abort:
    """Router to node: this attempt is over, free everything of it. Idempotent; unknown attempts are ignored."""

    attempt: AttemptKey
    reason: str
    sequence_index: int | None = None
    """The sequence that is over, where the others continue; None: all of them are over."""
    takeover: int = 0
    """See `Adopt.takeover`; an abort with a number below the owner's changes nothing."""


@dataclass(frozen=True, slots=True)
class WatchKVCache:
    """Router to node: send a snapshot of the prefix cache, and all changes after it."""


@dataclass(frozen=True, slots=True)
class Adopt:
    """Router to node: the sender owns this attempt from now on; send it the tokens that it does not have yet."""

    attempt: AttemptKey
    takeover: int = 0
    """The number of the client's call that the router serves: of several routers the one with the largest number owns
    the attempt, in whatever order their messages arrive. 0: a router that does not number its calls."""
    num_tokens: Sequence[int] = ()
    """The number of tokens that the router has of each sequence; 0 for sequences beyond the end of this list."""


@value(frozen=True, slots=True)
class MoveOut:
    """Router to node: a decode leg on another node is to continue this attempt, which decodes here.

    The attempt goes on while its KV is read, and ends HANDED_OFF once nearly all of that is read. If anything fails
    before that, it goes on here. An abort of `to` ends the move, and nothing else.
    """

    attempt: AttemptKey
    to: AttemptKey
    """The attempt of the decode leg, under which the KV is offered."""
    num_tokens: int
    """So many tokens, the prompt included, that leg was submitted with: the later ones come with the KV."""
    cut_by: int
    """The move has failed if the attempt has so many tokens, the prompt included, and not nearly all KV is read: the
    other node has reserved blocks for no more."""


RouterMessage = Submit | Abort | WatchKVCache | Adopt | AdapterList | MoveOut


class Outcome(enum.Enum):
    """The end of a request, or of one of its sequences, on a node.

    There is no other list of outcomes: a request of the engine ends with one (`Request.outcome`), the node
    protocol has them under the same names, and the router turns them into another attempt, an error, or the end of a
    stream. Only those in FINISH_REASONS reach clients, as the value that the OpenAI API calls `finish_reason`. A stream
    may also end without one: the router reports `stop` when it has found a stop string.
    """

    STOP = "stop"
    """The output ended with a stop token; an embedding is complete."""
    LENGTH = "length"
    """The output has as many tokens as the request or the model permits."""
    HANDED_OFF = "handed_off"
    """A prefill leg is done, or a stream was moved: a decode leg on another node continues it."""
    ABORTED = "aborted"
    """A router aborted the request, or the node did."""
    IGNORED = "ignored"
    """The prompt does not fit into the node's KV cache."""
    ERROR = "error"
    """The node failed; the request is not to blame."""
    KV_LOST = "kv_lost"
    """The prompt's KV did not arrive from the other node. Another attempt may succeed."""
    REFUSED = "refused"
    """The node accepts no requests at present."""
    MOVED = "moved"
    """Another router has adopted the attempt."""
    UNKNOWN = "unknown"
    """The node does not know the attempt that a router wanted to adopt."""
    INVALID = "invalid"
    """The request is invalid on every node; `RequestDelta.error_field` is the field at fault."""
    REPETITION = "repetition"
    """The output repeats itself, and the request wants an error in that case. Another node would repeat it too."""
    ADAPTER_UNAVAILABLE = "adapter_unavailable"
    """The request's adapter is not acknowledged here, or can't be loaded any more. Another node may have it."""

    __hash__ = object.__hash__

    @property
    def ends_one_sequence(self) -> bool:
        """Whether the other sequences of the same request continue. Any other outcome ends all of them."""
        return self in _ENDS_ONE_SEQUENCE


FINISH_REASONS = frozenset({Outcome.STOP, Outcome.LENGTH})
"""Outcomes with which a sequence is complete. Their values are what clients read as `finish_reason`, with `tool_calls`
in place of `stop` where the text of a chat calls tools (`router.http.parsed_text`).
"""
_ENDS_ONE_SEQUENCE = FINISH_REASONS | {Outcome.ABORTED}


@value(frozen=True, slots=True)
class StageTimings:
    """The measurements of one attempt on one node: milliseconds on the node's clock, tokens and bytes."""

    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    transfer_ms: float = 0.0
    cached_tokens: int = 0
    external_tokens: int = 0
    kv_bytes: int = 0
    intake_ms: float = 0.0
    """From the reservation of the request's blocks until the KV from another node had arrived."""
    decode_ms: float = 0.0
    """From the moment when the prompt was computed or had arrived here until this report."""


@dataclass(slots=True)
class RequestDelta:
    """The result of one engine step for one attempt.

    One is made for each token. A frozen class would take six times as long to construct, so this class is not frozen;
    treat it as if it were.
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
    """Why the KV did not arrive; None if the attempt did not end for that reason."""
    embedding: bytes = b""
    """The vector, with the outcome STOP of an embedding leg: float32, little-endian."""
    takeover: int = 0
    """With the outcome MOVED: the takeover number of the router that owns the attempt; 0: that router has none."""
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    """Log-probabilities of the prompt's tokens from the second one on, with the first token of a node that computes the
    prompt."""
    draft_counts: DraftCounts | None = None
    """What became of all drafts of the sequence in this attempt so far; None: nothing new."""
    prompt_timings: StageTimings | None = None
    """With the timings of a decode leg: those of the node that computed the prompt, which came with its KV; None: no KV
    came, or from a version that does not say it."""
    error_field: str = ""
    """With the outcome INVALID: the field at fault, of which `error` is said."""


@value(frozen=True, slots=True)
class LoadReport:
    """The load of a node: its requests, its blocks and the tokens that it has to compute."""

    running: int = 0
    waiting: int = 0
    """Requests that wait for anything but remote KV."""
    waiting_for_remote_kvs: int = 0
    total_blocks: int = 0
    free_blocks: int = 0
    leased_blocks: int = 0
    quarantined_blocks: int = 0
    draining: bool = False
    uncomputed_tokens: int = 0
    """Tokens of prompts that wait or are being computed."""
    context_tokens: int = 0
    """Tokens of running sequences in the KV cache."""
    promised_blocks: int = 0
    """Blocks that are in use, each once, and those that waiting requests will need for the tokens that they have."""

    @property
    def kv_usage(self) -> float:
        """Share of the blocks in use, 0 to 1."""
        return 1.0 - self.free_blocks / self.total_blocks if self.total_blocks else 0.0


@value(frozen=True, slots=True)
class StepFigures:
    """The size and duration of one engine step, from which routers predict the next ones."""

    step_ms: float
    prefill_tokens: int
    """Prompt tokens that the step computed, over all requests."""
    decode_sequences: int
    """Sequences that decoded in the step, each of them one token and what was right of its draft."""
    decode_context_tokens: int
    """Tokens before the decoded ones, over all decoding sequences."""
    drafts: int = 0
    """How many of the sequences had drafts of their next tokens."""
    draft_tokens: int = 0
    """Tokens of these drafts, which the step computed beside one token of each sequence."""
    accepted_tokens: int = 0
    """How many of them were right, those behind the end of an output included, which `DraftCounts` leaves out."""

    @property
    def decode_rows(self) -> int:
        """Tokens that the step computed for decoding sequences, right or wrong."""
        return self.decode_sequences + self.draft_tokens


@value(frozen=True, slots=True)
class StepReport:
    """Node to router: one for each engine step, or ten a second while the router has no request on the node.

    A report without deltas serves as a heartbeat and comes at least every HEARTBEAT_S.
    """

    deltas: Sequence[RequestDelta]
    load: LoadReport
    kv_cache: KVCacheUpdate | None = None
    """Changes of the prefix cache, for routers that have sent WatchKVCache."""
    notice: str | None = None
    """A text about the node for operators, which replaces the earlier one. Empty: there is none any more. None: it has
    not changed."""
    step: StepFigures | None = None
    """The step that was computed; None if there was none."""
    adapters: AdapterReport | None = None
    """Which of the router's adapters the node acknowledges; None: as before."""


NodeMessage = NodeDescription | StepReport
