"""Small parts of a node: an attempt's clock, a router's port, the event log."""

from __future__ import annotations

import asyncio
import threading

import pytest

from baton.engine.batch import EngineCoreEvent, EngineCoreEventType
from baton.messages.ids import AttemptKey
from baton.messages.node import Abort, LoadReport, RouterMessage, StageTimings, StepReport
from baton.node.attempts.attempt_times import AttemptClock, TransferFigures
from baton.node.reports.logs import EventLog
from baton.node.router_streams import Port

KEY = AttemptKey("r", 1)
T = EngineCoreEventType


def clock_of(*events: tuple[EngineCoreEventType, float]) -> AttemptClock:
    clock = AttemptClock()
    for kind, time in events:
        clock.note(EngineCoreEvent(kind, KEY, time))
    return clock


def test_stages_are_the_times_between_their_events() -> None:
    clock = clock_of(
        (T.QUEUED, 1.0), (T.SCHEDULED, 1.5), (T.CHUNK_COMPUTED, 2.0), (T.FIRST_TOKEN, 3.5), (T.FINISHED, 9)
    )
    assert clock.timings(9.5, 16, 0, None) == StageTimings(
        queue_ms=500.0, prefill_ms=2000.0, cached_tokens=16, decode_ms=6000.0
    )


def test_a_decode_leg_waits_until_its_blocks_are_reserved_and_prefills_nothing() -> None:
    clock = clock_of((T.QUEUED, 1.0), (T.REMOTE_KV_REQUESTED, 1.25), (T.REMOTE_KV_ARRIVED, 2.0), (T.SCHEDULED, 2.5))
    timings = clock.timings(3.0, 0, 32, TransferFigures(4096, 1.5))
    assert timings == StageTimings(250.0, 0.0, 1.5, 0, 32, 4096, intake_ms=750.0, decode_ms=1000.0)


def test_preemption_changes_no_stage() -> None:
    clock = clock_of((T.QUEUED, 1.0), (T.SCHEDULED, 2.0), (T.FIRST_TOKEN, 3.0), (T.PREEMPTED, 4.0), (T.SCHEDULED, 7.0))
    assert clock.timings(8.0, 0, 0, None) == StageTimings(queue_ms=1000.0, prefill_ms=1000.0, decode_ms=5000.0)


def test_stages_that_were_not_reached_are_zero() -> None:
    assert clock_of().timings(9.0, 0, 0, None) == StageTimings()
    assert clock_of((T.QUEUED, 5.0)).timings(9.0, 0, 0, None) == StageTimings()
    assert clock_of((T.QUEUED, 5.0), (T.SCHEDULED, 6.0)).timings(9.0, 0, 0, None) == StageTimings(queue_ms=1000.0)


class PortRig:
    def __init__(self) -> None:
        self.received: list[RouterMessage] = []
        self.given_up: list[tuple[AttemptKey, str]] = []
        self.closed: list[Port] = []
        self.port = Port(
            1,
            "router-0",
            "router-0.run1",
            lambda port, message: self.received.append(message),
            lambda port, attempt, error: self.given_up.append((attempt, error)),
            self.closed.append,
        )


def report(running: int) -> StepReport:
    return StepReport((), LoadReport(running=running))


async def test_reports_come_in_order_and_end_with_the_port() -> None:
    rig = PortRig()
    rig.port.push(report(1))
    rig.port.push(report(2))
    rig.port.close()
    rig.port.close()
    rig.port.push(report(3))
    assert [r.load.running async for r in rig.port.reports()] == [1, 2]
    assert rig.closed == [rig.port]


async def test_a_waiting_router_is_woken_by_a_report_and_by_the_end() -> None:
    rig = PortRig()
    reading = asyncio.ensure_future(anext(rig.port.reports()))
    rig.port.push(report(1))
    assert (await reading).load.running == 1
    ending = asyncio.ensure_future(anext(rig.port.reports()))
    rig.port.close()
    with pytest.raises(StopAsyncIteration):
        await ending


async def test_a_closed_port_ignores_messages_and_reports() -> None:
    rig = PortRig()
    rig.port.receive(Abort(KEY, "x"))
    rig.port.refuse(KEY, "unreadable")
    rig.port.close()
    rig.port.receive(Abort(KEY, "y"))
    rig.port.refuse(KEY, "unreadable")
    assert rig.received == [Abort(KEY, "x")]
    assert rig.given_up == [(KEY, "unreadable")]


async def test_a_report_is_a_sign_of_life() -> None:
    rig = PortRig()
    rig.port.is_silent = True
    rig.port.push(report(1))
    assert not rig.port.is_silent


def test_the_event_log_keeps_the_latest_events_and_numbers_them_all() -> None:
    log = EventLog(capacity=3)
    for number in range(5):
        log.record("e", KEY, number)
    assert [(event.seq, event.value) for event in log.after(0)] == [(3, 2), (4, 3), (5, 4)]
    assert [event.seq for event in log.after(4)] == [5]
    assert log.after(5) == []


def test_an_event_with_a_known_time_keeps_it() -> None:
    log = EventLog()
    log.record_at(12.5, "scheduled", KEY, 7)
    (event,) = log.after(0)
    assert (event.monotonic_ns, event.name, event.attempt, event.value) == (12_500_000_000, "scheduled", KEY, 7)


def test_events_of_several_threads_are_neither_lost_nor_doubled() -> None:
    log = EventLog()

    def write() -> None:
        for _ in range(500):
            log.record("e", KEY)

    writers = [threading.Thread(target=write) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    seqs = [event.seq for event in log.after(0)]
    assert seqs == list(range(1, 2001))
