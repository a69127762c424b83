"""What operators are told: the cluster and its events, results of commands, requests, timelines and placements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from baton.messages.node_model import NodeShape
from baton.values import value


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
    """Requests that run on the node."""
    waiting: int
    """Requests that wait on the node."""
    kv_usage: float
    """Share of the KV blocks in use, 0 to 1."""
    version: str = ""
    age_s: float = 0.0
    total_blocks: int = 0
    free_blocks: int = 0
    leased_blocks: int = 0
    quarantined_blocks: int = 0
    detail: str = ""
    bit_exact: bool = False
    cordoned: bool = False
    """Whether an operator has cordoned the node: it gets no new requests."""
    desired_role: str = ""
    """The role that an operator wants the node to have; empty: the role that it was started with."""
    in_flight: int = 0
    """Legs that the router has sent to the node and that have not ended."""
    tp: int = 0
    """Ranks that compute each layer of the node's model together; 0: not known, or a router."""
    pp: int = 0
    """Stages of consecutive layers, of `tp` ranks each; 0: not known, or a router."""
    capabilities: Sequence[str] = ()
    """What the node's model can be asked to do there; empty for a router."""
    bits: str = ""
    """See `NodeDescription.bits`; empty for a router, and for a node to which the router was never attached."""
    is_verified: bool = False
    """Whether the logits of the node's model were those of transformers in a check at start."""

    @property
    def shape(self) -> NodeShape:
        """How the node's model is divided among ranks; one rank where that is not known."""
        return NodeShape.of(self.tp, self.pp)

    @property
    def is_idle(self) -> bool:
        """Whether the node has no request and no leg, and none of its blocks is leased or quarantined."""
        return not (self.running or self.waiting or self.leased_blocks or self.quarantined_blocks or self.in_flight)


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """The cluster as one router sees it."""

    cluster: str
    health: str
    """ok, degraded or unavailable."""
    detail: str
    nodes: Sequence[NodeStatus]


@dataclass(frozen=True, slots=True)
class DrainProgress:
    """The work that a draining node still has."""

    running: int = 0
    waiting: int = 0
    leased_blocks: int = 0
    quarantined_blocks: int = 0
    in_flight: int = 0
    """Legs that the router has sent to the node and that have not ended."""
    idle: bool = False
    """Whether no work is left and every router knows that it must not send more."""
    stopped: bool = False
    """Whether the node's process has ended."""


@dataclass(frozen=True, slots=True)
class ClusterEvent:
    """A change in the cluster, as one router saw it."""

    seq: int
    """Number of the event in this run of the router, from 1 on without gaps."""
    time: float
    """Seconds since the epoch."""
    severity: str
    """Normal or Warning."""
    reason: str
    """The kind of event, in one word: NodeReady, NodeLost, Cordoned, ..."""
    subject: str
    """The node or router that the event is about; empty: the cluster."""
    incarnation: str = ""
    request_id: str = ""
    detail: str = ""
    router: str = ""
    """The router's incarnation."""


@dataclass(frozen=True, slots=True)
class MovedStream:
    """A stream has moved from one node to another, by their names."""

    source: str
    to: str


@dataclass(frozen=True, slots=True)
class RoleSet:
    """The result of a command that sets a node's role."""

    unchanged: bool = False
    """Whether the node has that role already."""
    warning: str = ""
    """What the cluster can no longer serve after the change; empty: it serves as much as before."""


@dataclass(frozen=True, slots=True)
class RequestRow:
    """One request at one router."""

    request_id: str
    state: str
    """Waiting, Prefilling, Transferring, Decoding, Retrying; or Finished, Failed, Cancelled."""
    router: str
    age_s: float
    """Seconds since the request's arrival at the router."""
    prefill_node: str
    """Empty where the decode node computes the prompt, and while the request waits for nodes."""
    decode_node: str
    """Empty while the request waits for nodes."""
    prompt_tokens: int
    output_tokens: int
    """Tokens sent to the client so far, of all sequences."""
    attempts: int
    ttft_ms: float | None
    """Time to the first token; None: there is none yet."""
    total_ms: float | None
    """Time to the end of the request; None: the request has not ended."""
    kv_bytes: int = 0
    """Bytes of KV that were transferred for the request; known when it has ended."""
    detail: str = ""
    """The end of the request in words; empty while it runs."""


@dataclass(frozen=True, slots=True)
class TenantRow:
    """One tenant at one router. Tokens are those that count for shares: see `--fair-output-weight`."""

    tenant: str
    """Empty where there are no tenants."""
    service_class: str
    """The class of its latest request; empty: none was placed yet."""
    weight: float
    running: int
    waiting: int
    """Requests that wait for nodes."""
    served_tokens: float
    """What its requests have cost, as far as they have ended."""
    served_last_minute: float
    placed_last_minute: int
    """How many of its requests got nodes in the last minute."""
    waited_s_last_minute: float
    """How long those had waited, in seconds, together."""
    lag_tokens: float
    """How far it is ahead of the waiting tenant that got least, in tokens for a weight of 1."""
    displaced: int
    """Its requests that gave way to others in a full queue."""
    refused: int
    """Its requests that were turned away before they had a token, for want of room or time: displaced ones, too."""

    @property
    def mean_wait_s(self) -> float | None:
        """What its requests that got nodes in the last minute had waited; None: there are none."""
        return self.waited_s_last_minute / self.placed_last_minute if self.placed_last_minute else None


@dataclass(frozen=True, slots=True)
class TenantRows:
    """The tenants at one router."""

    tenants: Sequence[TenantRow]
    """The tenants, those first whose requests wait, then those that were served most in the last minute."""
    served_last_minute: float = 0.0
    """What all tenants were served, also those that are left out."""


@dataclass(frozen=True, slots=True)
class PlannedMove:
    """The move of a node to another role."""

    node: str
    origin: str
    to: str
    state: str
    """The name of its state in `router.planner.moves`."""
    reason: str
    age_s: float
    """Seconds since it began."""
    took_s: float
    """Seconds until it ended, or until now."""


@dataclass(frozen=True, slots=True)
class PlannedPool:
    """The size of a pool of nodes, as a scaler said last."""

    pool: str
    want: int
    """How many nodes it is to have."""
    have: int
    """How many of them serve."""
    next_out: str = ""
    """The only node that can be taken away; empty: any can."""


@dataclass(frozen=True, slots=True)
class PlannedGrowth:
    """The growth of a pool of nodes."""

    pool: str
    before: int
    after: int
    state: str
    """The name of its state in `router.planner.scaling`."""
    reason: str
    age_s: float
    """Seconds since it began."""
    took_s: float
    """Seconds until it ended, or until now."""


@dataclass(frozen=True, slots=True)
class PlanReport:
    """What a router's planner has decided last."""

    mode: str
    """off, advise or on."""
    leads: bool = False
    """Whether this router plans for the cluster. If not, only the mode is told."""
    reason: str = ""
    """Why nodes move or stay, or why nothing was decided."""
    prefill_nodes: int = 0
    decode_nodes: int = 0
    """Nodes of each role, once all moves have ended."""
    wanted_prefill_nodes: int = 0
    wanted_decode_nodes: int = 0
    prefill_pressure: float = 0.0
    decode_pressure: float = 0.0
    """How busy the nodes of each role are with the load that is expected: 1 is all that they sustain."""
    wanted_prefill_pressure: float = 0.0
    wanted_decode_pressure: float = 0.0
    """The same with the nodes that are wanted."""
    requests_per_s: float = 0.0
    prompt_tokens: float = 0.0
    output_tokens: float = 0.0
    """The load that is expected; tokens are means over requests."""
    attained: float = 0.0
    """The share of the requests of the last minute with latency targets that kept these."""
    moves: Sequence[PlannedMove] = ()
    """The moves that go on, and the latest that have ended; the latest first."""
    pools: Sequence[PlannedPool] = ()
    """Empty: there is no scaler, or it has not answered for too long."""
    growths: Sequence[PlannedGrowth] = ()
    """The growths that go on, and the latest that have ended; the latest first."""
    encode_nodes: int = 0
    """The encode nodes that take work; 0: there are none, and prefill nodes encode."""
    wanted_encode_nodes: int = 0
    encode_pressure: float = 0.0
    """The share of their time in which they encode."""
    wanted_encode_pressure: float = 0.0
    """The same with the nodes that are wanted."""


@dataclass(frozen=True, slots=True)
class TimelineStage:
    """One stage of a request. Each stage begins when the stage before it ends."""

    name: str
    """admit, queue, prefill, transfer, decode, relay (between two processes), lost (attempts that failed), adopt (time
    spent for another router) or unfinished."""
    where: str
    """The process whose clock measured the stage; for a relay, both processes."""
    duration_ns: int
    after_first_token: bool = False


@dataclass(frozen=True, slots=True)
class Timeline:
    """The stages of one request. The durations up to the first token sum exactly to `ttft_ns`, all to `total_ns`."""

    request_id: str
    state: str
    """finished, failed or cancelled."""
    detail: str
    """stop or length, or the error."""
    age_s: float
    attempts: int
    prefill_node: str
    """The last attempt's prefill node; empty where the decode node computed the prompt, too."""
    decode_node: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    kv_bytes: int
    kv_read_ns: int
    """Time spent reading the KV, which mostly overlaps with the computation of the prompt."""
    ttft_ns: int | None
    """Time to the first token, from the request's arrival at the router; None: there was no token."""
    total_ns: int
    stages: Sequence[TimelineStage]
    trace_id: str = ""
    """Id of the trace that has the request's spans; empty: the request was not traced."""
    draft_tokens: int = 0
    """Tokens that were drafted and verified; see `Finished.draft_counts`."""
    accepted_draft_tokens: int = 0
    """The drafted tokens that are tokens of the output."""
    bit_exact: bool | None = None
    """See `Finished.bit_exact`."""

    @property
    def starts_ns(self) -> Sequence[int]:
        """When each stage begins, in nanoseconds since the request's arrival at the router."""
        return [0, *accumulate(stage.duration_ns for stage in self.stages)][:-1]


@value(frozen=True, slots=True)
class PlacementWay:
    """A candidate placement of a request, and the parts of its predicted cost in milliseconds."""

    prefill_node: str
    """Empty where the decode node computes the prompt, too."""
    decode_node: str
    queue_ms: float
    cached_tokens: int
    """Tokens of the prompt that are cached on the node that computes it."""
    prefill_ms: float
    decode_cached_tokens: int
    """Tokens of the prompt that are cached on the decode node: their KV is not transferred."""
    handoff_ms: float
    decode_ms: float
    stall_ms: float
    """Time by which this placement delays other requests."""
    token_ms: float
    """Time per output token."""
    total_ms: float
    tokens_per_step: float = 1.0
    """Tokens that a sequence gets from a step on average: more than 1 where drafts are right. 0: an older router."""
    pulled_tokens: int = 0
    """Further tokens of the prompt whose KV the node that computes it pulls from another node's cache."""

    @property
    def first_token_ms(self) -> float:
        """Time to the first token."""
        return self.queue_ms + self.prefill_ms


@dataclass(frozen=True, slots=True)
class PlacementOutcome:
    """The measured times of a request that has ended, to compare with what was predicted."""

    queue_ms: float
    prefill_ms: float
    transfer_ms: float
    cached_tokens: int
    kv_bytes: int
    first_token_ms: float
    """Time to the first token, from the request's arrival at the router."""
    best: PlacementWay | None
    """The placement that would have been cheapest at the rates that are known now."""
    regret_ms: float
    """By how much `best` would have been cheaper than the placement that was chosen."""


@dataclass(frozen=True, slots=True)
class PlacementDecision:
    """The placement of one attempt, and the candidates that the router compared for it."""

    attempt: int
    age_s: float
    policy: str
    decision: str
    """pair, decode_only or prefill_only."""
    reason: str
    prompt_tokens: int
    prefill_node: str
    decode_node: str
    ways: Sequence[PlacementWay] = ()
    """The candidates with their predicted costs, cheapest first; empty for a policy that predicts no costs."""
    outcome: PlacementOutcome | None = None
    """None until the request has ended without an error."""
    bits: str = ""
    """`NodeDescription.bits` of the nodes; empty: an older router."""
    continues_only_at: str = ""
    """The nodes among which the choice was made, as they alone may continue the stream; empty: it had not begun."""
    tenant_counter: float | None = None
    """The service that its tenant had got, in tokens for a weight of 1; None: it was no first placement here."""
    virtual_time: float | None = None
    """The counter with which a new tenant would have begun to wait at that time."""


@dataclass(frozen=True, slots=True)
class QueuePlace:
    """Where a request waits in the queue of its router."""

    why: str
    """What the first request of the queue waits for, or this one if it is in no order."""
    waited_s: float
    tenants_before: int
    """How many tenants with waiting requests come before its own."""
    own_before: int
    """How many requests of its tenant come before it."""
    tenant_counter: float
    """See `PlacementDecision`."""
    virtual_time: float


@dataclass(frozen=True, slots=True)
class RequestExplanation:
    """Why a request was placed where it was, or why it waits."""

    decisions: Sequence[PlacementDecision]
    """One for each attempt, in order."""
    waiting: QueuePlace | None = None
    """None: it does not wait."""
