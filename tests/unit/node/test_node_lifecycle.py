"""The lifecycle of a node: every (state, event) pair of its table, and what ends a node."""

from __future__ import annotations

from baton.messages.node import Role
from baton.node.lifecycle import NODE_TABLE, NodeEvent, NodeState, NodeStop, node_lifecycle
from tests.support.transitions import check_pair, every_pair, row

S, E = NodeState, NodeEvent
_WAY_TO = {
    S.STARTING: (),
    S.READY: (E.STARTED,),
    S.DRAINING: (E.STARTED, E.DRAIN),
    S.STOPPED: (E.STOP,),
}
_LEGAL = {
    (S.STARTING, E.STARTED): S.READY,
    (S.STARTING, E.DRAIN): S.DRAINING,
    (S.STARTING, E.STOP): S.STOPPED,
    (S.READY, E.DRAIN): S.DRAINING,
    (S.READY, E.STOP): S.STOPPED,
    (S.DRAINING, E.DRAIN): S.DRAINING,
    (S.DRAINING, E.STOP): S.STOPPED,
}


@every_pair(S, E)
def test_every_pair_of_state_and_event_moves_as_listed(state: NodeState, event: NodeEvent) -> None:
    life = node_lifecycle("n")
    for step in _WAY_TO[state]:
        life.feed(step)
    assert life.state is state
    assert NODE_TABLE.get((state, event)) is _LEGAL.get((state, event))
    story = life.history
    check_pair(life.feed, lambda: life.state, event, row(_LEGAL, state), "node n")
    if (state, event) not in _LEGAL:
        assert life.history == story


async def test_a_second_drain_or_a_signal_after_a_drain_forces_nothing() -> None:
    """An orchestrator asks to drain first and sends SIGTERM then: that signal is the first one."""
    stop = NodeStop()
    stop.drain()
    stop.drain()
    assert stop.requested.is_set()
    stop()
    assert not stop.forced.is_set()
    stop()
    assert stop.forced.is_set()


async def test_a_new_role_ends_an_incarnation_and_no_process() -> None:
    stop = NodeStop()
    stop.change_role(Role.DECODE)
    assert stop.requested.is_set()
    assert not stop.for_good.is_set()
    stop.change_role(Role.PREFILL)
    assert stop.pop_next_role() is Role.PREFILL
    assert not stop.requested.is_set()
    stop.drain()
    assert stop.pop_next_role() is None


async def test_after_a_signal_no_new_role_follows() -> None:
    stop = NodeStop()
    stop.change_role(Role.DECODE)
    stop()
    assert stop.for_good.is_set()
    assert not stop.forced.is_set()
    assert stop.pop_next_role() is None


async def test_force_ends_a_node_without_a_signal() -> None:
    stop = NodeStop()
    stop.force()
    assert stop.requested.is_set()
    assert stop.forced.is_set()
