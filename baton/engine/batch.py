"""What a step's three calls hand to each other: small values, no behaviour. Names follow vLLM's V1."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence, Set
from dataclasses import field
from typing import Literal, NamedTuple

from baton.engine.prefix_cache_stats import PrefixCacheStats
from baton.engine.sampling.grammar import TokenMatcher
from baton.errors import TransferCause
from baton.messages.node import Outcome
from baton.messages.sampling import SamplingParams, TokenLogprobs
from baton.values import value


@value(frozen=True, slots=True)
class NewRequestData:
    """Everything a runner needs to know once about a request it has not seen (or has dropped)."""

    request_id: str
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    """Tokens generated before this runner saw the request (by an earlier attempt, or the first of a hand-off)."""
    sampling_params: SamplingParams
    block_ids: Sequence[int]
    num_computed_tokens: int
    matcher: TokenMatcher | None = None
    """Says what may be drawn; None: anything."""
    embeds: bool = False
    """Its last token gives an embedding, and nothing is drawn."""


@value(frozen=True, slots=True)
class CachedRequestData:
    """What changed in a request that the runner knows."""

    request_id: str
    new_block_ids: Sequence[int]
    """Blocks appended since last time; all blocks when `resumed`."""
    num_computed_tokens: int
    resumed: bool = False
    """It had lost its blocks, as by preemption: the block table is replaced, not extended."""
    last_token_id: int | None = None
    """A beam: this is its last token, whatever was drawn for it."""


@value(frozen=True, slots=True)
class ForkedRequestData:
    """A request that begins as the runner knows another one, which may finish or go on in the same step."""

    request_id: str
    parent_id: str
    num_shared_tokens: int
    """Its first tokens, which are those of the other one."""
    last_token_id: int
    """The token after them."""
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
    blocks_to_copy: Sequence[BlockCopy] = ()
    blocks_to_swap_in: Sequence[BlockCopy] = ()
    blocks_to_swap_out: Sequence[BlockCopy] = ()
    finished_req_ids: frozenset[str] = frozenset()
    """Ended since the last step: the runner forgets them."""
    preempted_req_ids: frozenset[str] = frozenset()
    scheduled_forked_reqs: Sequence[ForkedRequestData] = ()
    num_prefill_tokens: int = 0
    """Of prompts, and of what is computed again after a preemption; every other token is a decoding sequence's."""
    num_decode_context_tokens: int = 0
    """What the decoding ones have behind them."""

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
            or self.blocks_to_swap_out
            or self.blocks_to_swap_in
            or self.blocks_to_copy
        )


@value(frozen=True, slots=True)
class ModelRunnerOutput:
    """What a runner computed. A request whose prompt is not done yet has no entry in the sampled ids."""

    sampled_token_ids: Mapping[str, Sequence[int]]
    logprobs: Mapping[str, Sequence[TokenLogprobs]] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    """Requests that failed alone (non-finite logits), with the reason."""
    invalid: Set[str] = frozenset()
    """Those of `failed` whose own fault it is."""
    embeddings: Mapping[str, bytes] = field(default_factory=dict)
    """Embeddings of requests whose prompt is done and that want one; see `baton.runner.execution.embedding`."""
    lost: bool = False
    """The runner broke: nothing of the step is there, its block copies included."""
    copy_seconds: float = 0.0
    """What the copies from and to the host tier took; 0: not measured."""
    compute_seconds: float = 0.0
    """What everything else took; 0: not measured."""


class EngineCoreEventType(enum.Enum):
    """Moments in a request's life on one node."""

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
    """One moment, on the injected clock (seconds, monotonic). `value` depends on the type (tokens computed so far)."""

    type: EngineCoreEventType
    request_id: str
    time: float
    value: int = 0


class EngineCoreOutput(NamedTuple):
    """What one step brought for one request. A named tuple, since a step makes one for each running request."""

    request_id: str
    new_token_ids: Sequence[int]
    first_index: int
    """Output index of `new_token_ids[0]`."""
    new_logprobs: Sequence[TokenLogprobs] = ()
    outcome: Outcome | None = None
    """How the request ended; None while it goes on."""
    stop_reason: int | None = None
    error: str | None = None
    transfer_cause: TransferCause | None = None
    """Why the prompt's KV did not arrive, also where no other attempt is wanted."""
    num_cached_tokens: int = 0
    num_external_tokens: int = 0
    embedding: bytes = b""
    """The embedding, float32 and little-endian, with the end of a request that asks for one."""


WaitingReason = Literal["capacity", "deferred", "grammar", "remote_kv", "arrived", "preempted", "swapped"]
"""What a request waits for: a seat, budget or blocks (capacity); a connector's or a sibling's word (deferred); its
grammar, which is being compiled (grammar); KV under way (remote_kv); the next step (arrived); capacity again, after it
gave way (preempted, swapped)."""


@value(frozen=True, slots=True)
class SchedulerStats:
    """Load of one engine after a step."""

    num_running: int
    num_waiting: int
    num_uncomputed_tokens: int
    """Of prompts that wait or are being computed here; one that waits may yet be found in the cache."""
    num_context_tokens: int
    """What running requests have in the cache."""
    num_requests_waiting_by_reason: Mapping[WaitingReason, int]
    """The same requests by what they wait for."""
    total_blocks: int
    free_blocks: int
    """Blocks that an allocation could take now (free and idle cached ones)."""
    leased_blocks: int
    quarantined_blocks: int
    total_host_blocks: int
    free_host_blocks: int
    num_preemptions_by_mode: Mapping[str, int]
    """recompute and swap, since start."""
    prefix_cache: PrefixCacheStats
    num_skipped_results: int
    num_unknown_transfers: int
    num_connector_errors: int
    """Since start; see Scheduler."""

    @property
    def num_waiting_for_remote_kvs(self) -> int:
        """KV is under way to them, or nobody has begun to compute it: it is not for want of room that they wait."""
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
    """What a step was made of, and the seconds it took: since it was decided, or since the one before it was over."""

    seconds: float
    num_prefill_tokens: int
    num_decodes: int
    num_decode_context_tokens: int
    ended_at: float
    """On the engine's clock, in seconds."""
    goes_on: bool
    """There was more to compute then."""


class StepTimes(NamedTuple):
    """Since start: steps given to the runner, and the seconds of each part; it may compute while the others go on."""

    num_steps: int = 0
    schedule_s: float = 0.0
    run_s: float = 0.0
    update_s: float = 0.0


@value(frozen=True, slots=True)
class EngineCoreOutputs:
    """What one step brought for one client (one router)."""

    outputs: Sequence[EngineCoreOutput]
