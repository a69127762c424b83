"""The values that a step's three calls pass to each other. Names follow vLLM's V1."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from functools import partial
from typing import Annotated, Literal, NamedTuple, TypeAlias

from baton.engine.constraints import TokenMatcher
from baton.engine.stats import EngineCounters, PrefixCacheStats, SpecDecodingStats
from baton.errors import InvalidRequest, TransferCause
from baton.messages.ids import AttemptKey
from baton.messages.node import Outcome, StepFigures
from baton.messages.pooling import PoolingParams
from baton.messages.sampling import SamplingParams, TokenLogprobs
from baton.messages.spans import Span
from baton.messages.speculation import DraftCounts
from baton.metric import Metric
from baton.values import value

Failure: TypeAlias = str | InvalidRequest
"""Why a request failed; InvalidRequest: it is itself at fault, and would fail on another node, too."""


@value(frozen=True, slots=True)
class NewRequestData:
    """All that a runner needs to know about a request that it does not know, or that it has forgotten."""

    request_id: str
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    """Tokens generated before this runner saw the request, by an earlier attempt or by the prefill leg."""
    sampling_params: SamplingParams
    block_ids: Sequence[int]
    num_computed_tokens: int
    matcher: TokenMatcher | None = None
    """Restricts the tokens that may be sampled; None: any token may be."""
    adapter: str = ""
    """Digest of the adapter with which it is computed; empty: the base model alone. Forks have their parent's."""
    spans: Sequence[Span] = ()
    """The spans of the prompt, in order. Forks have their parent's."""
    pooling: PoolingParams | None = None
    """The vector that is wanted of the prompt, instead of a sampled token; None: none is."""
    root_id: str = ""
    """The submitted request of which this is a sequence; empty: it is the only one. Forks have their parent's."""


@value(frozen=True, slots=True)
class CachedRequestData:
    """The changes of a request that the runner knows."""

    request_id: str
    new_block_ids: Sequence[int]
    """Blocks appended since the request's previous step; all blocks when `resumed`."""
    num_computed_tokens: int
    resumed: bool = False
    """Whether the request had lost its blocks, for example by preemption: the block table is replaced, not extended."""
    last_token_id: int | None = None
    """The last token of a beam, which replaces the one that the runner sampled; None: the sampled one stands."""


@value(frozen=True, slots=True)
class ForkedRequestData:
    """A request forked from another one that the runner knows. The parent may finish or continue in the same step."""

    request_id: str
    parent_id: str
    num_shared_tokens: int
    """Number of leading tokens that the request has in common with its parent."""
    last_token_id: int
    """The token after the shared ones."""
    block_ids: Sequence[int]
    num_computed_tokens: int


class BlockCopy(NamedTuple):
    """Copy the KV of one block to another before the step computes. A named tuple: a step may have hundreds."""

    source: int
    destination: int


@value(frozen=True, slots=True)
class SchedulerOutput:
    """One step's decision."""

    step: int
    scheduled_new_reqs: Sequence[NewRequestData]
    scheduled_cached_reqs: Sequence[CachedRequestData]
    num_scheduled_tokens: Mapping[str, int]
    total_num_scheduled_tokens: int
    scheduled_spec_decode_tokens: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Drafts of what follows a request's last token, by request id. They are computed behind its known tokens, counted
    in `num_scheduled_tokens`, and stand only as far as they are what the runner samples."""
    num_drafts_wanted: Mapping[str, int] = field(default_factory=dict)
    """How many tokens behind those that the step samples the runner's draft model is to draft, by request id."""
    num_spare_tokens: int = 0
    """How many tokens of requests that are far behind, or whose KV is on its way, the draft model may compute."""
    loading_reqs: Sequence[NewRequestData] = ()
    """Requests whose KV has begun to come from another node, and whose tokens the draft model can compute meanwhile."""
    computes_ahead: bool = False
    """Whether the draft model has tokens left to compute of earlier `loading_reqs`."""
    blocks_to_copy: Sequence[BlockCopy] = ()
    blocks_to_swap_in: Sequence[BlockCopy] = ()
    blocks_to_swap_out: Sequence[BlockCopy] = ()
    finished_req_ids: frozenset[str] = frozenset()
    """Requests that ended, or whose KV did not come, since the last step: the runner forgets them."""
    preempted_req_ids: frozenset[str] = frozenset()
    scheduled_forked_reqs: Sequence[ForkedRequestData] = ()
    num_prefill_tokens: int = 0
    """Scheduled tokens of prompts, and of requests computed again after a preemption. All other scheduled tokens are
    those of decoding sequences, one each, and their drafts."""
    num_decode_context_tokens: int = 0
    """Tokens before the scheduled ones, over all decoding sequences."""

    @property
    def is_empty(self) -> bool:
        """Nothing to compute; the runner still copies blocks and forgets `finished_req_ids`."""
        return self.total_num_scheduled_tokens == 0

    @property
    def concerns_runner(self) -> bool:
        """Whether a runner has anything to do."""
        return bool(
            self.total_num_scheduled_tokens
            or self.finished_req_ids
            or self.loading_reqs
            or self.computes_ahead
            or self.blocks_to_swap_out
            or self.blocks_to_swap_in
            or self.blocks_to_copy
        )


@value(frozen=True, slots=True)
class ModelRunnerOutput:
    """The results of one step. A request whose prompt is not computed to its end has no sampled ids."""

    sampled_token_ids: Mapping[str, Sequence[int]]
    """One token for each request that samples, and as many more as its leading drafts were right."""
    logprobs: Mapping[str, Sequence[TokenLogprobs]] = field(default_factory=dict)
    failed: Mapping[str, Failure] = field(default_factory=dict)
    """Requests that failed alone (non-finite logits), and why."""
    embeddings: Mapping[str, bytes] = field(default_factory=dict)
    """The vectors (embeddings, or the outputs of a classification head) of the requests that ask for one, once their
    prompt is computed; see `baton.runner.execution.pooling`."""
    prompt_logprobs: Mapping[str, Sequence[TokenLogprobs]] = field(default_factory=dict)
    """Log-probabilities of whole prompts, by request id, for requests that ask for them. They come with the step that
    computes the end of the prompt."""
    draft_token_ids: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """What the draft model guesses to follow the sampled tokens, by request id; nothing as long as it is computing a
    request's known tokens. A request for which it can't draft is not there."""
    computes_ahead: bool = False
    """Whether the draft model has tokens left to compute of requests whose KV is on its way."""
    draft_seconds: float = 0.0
    """Duration of one round of the draft model, which drafts one token of each request; 0: not measured."""
    lost: bool = False
    """Whether the runner failed: no result of the step exists, and its block copies may not have been made."""
    copy_seconds: float = 0.0
    """Duration of the copies from and to the host tier; 0: not measured."""
    compute_seconds: float = 0.0
    """Duration of the rest of the step without drafting; 0: not measured."""


class EngineCoreEventType(enum.Enum):
    """The kinds of events of a request on one node."""

    QUEUED = "queued"
    SCHEDULED = "scheduled"
    PREEMPTED = "preempted"
    REMOTE_KV_REQUESTED = "remote_kv_requested"
    REMOTE_KV_ARRIVED = "remote_kv_arrived"
    REMOTE_KV_LOST = "remote_kv_lost"
    CHUNK_COMPUTED = "chunk_computed"
    FIRST_TOKEN = "first_token"
    FINISHED = "finished"


@value(frozen=True, slots=True)
class EngineCoreEvent:
    """One event of a request. `time`: monotonic seconds of the scheduler's clock; `value` depends on the type."""

    type: EngineCoreEventType
    attempt: AttemptKey
    """The request as it was submitted."""
    time: float
    value: int = 0
    sequence_index: int = 0


class EngineCoreOutput(NamedTuple):
    """The result of one step for one sequence. A named tuple, since a step makes one for each running request."""

    attempt: AttemptKey
    """The request as it was submitted."""
    new_token_ids: Sequence[int]
    first_index: int
    """Output index of `new_token_ids[0]`."""
    new_logprobs: Sequence[TokenLogprobs] = ()
    sequence_index: int = 0
    outcome: Outcome | None = None
    """How the request ended; None while it has not ended."""
    stop_reason: int | None = None
    error: Failure | None = None
    transfer_cause: TransferCause | None = None
    """Why the prompt's KV did not arrive, also where this node computes it instead."""
    num_cached_tokens: int = 0
    num_external_tokens: int = 0
    embedding: bytes = b""
    """The embedding (float32, little-endian) in the last output of a request that asks for one."""
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    """Log-probabilities of the prompt's tokens from the second one on; they come with the first token of a request that
    asks for them."""
    draft_counts: DraftCounts | None = None
    """What became of all the request's drafts so far; None if no draft was verified since its last output."""


NOTHING_BUT_TOKENS = tuple(
    EngineCoreOutput._field_defaults[name]
    for name in EngineCoreOutput._fields[EngineCoreOutput._fields.index("sequence_index") + 1 :]
)
"""The fields behind `sequence_index` of an output of which there is nothing to say but its tokens."""
new_output: Callable[[tuple[object, ...]], EngineCoreOutput] = partial(tuple.__new__, EngineCoreOutput)
"""Makes an output from the tuple of all its fields: a named tuple's own constructor takes a third longer."""
EngineCoreOutputs = Mapping[int, Sequence[EngineCoreOutput]]
"""The results of a step or another call, by client index; clients without results are left out."""

WaitingReason = Literal["capacity", "deferred", "grammar", "adapter", "remote_kv", "arrived", "preempted", "swapped"]
"""What a request waits for: a seat, token budget, blocks or a slot for its adapter (capacity); the prefill node to
begin its prompt, or another sequence to compute the shared prompt (deferred); the compilation of its grammar (grammar);
its adapter to be loaded (adapter); KV in transfer (remote_kv); the next step, since its KV has arrived (arrived);
capacity, after it was preempted (preempted, swapped)."""


@value(frozen=True, slots=True)
class SchedulerStats:
    """The load of one engine after a step. A field that declares a metric is on the node's metrics page."""

    num_running: Annotated[int, Metric("num_requests_running", "Requests in the running batch.")]
    num_waiting: Annotated[int, Metric("num_requests_waiting", "Requests that wait for anything.")]
    num_uncomputed_tokens: Annotated[
        int, Metric("num_uncomputed_prompt_tokens", "Tokens of prompts that wait or are being computed.")
    ]
    """Some of the tokens that wait may be found in the cache."""
    num_context_tokens: int
    """Tokens of running requests in the KV cache."""
    num_requests_waiting_by_reason: Annotated[
        Mapping[WaitingReason, int],
        Metric("num_requests_waiting_by_reason", "Requests that wait, by what they wait for.", label="reason"),
    ]
    num_preemptions_by_mode: Annotated[Mapping[str, int], Metric("num_preemptions_total", "Preemptions.", label="mode")]
    """Number of preemptions since start, for the modes recompute and swap."""
    total_blocks: Annotated[int, Metric("kv_cache_blocks", "Blocks of the KV cache.")]
    free_blocks: int
    """Blocks that an allocation could take now (free and idle cached ones)."""
    promised_blocks: Annotated[
        int, Metric("kv_promised_blocks", "Blocks in use, and those that waiting requests will need for their tokens.")
    ]
    leased_blocks: Annotated[int, Metric("kv_leased_blocks", "Blocks of ended requests that a peer may still read.")]
    quarantined_blocks: Annotated[
        int, Metric("kv_quarantined_blocks", "Blocks of ended requests that reads may still fill.")
    ]
    total_host_blocks: Annotated[int, Metric("kv_host_cache_blocks", "Blocks of the host tier; 0: there is none.")]
    free_host_blocks: int
    prefix_cache: PrefixCacheStats
    spec_decoding: SpecDecodingStats
    counters: EngineCounters
    """A copy, which counts no more."""

    @property
    def num_waiting_for_remote_kvs(self) -> int:
        """Requests whose KV is in transfer, or not begun on the other node: they don't wait for capacity."""
        reasons = self.num_requests_waiting_by_reason
        return reasons["remote_kv"] + reasons["deferred"]

    @property
    def num_preemptions(self) -> int:
        return sum(self.num_preemptions_by_mode.values())

    @property
    def kv_cache_usage(self) -> float:
        """Share of the blocks in use, 0 to 1."""
        return 1.0 - self.free_blocks / self.total_blocks if self.total_blocks else 0.0

    @property
    def host_cache_usage(self) -> float:
        """Share of the host tier's blocks in use, 0 to 1."""
        return 1.0 - self.free_host_blocks / self.total_host_blocks if self.total_host_blocks else 0.0


@value(frozen=True, slots=True)
class ComputedStep:
    """A step that was computed."""

    figures: StepFigures
    """Its time is from its decision, or from the end of the step before it if that was later, to its commit."""
    ended_at: float
    """On the engine's clock, in seconds."""
    goes_on: bool
    """Whether there was more to compute when the step ended."""


class StepTimes(NamedTuple):
    """Totals since start: steps given to the runner, and the seconds of each part, which may overlap."""

    num_steps: int = 0
    schedule_s: float = 0.0
    run_s: float = 0.0
    update_s: float = 0.0
