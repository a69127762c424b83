"""Decides when a process that died is started again: tests of the decisions, with time as an argument."""

from __future__ import annotations

import pytest

from baton.cli.cluster.supervisor.child import (
    CHILD_TABLE,
    FIRST_DELAY_S,
    LONGEST_DELAY_S,
    LOOP_AFTER,
    STABLE_S,
    ChildEvent,
    ChildLife,
    ChildState,
    RetryIn,
    Spawn,
    Terminate,
)
from baton.machine import IllegalEvent, Machine
from tests.support.transitions import check_pair, every_pair, row


@every_pair(ChildState, ChildEvent)
def test_every_pair_is_either_in_the_table_or_illegal(state: ChildState, event: ChildEvent) -> None:
    machine = Machine("child", state, CHILD_TABLE)
    check_pair(machine.feed, lambda: machine.state, event, row(CHILD_TABLE, state))


def test_the_delay_grows_to_its_limit_and_a_crash_loop_is_recognised() -> None:
    life = ChildLife("c")
    delays, statuses = [], []
    for _ in range(12):
        effect = life.exited(0.0)
        assert isinstance(effect, RetryIn)
        delays.append(effect.seconds)
        statuses.append(life.status)
        assert life.retry() == Spawn()
    assert delays[:4] == [FIRST_DELAY_S * 2**n for n in range(4)]
    assert delays[-1] == LONGEST_DELAY_S
    assert delays == sorted(delays)
    assert statuses == ["Starting"] * (LOOP_AFTER - 1) + ["CrashLoop"] * (12 - LOOP_AFTER + 1)
    assert life.restarts == 12


@pytest.mark.parametrize(("served_s", "is_stable"), [(STABLE_S - 1, False), (STABLE_S, True)])
def test_deaths_before_a_long_run_do_not_count(served_s: float, is_stable: bool) -> None:
    life = ChildLife("c")
    for _ in range(LOOP_AFTER):
        life.exited(0.0)
        life.retry()
    assert life.status == "CrashLoop"
    life.became_ready(10.0)
    assert life.status == "Ready"
    effect = life.exited(10.0 + served_s)
    assert effect == RetryIn(FIRST_DELAY_S if is_stable else FIRST_DELAY_S * 2**LOOP_AFTER)
    assert life.status == ("Starting" if is_stable else "CrashLoop")


def test_a_stopped_process_is_not_started_again() -> None:
    life = ChildLife("c")
    life.became_ready(0.0)
    assert life.stop() == Terminate()
    assert life.stop() == Terminate()
    assert life.status == "Draining"
    assert life.exited(1.0) is None
    assert (life.state, life.status, life.restarts) == (ChildState.STOPPED, "Stopped", 0)
    with pytest.raises(IllegalEvent):
        life.retry()


def test_a_process_that_is_stopped_while_it_waits_is_not_terminated() -> None:
    life = ChildLife("c")
    life.exited(0.0)
    assert life.stop() is None
    assert life.state is ChildState.STOPPED


def test_readiness_after_a_stop_changes_nothing() -> None:
    life = ChildLife("c")
    life.stop()
    assert life.became_ready(0.0) is None
    assert life.status == "Draining"
