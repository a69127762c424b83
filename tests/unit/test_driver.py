"""The engine's thread: it sleeps, wakes, obeys in order, refuses duplicates, and tells when it dies."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence

import pytest

from baton.engine.connector import KVTransferOutput
from baton.engine.connector_fake import FakeConnector
from baton.engine.outputs import EngineCoreEvent, EngineCoreOutput, SchedulerOutput
from baton.engine.request import FinishReason, Leg, Request, SamplingParams
from baton.node.driver import EngineDriver, StepNews
from baton.node.outbox import Outbox
from tests.support.engine_rig import SOURCE, EngineRig, prompt_of

LONG_S = 30.0


class DriverRig:
    """A running driver; `news` has what it published."""

    def __init__(self) -> None:
        self.engine = EngineRig()
        self.news: queue.SimpleQueue[StepNews] = queue.SimpleQueue()
        self.crashes: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
        self.driver = EngineDriver(self.engine.core, self.news.put, self.crashes.put)

    def until_end(self, request_id: str) -> list[EngineCoreOutput]:
        """The outputs of a request up to its end."""
        seen = []
        while True:
            for outputs in self.news.get(timeout=LONG_S).outputs.values():
                for output in outputs.outputs:
                    if output.request_id == request_id:
                        seen.append(output)
                        if output.finish_reason is not None:
                            return seen


@pytest.fixture
def rig() -> Iterator[DriverRig]:
    rig = DriverRig()
    rig.driver.start()
    yield rig
    rig.driver.stop()
    assert all(thread.name != "baton-engine" for thread in threading.enumerate())


def request(request_id: str, client_index: int = 0, **fields: object) -> Request:
    params = SamplingParams(max_tokens=3)
    return Request(request_id, prompt_of(6), params, client_index=client_index, **fields)  # type: ignore[arg-type]


def test_it_runs_what_is_submitted_and_sleeps_in_between(rig: DriverRig) -> None:
    for number in range(3):
        rig.driver.submit(request(f"r{number}"))
        outputs = rig.until_end(f"r{number}")
        assert sum(len(output.new_token_ids) for output in outputs) == 3
        assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert rig.news.empty(), "it turned although there was nothing to do"


def test_a_live_id_ends_the_second_one_alone(rig: DriverRig) -> None:
    rig.driver.submit(request("r", client_index=1, leg=Leg.DECODE, kv_source=SOURCE))
    rig.driver.submit(request("r", client_index=2))
    while 2 not in (news := rig.news.get(timeout=LONG_S)).outputs:
        assert not news.outputs
    (refused,) = news.outputs[2].outputs
    assert refused.finish_reason is FinishReason.ERROR
    assert "here already" in (refused.error or "")
    rig.driver.tell_transfer(KVTransferOutput(failed={"r": "gone"}))
    assert rig.until_end("r")[-1].kv_lost


def test_orders_are_obeyed_as_they_came(rig: DriverRig) -> None:
    """An abort right behind its submit finds it; one before it does not; ids nobody knows are fine."""
    rig.driver.abort(["r", "nobody"])
    rig.driver.submit(request("r", leg=Leg.DECODE, kv_source=SOURCE))
    rig.driver.abort(["r"])
    assert rig.until_end("r")[-1].finish_reason is FinishReason.ABORT
    rig.driver.abort(["r"])
    rig.driver.submit(request("after"))
    assert rig.until_end("after")[-1].finish_reason is FinishReason.LENGTH


def test_a_released_transfer_wakes_who_waits_for_blocks(rig: DriverRig) -> None:
    big = Request("big", prompt_of(200), SamplingParams(max_tokens=1), leg=Leg.PREFILL)
    rig.driver.submit(big)
    rig.until_end("big")
    waits = Request("waits", prompt_of(200, 5), SamplingParams(max_tokens=1))
    rig.driver.submit(waits)
    assert rig.news.get(timeout=LONG_S).stats.num_waiting == 1
    rig.driver.tell_transfer(KVTransferOutput(released=frozenset({"big"})))
    assert rig.until_end("waits")[-1].finish_reason is FinishReason.LENGTH


def test_news_carry_events_and_the_load_after_the_turn(rig: DriverRig) -> None:
    rig.driver.submit(request("r"))
    events: list[EngineCoreEvent] = []
    stats = None
    while not any(event.type.value == "finished" for event in events):
        news = rig.news.get(timeout=LONG_S)
        events += news.events
        stats = news.stats
    assert [event.type.value for event in events if event.type.value != "chunk_computed"] == [
        "queued",
        "scheduled",
        "first_token",
        "finished",
    ]
    assert stats is not None
    assert (stats.num_running, stats.free_blocks) == (0, stats.total_blocks)


def test_a_runner_that_raises_fails_its_step_and_the_engine_goes_on(rig: DriverRig) -> None:
    rig.engine.runner.raise_next = RuntimeError("out of luck")
    rig.driver.submit(request("r"))
    assert "out of luck" in (rig.until_end("r")[-1].error or "")
    rig.driver.submit(request("next"))
    assert rig.until_end("next")[-1].finish_reason is FinishReason.LENGTH
    assert rig.crashes.empty()


def test_a_scheduler_that_raises_is_told_once_and_ends_the_thread(
    rig: DriverRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> SchedulerOutput:
        raise ValueError("the books disagree")

    monkeypatch.setattr(rig.engine.scheduler, "schedule", broken)
    rig.driver.submit(request("r"))
    assert str(rig.crashes.get(timeout=LONG_S)) == "the books disagree"
    rig.driver.abort(["r"])
    rig.driver.stop()
    assert rig.crashes.empty()


def test_stop_does_not_wait_for_work_that_is_left() -> None:
    rig = DriverRig()
    rig.driver.start()
    rig.driver.submit(request("r", leg=Leg.DECODE, kv_source=SOURCE))
    rig.driver.stop()
    rig.driver.stop()
    rig.driver.submit(request("late"))


def test_what_a_step_leaves_behind_goes_after_its_news() -> None:
    """An offer wakes another node; the first token of the same step must not wait for that."""
    order: queue.SimpleQueue[str] = queue.SimpleQueue()
    outbox = Outbox(lambda action: action())

    class Connector(FakeConnector):
        def blocks_computed(self, request: Request, block_ids: Sequence[int], num_computed_tokens: int) -> None:
            outbox.add(lambda: order.put("left by the step"))

    engine = EngineRig(connector=Connector())
    outbox.add(lambda: order.put("left before"))

    def publish(news: StepNews) -> None:
        if news.outputs:
            order.put("news")

    driver = EngineDriver(engine.core, publish, lambda error: None, outbox.flush)
    driver.start()
    driver.submit(request("r", leg=Leg.PREFILL))
    assert [order.get(timeout=LONG_S) for _ in range(3)] == ["left before", "news", "left by the step"]
    driver.stop()
