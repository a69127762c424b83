"""A decode node's load begins when it is decided, while both nodes compute their next steps.

The prefill node reports that a prompt has begun when its first step is decided, not when that step is computed.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from baton.clock import SystemClock
from baton.config import NodeConfig
from baton.engine.kv_cache.block_hash import CacheKeyFields
from baton.engine.request import Request
from baton.engine.scheduler import Scheduler, SchedulerConfig
from baton.messages.ids import AttemptKey
from baton.messages.node import Leg
from baton.messages.sampling import SamplingParams
from baton.node.driver import EngineDriver, StepNews
from baton.node.role import RoleContext
from baton.node.serve import Outbox
from baton.runner import SimulatedSpec
from baton.runner.execution.step_thread import StepThread
from baton.runner.simulated import SimulatedRunner
from decode_node.app import DecodeRole
from kv_transfer.backends.base import TransferBackend
from prefill_node.app import PrefillRole
from tests.support.engine_rig import SOURCE, prompt_of
from tests.support.requests import request_of
from tests.support.step_gate import StepGate

LONG_S = 30.0
SPEC = SimulatedSpec(num_blocks=64, block_size=4, vocab_size=997, max_model_len=256)


def no_backend(context: RoleContext, agent: str) -> TransferBackend:
    raise AssertionError("nothing is to be moved here")


MakeBackend = Callable[[RoleContext, str], TransferBackend]
Role = DecodeRole | PrefillRole


class Rig:
    """A node's engine and role, connected as in a node; the event loop is a queue that is not processed."""

    def __init__(self, ahead: bool, make_role: Callable[[RoleContext, MakeBackend], Role]) -> None:
        self.gate = StepGate(allowed=0)
        self.posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        runner = SimulatedRunner(replace(SPEC, sleep=self.gate))
        config = NodeConfig.model_validate({"role": "decode", "node_id": "d", "registry": "memory://", "block_size": 4})
        outbox, clock = Outbox(self.posted.put), SystemClock()
        context = RoleContext(
            config,
            "d.1",
            "127.0.0.1:1",
            runner,
            clock,
            self.posted.put,
            outbox.add,
            outbox.add_work,
            lambda news: None,
            lambda *event: None,
        )
        self.role = make_role(context, no_backend)
        fields = CacheKeyFields.of(runner.model, runner.layout)
        scheduler = Scheduler(SchedulerConfig(64, block_size=4), fields, clock, self.role.connector)
        self.news: queue.SimpleQueue[StepNews] = queue.SimpleQueue()
        self.driver = EngineDriver(
            scheduler,
            runner,
            self.news.put,
            lambda error: None,
            executor=StepThread() if ahead else None,
            flush=outbox.flush,
        )
        self.driver.start()

    def submit_pulled(self) -> None:
        """Ask for a leg whose prompt its prefill node has begun to compute."""
        request = pulled()
        assert isinstance(self.role, DecodeRole)
        self.role.intake._may_plan[request.attempt] = 0
        self.driver.submit(request)

    def expected_and_planned(self) -> None:
        """Return when the loop was left both words of that leg: that it is there, and that its blocks are."""
        for _ in range(2):
            self.posted.get(timeout=LONG_S)


@contextmanager
def running(rig: Rig) -> Iterator[Rig]:
    yield rig
    rig.gate.allow(None)
    rig.driver.stop()


@pytest.fixture(params=[False, True], ids=["in turn", "ahead"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    with running(Rig(request.param, DecodeRole)) as rig:
        yield rig


def pulled() -> Request:
    return attempt_of("pulls", prompt_of(20), 3, leg=Leg.DECODE, kv_source=SOURCE)


def attempt_of(name: str, prompt: Sequence[int], max_tokens: int, **fields: Any) -> Request:
    attempt = AttemptKey(name, 1)
    return request_of(str(attempt), prompt, SamplingParams(max_tokens=max_tokens), attempt=attempt, **fields)


def test_a_load_begins_while_the_step_in_which_it_was_decided_computes(rig: Rig) -> None:
    rig.driver.submit(attempt_of("busy", prompt_of(6, 1), 50))
    rig.gate.wait_for_step(1)
    rig.submit_pulled()
    assert rig.posted.empty()
    rig.gate.allow(1)
    rig.gate.wait_for_step(2)
    rig.expected_and_planned()
    assert rig.role.connector.num_followed == 1


def test_a_load_begins_at_once_when_there_is_nothing_to_compute(rig: Rig) -> None:
    rig.submit_pulled()
    rig.expected_and_planned()
    assert rig.news.get(timeout=LONG_S).stats.num_waiting_for_remote_kvs == 1


@pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "ahead"])
def test_a_prompts_begin_is_reported_while_its_first_step_computes(ahead: bool) -> None:
    with running(Rig(ahead, PrefillRole)) as rig:
        rig.driver.submit(attempt_of("begins", prompt_of(20), 1, leg=Leg.PREFILL))
        rig.gate.wait_for_step(1)
        rig.posted.get_nowait()
        assert rig.posted.empty()
