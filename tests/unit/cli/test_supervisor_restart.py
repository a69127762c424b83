"""When a process that died is started again: decisions only, time by hand."""

from __future__ import annotations

import pytest

from baton.cli.cluster.supervisor.restart import (
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


def test_back_off_grows_to_its_bound_and_a_loop_is_called_one() -> None:
    life = ChildLife("c")
    delays, words = [], []
    for _ in range(12):
        effect = life.exited(0.0)
        assert isinstance(effect, RetryIn)
        delays.append(effect.seconds)
        words.append(life.status)
        assert life.retry() == Spawn()
    assert delays[:4] == [FIRST_DELAY_S * 2**n for n in range(4)]
    assert delays[-1] == LONGEST_DELAY_S
    assert delays == sorted(delays)
    assert words == ["Starting"] * (LOOP_AFTER - 1) + ["CrashLoop"] * (12 - LOOP_AFTER + 1)
    assert life.restarts == 12


@pytest.mark.parametrize(("served_s", "forgiven"), [(STABLE_S - 1, False), (STABLE_S, True)])
def test_having_served_for_a_while_clears_the_sheet(served_s: float, forgiven: bool) -> None:
    life = ChildLife("c")
    for _ in range(LOOP_AFTER):
        life.exited(0.0)
        life.retry()
    assert life.status == "CrashLoop"
    life.became_ready(10.0)
    assert life.status == "Ready"
    effect = life.exited(10.0 + served_s)
    assert effect == RetryIn(FIRST_DELAY_S if forgiven else FIRST_DELAY_S * 2**LOOP_AFTER)
    assert life.status == ("Starting" if forgiven else "CrashLoop")


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


def test_stopped_while_it_waits_it_has_nothing_to_end() -> None:
    life = ChildLife("c")
    life.exited(0.0)
    assert life.stop() is None
    assert life.state is ChildState.STOPPED


def test_readiness_that_comes_too_late_changes_nothing() -> None:
    life = ChildLife("c")
    life.stop()
    assert life.became_ready(0.0) is None
    assert life.status == "Draining"
