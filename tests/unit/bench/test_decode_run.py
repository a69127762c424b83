"""Runs of decode steps with known tokens leave the scheduler in the same state as single steps."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from baton.bench.simulator.scheduler import SimulatedScheduler, same_token_output
from baton.engine.batch import CachedRequestData, ModelRunnerOutput, NewRequestData, SchedulerOutput
from baton.engine.kv_cache.block_hash import CacheKeyFields
from baton.engine.request import Request
from baton.engine.scheduler_config import SchedulerConfig
from baton.messages.node import Outcome
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams
from tests.doubles.fake_clock import FakeClock

TOKEN = 7


def _scheduler(num_blocks: int, known_token: int | None = None) -> SimulatedScheduler:
    config = SchedulerConfig(
        num_blocks=num_blocks, block_size=4, max_num_batched_tokens=32, max_num_seqs=8, watermark=0.0
    )
    scheduler = SimulatedScheduler(config, CacheKeyFields("m", "f", "l"), FakeClock(), known_token=known_token)
    scheduler.kv_snapshot()
    return scheduler


def _step(scheduler: SimulatedScheduler) -> SchedulerOutput:
    decided = scheduler.schedule()
    _commit(scheduler, decided)
    return decided


def _commit(scheduler: SimulatedScheduler, decided: SchedulerOutput) -> None:
    drawn = {request_id: [TOKEN] for request_id in decided.num_scheduled_tokens}
    scheduled: list[NewRequestData | CachedRequestData] = [*decided.scheduled_new_reqs, *decided.scheduled_cached_reqs]
    for data in scheduled:
        request = scheduler.requests.get(data.request_id)
        grows = request is not None and data.request_id in scheduler.decoding
        if request is not None and not grows and request.num_computed_tokens < request.num_tokens:
            # One that was preempted after it had got a block draws none either.
            drawn.pop(data.request_id, None)
    scheduler.update_from_output(decided, ModelRunnerOutput(drawn))


def _state(scheduler: SimulatedScheduler) -> object:
    """All state that later steps depend on."""
    scheduler.bring_up_decodes()
    pool, stats = scheduler.kv_cache_manager.pool, scheduler.make_stats()
    return (
        [block.block_id for block in pool._free],
        {key: block.block_id for key, block in pool._index.items()},
        scheduler.kv_cache_manager.kv_events.since(0),
        # With known tokens no token is drawn for a request that was aborted in a step, so none is skipped.
        replace(stats, counters=replace(stats.counters, num_skipped_results=0)),
        [
            (request.request_id, request.status, request.num_computed_tokens, request.output_token_ids)
            for request in scheduler.requests.values()
        ],
        {request_id: scheduler.kv_cache_manager.block_ids(request_id) for request_id in scheduler.requests},
    )


def _request(rng: Random, number: int) -> Request:
    shared = [1] * 12 if rng.random() < 0.5 else []
    prompt = shared + [rng.randrange(2, 90) for _ in range(rng.randrange(1, 30))]
    return Request(f"r{number}", RequestSpec(prompt, SamplingParams(max_tokens=rng.randrange(1, 60), ignore_eos=True)))


@pytest.mark.parametrize("seed", range(12))
def test_runs_and_single_steps_lead_to_the_same_state(seed: int) -> None:
    rng = Random(seed)
    num_blocks = rng.choice([24, 40, 64, 200])
    stepping, running = _scheduler(num_blocks), _scheduler(num_blocks, TOKEN)
    num_at_once = 0
    for number in range(60):
        twins = [_request(Random(f"{seed} {number}"), number) for _ in range(2)]
        for scheduler, request in zip((stepping, running), twins, strict=True):
            scheduler.add_request(request)
        victim = f"r{rng.randrange(number + 1)}" if rng.random() < 0.2 else None
        steps, is_cut = rng.randrange(1, 25), rng.random() < 0.5
        num_at_once += _advance_both(stepping, running, steps, victim if is_cut else None)
        if victim is not None and not is_cut:
            for scheduler in (stepping, running):
                scheduler.end_requests([victim], Outcome.ABORTED)
        assert _state(stepping) == _state(running)
    assert num_at_once > 20
    while running.has_work():
        _step(stepping)
        running.update_from_output(running.schedule(), same_token_output(TOKEN))
        assert _state(stepping) == _state(running)
    for scheduler in (stepping, running):
        assert not scheduler.has_requests()
        scheduler.kv_cache_manager.check_invariant()


def _advance_both(stepping: SimulatedScheduler, running: SimulatedScheduler, steps: int, victim: str | None) -> int:
    """Advances both by `steps` and aborts `victim` in the last one; returns the number of steps that were in runs."""
    num_at_once = 0
    while steps > 0:
        run = running.decode_run()
        if run is None:
            decided, twin = stepping.schedule(), running.schedule()
            if steps == 1 and victim is not None:
                for scheduler in (stepping, running):
                    scheduler.end_requests([victim], Outcome.ABORTED)
            _commit(stepping, decided)
            running.update_from_output(twin, same_token_output(TOKEN))
            steps -= 1
            continue
        taken = min(steps, run.max_steps)
        for _ in range(taken - 1):
            _step(stepping)
        run.advance(taken - 1)
        decided = stepping.schedule()
        run.begin()
        if taken == steps and victim is not None:
            for scheduler in (stepping, running):
                scheduler.end_requests([victim], Outcome.ABORTED)
        _commit(stepping, decided)
        run.commit()
        steps -= taken
        num_at_once += taken
    return num_at_once
