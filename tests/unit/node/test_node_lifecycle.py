"""What ends a node."""

from __future__ import annotations

from baton.messages.node import Role
from baton.node.lifecycle import NodeStop


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
