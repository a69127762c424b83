"""A node without gRPC, over a real engine whose turns the test calls."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from baton.clock import Clock
from baton.engine.kv_cache.block_hash import CacheKeyFields
from baton.engine.scheduler import Scheduler, SchedulerConfig
from baton.messages.ids import AttemptKey, Peer
from baton.messages.node import Leg, NodeDescription, RequestDelta, Role, StepReport, Submit
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams
from baton.node.reports.logs import EventLog
from baton.node.router_streams import Port
from baton.node.service import NodeService
from tests.doubles.fake_adapter_threads import FakeAdapterThreads
from tests.doubles.fake_clock import FakeClock
from tests.doubles.fake_engine_driver import FakeEngineDriver
from tests.doubles.fake_role import FakeRole
from tests.doubles.fake_runner import FakeRunner, prompt_slots
from tests.support.requests import changed

VOCAB = 1000
PROMPT = (1, 2, 3, 4, 5, 6)
KEY = AttemptKey("req", 1, 7)
SOURCE = Peer("prefill-0", "prefill-0.run1", "127.0.0.1:1")
DESCRIPTION = NodeDescription(
    node_id="decode-0",
    incarnation="decode-0.run1",
    role=Role.DECODE,
    address="127.0.0.1:2",
    pid=1,
    version="0",
    model="scripted",
    model_fingerprint="scripted",
    dtype="float32",
    numerics="scripted",
    bit_exact=True,
    vocab_size=VOCAB,
    max_model_len=128,
    block_size=4,
    num_blocks=32,
    eos_token_ids=frozenset(),
)


class NodeRig:
    """A node service. Requests are submitted by `submit`; the reports for a router are in its port."""

    def __init__(self, role: Role = Role.DECODE, clock: Clock | None = None, **service: Any) -> None:
        self.runner = runner = FakeRunner(33, 4, vocab_size=VOCAB)
        self.manual_clock = FakeClock(100.0)
        self.clock = clock if clock is not None else self.manual_clock
        self.role = FakeRole()
        limits = SchedulerConfig(33, block_size=4, max_num_batched_tokens=64, max_num_seqs=4, max_model_len=128)
        fields = CacheKeyFields.of(runner.model, runner.layout)
        self.scheduler = Scheduler(limits, fields, self.clock, self.role.connector)
        self.crashes: list[BaseException] = []
        self.adapters = FakeAdapterThreads()
        self.driver = FakeEngineDriver(
            self.scheduler,
            runner,
            lambda news: self.service.on_step(news),
            self.crashes.append,
            adapters=self.adapters,
            max_cpu_loras=2,
        )
        self.drained = 0
        self.log = EventLog()
        description = replace(DESCRIPTION, role=role, embedding_size=runner.model.embedding_size)
        service = {"adapters": self.adapters} | service
        self.service = NodeService(description, self.role, self.driver, self.log, self.clock, self._drain, **service)

    def write_kv(self, block_ids: Sequence[int], prompt: Sequence[int]) -> None:
        """Write the right KV of a prompt into these blocks."""
        self.runner.write_slots(block_ids, prompt_slots(prompt))

    async def check_idle(self, port: Port) -> None:
        """Check that nothing runs for this router, and wait until nothing is left of anybody's requests."""
        assert not self.service.running_for(port)
        await self.service.draining.wait_idle()

    def _drain(self) -> None:
        self.drained += 1

    def submit(self, port: Port, key: AttemptKey = KEY, **fields: Any) -> None:
        port.receive(submit(key, **fields))

    def begin(self, port: Port, key: AttemptKey = KEY, turns: int = 1, **fields: Any) -> None:
        """Submit an attempt and run so many turns of the engine."""
        self.submit(port, key, **fields)
        self.driver.turns(turns)

    def complete(self, port: Port, key: AttemptKey = KEY, **fields: Any) -> None:
        """Submit an attempt and run turns until the engine has no work."""
        self.submit(port, key, **fields)
        self.driver.run()


def submit(key: AttemptKey = KEY, **fields: Any) -> Submit:
    params = SamplingParams(temperature=0.0, seed=3, max_tokens=4)
    return changed(Submit(key, Leg.WHOLE, RequestSpec(PROMPT, params)), **fields)


async def queued_reports(port: Port) -> list[StepReport]:
    """Return all reports that are queued for the router now."""
    reports = port.reports()
    assert isinstance(reports, AsyncGenerator)
    async with aclosing(reports) as stream:
        return [await anext(stream) for _ in range(port.num_queued)]


async def deltas(port: Port) -> list[RequestDelta]:
    """Return the queued deltas without those that only confirm that an attempt was taken."""
    return [
        delta
        for report in await queued_reports(port)
        for delta in report.deltas
        if delta != RequestDelta(delta.attempt)
    ]


def tokens(of: Sequence[RequestDelta]) -> list[int]:
    return [token for delta in of for token in delta.token_ids]
