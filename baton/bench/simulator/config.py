"""What is simulated: the nodes, their environment, failures and drafts, as plain values."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

from baton.bench.arrangement import Arrangement
from baton.bench.flag import Flag
from baton.bench.simulator.step_times import FormulaTimes, StepTimes
from baton.errors import InvalidRequest
from baton.messages.node import Role
from baton.messages.node_model import ONE_RANK, NodeShape
from baton.messages.speculation import MAX_DRAFTS, SpeculationConfig
from router.placement.room import DEFAULT_RULES

if TYPE_CHECKING:
    from baton.bench.workloads.tenants import TenantLoad
    from router.admission.limits import DispatchLimits

Preset = Literal["distserve", "mooncake", "fleet", "day"]
"""Published experiments that can be repeated."""


class Policy(enum.StrEnum):
    """Placement policies: those of the router, then others for comparison."""

    COST = "cost"
    LEAST_LOADED = "least-loaded"
    ROUND_ROBIN = "round-robin"
    RANDOM = "random"
    LOAD_BALANCED = "load-balanced"
    LOCAL_CACHE = "local-cache"
    GLOBAL_CACHE = "global-cache"


class PlannerMode(enum.StrEnum):
    """Whether nodes change their roles as the load changes."""

    OFF = "off"
    ADVISE = "advise"
    """The planner decides, and no node moves."""
    ON = "on"


class PlannerLaw(enum.StrEnum):
    """By which law nodes are divided among the roles: the router's own, or another one for comparison."""

    OWN = "own"
    DYNAMO = "dynamo"


class Evacuation(enum.StrEnum):
    """What becomes of the streams on a node that is to change its role."""

    END = "end"
    """They end there; what is left after a while goes on elsewhere, behind the tokens that its client has."""
    MOVE = "move"
    """They move while they are decoded, as by `--move-streams` of routers."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A node dies at `at_s`, and is restarted `down_s` later unless that is infinite."""

    node_id: str
    at_s: float
    down_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Contention:
    """The slowdown of a step while another node computes, by kind of step: 0.25 means 1.25 times as long."""

    prefill: float = 0.0
    """Slowdown of steps with prompts, with or without decodes."""
    decode: float = 0.0


@dataclass(frozen=True, slots=True)
class SimulatedSpeculation:
    """How nodes draft tokens. Raises InvalidRequest, which names the command's option, for a number out of bounds."""

    share: Annotated[
        float,
        Flag(
            "Nodes draft tokens (speculative decoding), and a drafted token is right with this probability if those "
            "before it are. Default: nothing is drafted.",
            "--draft-share",
            min=0,
            max=1,
        ),
    ]
    num_speculative_tokens: Annotated[
        int,
        Flag(
            "Largest number of drafted tokens of a request in a step. "
            f"Default: {SpeculationConfig().num_speculative_tokens}.",
            "--draft-tokens",
            min=1,
            max=MAX_DRAFTS,
        ),
    ] = SpeculationConfig().num_speculative_tokens
    coverage: Annotated[
        float,
        Flag(
            "Share of a request's steps before which there is something to draft. Default: 1.",
            "--draft-coverage",
            min=0,
            max=1,
        ),
    ] = 1.0
    """A text repeats itself only in places."""
    row_ms: Annotated[
        float | None,
        Flag("Time that a drafted token adds to a step. Default: that of one more sequence.", "--draft-row-ms", min=0),
    ] = None
    adapts: bool = True
    """Whether the length of drafts adapts to how often they are right; if not, all are as long as they may be."""

    def __post_init__(self) -> None:
        for name, share in (("--draft-share", self.share), ("--draft-coverage", self.coverage)):
            if not 0.0 <= share <= 1.0:
                raise InvalidRequest(name, f"must be from 0 to 1, not {share:g}")
        if not 1 <= self.num_speculative_tokens <= MAX_DRAFTS:
            raise InvalidRequest("--draft-tokens", f"must be from 1 to {MAX_DRAFTS}, not {self.num_speculative_tokens}")
        if self.row_ms is not None and not 0.0 <= self.row_ms < math.inf:
            raise InvalidRequest("--draft-row-ms", f"must be a duration, not {self.row_ms:g}")


@dataclass(frozen=True, slots=True)
class NodeSizes:
    """Speed and sizes of a node. Defaults: an A100 of 80 GB with OPT-13B."""

    times: StepTimes = field(default_factory=FormulaTimes)
    block_size: Annotated[int, Flag("Tokens of a KV block.", min=1)] = 16
    cache_tokens: Annotated[int, Flag("Tokens that the KV cache of a node of one rank holds.", min=16)] = 48_000
    kv_bytes_per_token: Annotated[float, Flag("Bytes of KV per token, of all layers.", min=0)] = 819_200.0
    max_num_seqs: Annotated[int, Flag("Largest number of sequences that a node runs at once.", min=1)] = 256
    max_num_batched_tokens: Annotated[int, Flag("Largest number of tokens in a step.", min=1)] = 2048
    max_model_len: int = 1 << 20
    prompts_first: Annotated[
        bool, Flag("Compute prompts in steps of their own, during which streams stall, instead of mixed steps.")
    ] = False
    """Prompts are computed whole then, if a step has room for the longest one."""
    enable_prefix_caching: bool = True
    encode_ms: Annotated[float, Flag("Time that an encoder needs for an image.", "--encode-ms", min=0)] = 50.0
    speculation: SimulatedSpeculation | None = None
    """How the node drafts tokens; None: it does not."""
    shape: NodeShape = ONE_RANK
    """The node's shape. `times` and `cache_tokens` are those of the whole node, whatever its shape."""


@dataclass(frozen=True, slots=True)
class SimulationConfig:
    """The simulated cluster and its environment."""

    arrangement: Arrangement
    sizes: NodeSizes = field(default_factory=NodeSizes)
    prefill_sizes: NodeSizes | None = None
    """Sizes of prefill nodes, if they differ."""
    policy: str = "cost"
    choices: Annotated[
        int | None,
        Flag("Nodes of each role that the router considers, drawn at random for each request. Default: all.", min=1),
    ] = None
    kv_room: Annotated[
        float, Flag("Share of a node's KV cache that its requests may need before more wait at the router.", min=0)
    ] = DEFAULT_RULES.kv_room
    """0: any share."""
    steps_ahead: Annotated[
        int, Flag("Steps for which a node may have tokens of prompts before more requests wait at the router.", min=1)
    ] = DEFAULT_RULES.steps_ahead
    target_ttft_ms: Annotated[
        float, Flag("Time to first token that the router aims at. Default: none.", "--default-ttft-ms", min=0.001)
    ] = math.inf
    target_tpot_ms: Annotated[
        float, Flag("Time per token that the router aims at. Default: none.", "--default-tpot-ms", min=0.001)
    ] = math.inf
    nic_bytes_per_s: Annotated[
        float,
        Flag(
            "Bandwidth of each node's network card, in each direction.",
            "--nic-gb-per-s",
            min=0.001,
            convert=lambda gigabytes: gigabytes * 1e9,
        ),
    ] = 25e9
    network_latency_s: float = 1e-3
    """Time that a hand-off takes beside its bytes, for the confirmation."""
    message_s: Annotated[
        float,
        Flag(
            "Latency of a message between router and node, one way.",
            "--message-ms",
            min=0,
            convert=lambda milliseconds: milliseconds / 1e3,
        ),
    ] = 5e-4
    """From a node to a client, too."""
    detect_s: float = 0.0
    """Time until the router notices that a node has died."""
    failures: Sequence[Failure] = ()
    mtbf_s: Annotated[float, Flag("Mean time between failures of each node.", min=0.001)] = math.inf
    """They are exponentially distributed."""
    repair_s: Annotated[float, Flag("Seconds until a failed node serves again.", min=0)] = 60.0
    planner: Annotated[
        PlannerMode, Flag("Nodes change their roles as the load changes. advise: it is decided, and no node moves.")
    ] = PlannerMode.OFF
    planner_law: Annotated[PlannerLaw, Flag("By which law: the router's own, or that of NVIDIA Dynamo's planner.")] = (
        PlannerLaw.OWN
    )
    flip_s: Annotated[float, Flag("Seconds for which a node is away that changes its role.", "--flip-s", min=0)] = 0.5
    evacuation: Annotated[Evacuation, Flag("What becomes of the streams on a node that is to change its role.")] = (
        Evacuation.MOVE
    )
    num_encode: Annotated[
        int, Flag("Encode nodes. Without any, nodes that compute prompts encode their images.", "--encode", min=0)
    ] = 0
    image_share: Annotated[float, Flag("Share of requests that have an image.", min=0, max=1)] = 0.0
    limits: DispatchLimits | None = None
    """The router's limits; None: no request is refused."""
    tenants: Sequence[TenantLoad] = ()
    """The tenants of the requests. Requests of other ones have a weight of 1 and the class `normal`."""
    max_concurrency: Annotated[int | None, Flag("Largest number of open requests.", min=1)] = None
    """With one the load is a closed loop."""
    cells: Annotated[int, Flag("Divide nodes and load among N routers that know nothing of each other.", min=1)] = 1
    """See `baton.bench.simulator.cells`."""
    cell: int = 0
    """The number of this cell. The numbers of its nodes continue those of the cell before."""
    seed: int = 0
    keeps_timeline: bool = False
    stepwise: bool = False
    """Simulate every step by itself; only the simulator's own time changes."""
    contention: Contention | None = None
    """All nodes are on one machine and slow each other down by this; None: each has its own machine. Implies
    `stepwise`."""

    def sizes_of(self, role: Role) -> NodeSizes:
        """The sizes of the nodes of a role."""
        return self.prefill_sizes if role is Role.PREFILL and self.prefill_sizes is not None else self.sizes

    @property
    def num_ranks(self) -> int:
        """Number of ranks of all nodes, each of which is a GPU, say."""
        prefill, decode = (self.sizes_of(role).shape.num_ranks for role in (Role.PREFILL, Role.DECODE))
        return self.arrangement.prefill * prefill + self.arrangement.decode * decode
