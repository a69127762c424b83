"""The engine's scheduler for simulations: it can execute many steps at once, and has one more policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from baton.bench.simulator.config import NodeSizes
from baton.bench.simulator.drafts import SimulatedDrafts, num_tokens_of
from baton.bench.simulator.events import TimelineEntry
from baton.bench.simulator.prompt import TOKEN, RepeatedToken
from baton.bench.simulator.step_times import StepTimes
from baton.clock import Clock
from baton.engine.batch import CachedRequestData, ModelRunnerOutput, NewRequestData, SchedulerOutput
from baton.engine.connector import KVConnector
from baton.engine.decode_set import NO_DECODES, DecodeGroup, DecodeSet
from baton.engine.kv_cache.block_hash import CacheKeyFields
from baton.engine.kv_cache.block_table import AllocationAnswer
from baton.engine.kv_cache.manager import KVCacheManager
from baton.engine.request import Request
from baton.engine.scheduler import Scheduler
from baton.engine.scheduler_config import SchedulerConfig
from baton.engine.step_plan import StepPlan
from baton.messages.node import NodeDescription
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams

# Running requests whose tokens are known in advance: their tokens are counted instead of computed.
#
# In a simulation every request draws the same token in every step. A request is therefore brought up to date only when
# it needs a block, fills one, ends or leaves, and when its state is read (`bring_up`). Between those moments its number
# of computed tokens and its output lag behind.


class CountedDecodes(DecodeSet):
    """A decode set whose groups name no members, since each of them draws `token_id` in every tick."""

    def __init__(self, block_size: int, token_id: int) -> None:
        super().__init__(block_size)
        self.token_id = token_id
        self._num_in_flight = 0
        """The number of ticks that are not committed, 0 or 1."""

    def bring_up(self) -> None:
        """Bring all members up to date."""
        for request in self._members.values():
            self._bring_up(request)

    def skip_quiet(self, max_ticks: int) -> int:
        """Advance by ticks in which no member needs a block or fills one, at most `max_ticks`. Returns their number."""
        calendar, tick = self._calendar, self._tick
        last = tick + max_ticks
        while tick < last and tick + 1 not in calendar and tick + 2 not in calendar:
            tick += 1
        num_quiet, self._tick = tick - self._tick, tick
        return num_quiet

    def committed(self) -> Sequence[Request]:
        """The members that filled a block or reached their length in the last tick, in the order of joining."""
        tick = self._tick + 1
        if not self._num_in_flight:
            return ()
        self._num_in_flight = 0
        full, over = self._calendar.get(tick), self._over.get(tick)
        if full is None and over is None:
            return ()
        due = {r.request_id: r for r in full or () if self._due_at.get(r.request_id) == tick}
        if over:
            due |= {request_id: self._members[request_id] for request_id in over}
            if len(due) > 1:
                due = {request_id: due[request_id] for request_id in self._members if request_id in due}
        # A request that joined with this tick's step did not decode in it. The scheduler processes its part of the
        # step.
        return [request for request in due.values() if self._bring_up(request, num_spared=1)]

    def leave(self, request_id: str) -> bool:
        """Bring the request up to date and remove it. Returns whether it was a member."""
        request = self._members.get(request_id)
        if request is not None:
            self._bring_up(request)
        return super().leave(request_id)

    def pop_needing_block(self) -> list[Request]:
        """Take the members without a slot for the next tick, brought up to date."""
        needing = super().pop_needing_block()
        for request in needing:
            self._bring_up(request)
        return needing

    def tick(self) -> DecodeGroup:
        """Let all members compute a token. The group only has their number."""
        count = len(self._members)
        self._num_in_flight = min(count, 1)
        if not count:
            return NO_DECODES
        self._tick += 1
        return DecodeGroup({}, {}, count)

    def _bring_up(self, request: Request, num_spared: int = 0) -> bool:
        """Count what the request has computed and append its tokens, except the last `num_spared`.

        Returns whether it has computed anything since it was last brought up to date.
        """
        num_computed_tokens = self._context[request.request_id] + self._tick - self._num_in_flight
        num_new = num_computed_tokens - request.num_computed_tokens
        # A request that joins in a step in flight is counted as further than it is.
        if num_new <= 0:
            return False
        request.num_computed_tokens = num_computed_tokens
        request.output_token_ids += [self.token_id] * (num_new - num_spared)
        return True


class _SameToken(dict[str, Sequence[int]]):
    def __init__(self, token_id: int) -> None:
        super().__init__()
        self._token_ids = (token_id,)

    def get(self, request_id: str, default: object = None) -> Sequence[int]:
        return self._token_ids


def same_token_output(token_id: int) -> ModelRunnerOutput:
    """A runner's output of a step in which each request drew this token. It names no request."""
    return ModelRunnerOutput(_SameToken(token_id))


# Many decode steps at once, while nothing else happens and the tokens are known.
#
# A step of decoding adds a token to each request and a block to a few, at ticks that the decode set's calendar has. The
# steps are therefore counted, and only those few requests are touched, in the order in which `Scheduler.schedule` and
# `update_from_output` would touch them. Afterwards pool, cache, events and requests are as after single steps.
#
# `SimulatedScheduler.decode_run` offers a run. Between `begin` and `commit` a step is in flight, as between `schedule`
# and `update_from_output`. New requests, arrivals and aborts may be given to the scheduler meanwhile, or between two
# steps; the run ends with the step in which that happens.


class DecodeRun:
    """Steps in which all running requests decode, none of them ends, and none of them lacks a block."""

    def __init__(self, decodes: CountedDecodes, manager: KVCacheManager, step: int, max_steps: int) -> None:
        self.max_steps = max_steps
        """The number of steps after which something else happens, or may happen."""
        self._decodes = decodes
        self._manager = manager
        self._step = step

    @property
    def num_sequences(self) -> int:
        """The number of running requests."""
        return len(self._decodes.request_ids)

    @property
    def num_context_tokens(self) -> int:
        """The tokens that the requests attend to in the next step."""
        return self._decodes.num_context_tokens

    def begin(self) -> None:
        """Decide a step, as `Scheduler.schedule` does."""
        for request in self._decodes.pop_needing_block():
            num_full = self._manager.num_slots(request.request_id)
            allocation = self._manager.allocate_slots(request, num_full + 1 - request.num_computed_tokens)
            assert allocation.answer is AllocationAnswer.OK
            self._decodes.note_growth(request)
        self._decodes.tick()
        self._manager.pool.raise_fence(self._step)

    def commit(self) -> None:
        """Give each request its token, as `Scheduler.update_from_output` does."""
        self._manager.settle(self._step, lost=False)
        for request in self._decodes.committed():
            self._manager.cache_blocks(request, request.num_computed_tokens)
            request.output_token_ids.append(self._decodes.token_id)

    def advance(self, num_steps: int) -> None:
        """Carry out this number of steps, each from `begin` to `commit`."""
        while num_steps > 0:
            num_steps -= self._decodes.skip_quiet(num_steps)
            if num_steps:
                self.begin()
                self.commit()
                num_steps -= 1


class SimulatedScheduler(Scheduler):
    """A scheduler for requests of one sequence that draw the same token in every step, at which none of them stops.

    With a `known_token` their decoding is only counted: `bring_up_decodes` before one of them is looked at.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        key_fields: CacheKeyFields,
        clock: Clock,
        connector: KVConnector | None = None,
        *,
        known_token: int | None = None,
        prompts_first: bool = False,
    ) -> None:
        """`known_token`: the token that every request draws; None: the runner's output names the tokens.

        `prompts_first`: while there are prompts, a step computes nothing else, as in vLLM before chunked prefill.
        """
        make = DecodeSet if known_token is None else partial(CountedDecodes, token_id=known_token)
        super().__init__(config, key_fields, clock, connector, make_decodes=make)
        self._prompts_first = prompts_first

    def decode_run(self) -> DecodeRun | None:
        """Many steps at once; None while anything but decoding is to be decided, or if tokens are not known."""
        decodes, max_steps = self._state.decodes, self.num_quiet_steps()
        if max_steps < 1 or not isinstance(decodes, CountedDecodes):
            return None
        self._stalled = False
        return DecodeRun(decodes, self.kv_cache_manager, self._step, max_steps)

    def bring_up_decodes(self) -> None:
        """Bring the tokens of all requests up to date."""
        decodes = self._state.decodes
        if isinstance(decodes, CountedDecodes):
            decodes.bring_up()

    def num_quiet_steps(self) -> int:
        """A number of steps that only decode unless something arrives: no request ends in them or lacks a block."""
        state, waiting = self._state, self._waiting
        num_decodes = len(state.decodes)
        if not num_decodes or state.filling or self._in_flight or self._pending or waiting.may_be_admitted:
            return 0
        several = state.beams or state.groups or state.parked
        manager = state.kv_cache_manager
        if several or manager.host is not None or self.config.windows != (None,):
            return 0
        # Each request needs a block every `block_size` steps.
        num_blocks = manager.pool.num_free_blocks // num_decodes
        return max(0, min(state.decodes.num_ticks_left, num_blocks * self.config.block_size))

    def _fill_step(self, plan: StepPlan) -> None:
        if self._prompts_first:
            # Requests with drafts are among those that fill, and decode.
            filling, speculating = self._state.filling, self._state.speculating
            drafted = [request for request in filling if request.request_id in speculating]
            filling[:] = [request for request in filling if request.request_id not in speculating]
            self._schedule_filling(plan)
            self._admission.admit_waiting(plan, self._pending)
            self._state.filling += drafted
        super()._fill_step(plan)

    def cache_blocks(self, keys: Sequence[bytes]) -> bool:
        """Puts blocks with these keys into the prefix cache; without room returns False and changes nothing."""
        manager, size = self.kv_cache_manager, self.config.block_size
        request = Request(f"fetched-{keys[-1].hex()}", RequestSpec((TOKEN,), SamplingParams()))
        request.take_prompt(RepeatedToken(len(keys) * size + 1))
        request.block_hashes = list(keys)
        computed = manager.get_computed_blocks(request)
        missing = len(keys) * size - computed.num_tokens
        allocation = manager.allocate_slots(request, missing, computed=computed) if missing > 0 else None
        if allocation is None or allocation.answer is not AllocationAnswer.OK:
            return allocation is None
        manager.cache_blocks(request, len(keys) * size)
        manager.free(request.request_id)
        return True


def scheduled(decided: SchedulerOutput) -> Sequence[NewRequestData | CachedRequestData]:
    """What a step says of its requests, new ones first."""
    return (*decided.scheduled_new_reqs, *decided.scheduled_cached_reqs)


def prompt_chunks(decided: SchedulerOutput, requests: Mapping[str, Request]) -> list[tuple[int, int]]:
    """Start and end position of each prompt's chunk in a step; the end is exclusive."""
    chunks = []
    for data in scheduled(decided):
        if data.request_id in decided.scheduled_spec_decode_tokens:
            continue
        # A decoding request that got a block has no entry; it computes one token.
        num_tokens = decided.num_scheduled_tokens.get(data.request_id, 1)
        if num_tokens > 1 or not requests[data.request_id].output_token_ids:
            chunks.append((data.num_computed_tokens, data.num_computed_tokens + num_tokens))
    return chunks


def scheduler_config(node: NodeDescription, sizes: NodeSizes) -> SchedulerConfig:
    """The limits of a node's scheduler."""
    longest = min(sizes.max_model_len, node.num_blocks * sizes.block_size + 1)
    return SchedulerConfig(
        num_blocks=node.num_blocks + 1,
        block_size=sizes.block_size,
        max_num_batched_tokens=node.max_num_batched_tokens,
        max_num_seqs=sizes.max_num_seqs,
        max_model_len=sizes.max_model_len,
        enable_prefix_caching=sizes.enable_prefix_caching,
        enable_chunked_prefill=not sizes.prompts_first or node.max_num_batched_tokens < longest,
    )


def step_s_of(
    decided: SchedulerOutput,
    requests: Mapping[str, Request],
    times: StepTimes,
    drafts: SimulatedDrafts | None,
    *,
    follows: bool,
) -> float:
    """Seconds that a step takes. `follows`: as for `StepTimes.step_s`."""
    batch, more_s = decided.total_num_scheduled_tokens - decided.num_prefill_tokens, 0.0
    if drafts is not None and decided.scheduled_spec_decode_tokens and drafts.row_s is not None:
        num_draft_tokens = num_tokens_of(decided.scheduled_spec_decode_tokens)
        batch, more_s = batch - num_draft_tokens, num_draft_tokens * drafts.row_s
    context = decided.num_decode_context_tokens
    if decided.num_prefill_tokens:
        return times.step_s(prompt_chunks(decided, requests), batch, context, follows=follows) + more_s
    return times.decode_s(batch, context, follows=follows) + more_s


def timeline_entry(start_s: float, end_s: float, decided: SchedulerOutput) -> TimelineEntry:
    """A step that has ended."""
    prompts, tokens = decided.num_prefill_tokens, decided.total_num_scheduled_tokens
    kind = "decode" if not prompts else "prefill" if prompts == tokens else "mixed"
    return TimelineEntry(start_s, end_s, kind, tokens)
