"""One contract for the state that operators want of nodes, in Redis and in the in-memory registry."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from baton.errors import Unreachable
from baton.messages.adapters import AdapterSource
from baton.registry.desired import (
    DesiredChange,
    DesiredMemory,
    DesiredState,
    cordon,
    end_planned_cordons,
    forget_adapter,
    forget_planned,
    name_adapter,
    plan_cordon,
    plan_role,
    set_role,
    uncordon,
)
from tests.contract.test_registry import BOUND_S, Server, node, server

__all__ = ["server"]


async def wait_for_state(watch: AsyncIterator[DesiredState], condition: Callable[[DesiredState], bool]) -> DesiredState:
    """Return the first state for which the condition holds."""
    async with asyncio.timeout(BOUND_S):
        async for state in watch:
            if condition(state):
                return state
    raise AssertionError("the watch ended")


async def test_a_cordon_is_seen_by_every_watcher_and_lifted_again(server: Server) -> None:
    first, second = server.connect().watch_desired(), server.connect().watch_desired()
    assert await anext(first) == await anext(second) == DesiredState()
    registry = server.connect()
    await registry.want(cordon(["a", "b"]))
    await registry.want(cordon(["b"]))
    for watch in (first, second):
        assert await wait_for_state(watch, lambda s: bool(s.cordoned)) == DesiredState(frozenset("ab"))
    await registry.want(uncordon(["a", "nobody"]))
    assert await wait_for_state(first, lambda s: "a" not in s.cordoned) == DesiredState(frozenset("b"))
    assert await server.connect().desired() == DesiredState(frozenset("b"))
    assert await server.connect("another").desired() == DesiredState()


async def test_a_node_has_one_desired_role_at_most(server: Server) -> None:
    registry = server.connect()
    await registry.want(set_role("a", "decode"))
    assert (await registry.desired()).role_of("a") == "decode"
    await registry.want(set_role("a", "prefill"))
    desired = await registry.desired()
    assert (desired.role_of("a"), desired.role_of("b")) == ("prefill", None)
    assert desired.decode == frozenset()


async def test_what_operators_say_of_a_role_comes_before_what_is_planned(server: Server) -> None:
    registry = server.connect()
    for change in (plan_cordon("a"), plan_role("a", "prefill"), plan_role("b", "prefill"), plan_role("b", "decode")):
        await registry.want(change)
    desired = await registry.desired()
    assert (desired.role_of("a"), desired.role_of("b"), desired.is_cordoned("a")) == ("prefill", "decode", True)
    await registry.want(DesiredChange({"decode": frozenset("a")}, {}))
    assert (await registry.desired()).role_of("a") == "decode"
    await registry.want(uncordon(["a"]))
    await registry.want(set_role("a", "decode"))
    assert await registry.desired() == DesiredState(decode=frozenset("a"), planned_decode=frozenset("b"))
    await registry.want(cordon(["b"]))
    await registry.want(end_planned_cordons(["b"]))
    assert (await registry.desired()).is_cordoned("b")
    await registry.want(forget_planned(["b"]))
    assert (await registry.desired()).role_of("b") is None


async def test_changes_fail_while_the_registry_is_away_and_an_empty_one_gets_the_known_state_again(
    server: Server,
) -> None:
    registry = server.connect()
    watch = registry.watch_desired()
    await registry.lease(node("a"))
    await registry.want(cordon(["a"]))
    await registry.want(set_role("a", "decode"))
    wanted = DesiredState(cordoned=frozenset("a"), decode=frozenset("a"))
    assert await wait_for_state(watch, lambda s: bool(s.decode)) == wanted

    await server.stop()
    with pytest.raises(Unreachable, match="does not answer"):
        await registry.want(uncordon(["a"]))
    with pytest.raises(Unreachable):
        await registry.desired()

    await server.start_empty()
    newcomer = server.connect().watch_desired()
    assert await wait_for_state(newcomer, lambda s: bool(s.decode and s.cordoned)) == wanted
    await registry.want(uncordon(["a"]))
    assert await wait_for_state(watch, lambda s: not s.cordoned) == DesiredState(decode=frozenset("a"))


async def test_adapters_have_names_at_every_process_until_they_are_taken_away(server: Server) -> None:
    registry, watch = server.connect(), server.connect().watch_desired()
    one, two = (AdapterSource(name, f"/{name}", digest * 64) for name, digest in (("one", "a"), ("two", "b")))
    for source in (one, two):
        await registry.want(name_adapter(source, await registry.desired()))
    state = await wait_for_state(watch, lambda s: len(s.adapters) == 2)
    assert {name: named.source for name, named in state.named_adapters.items()} == {"one": one, "two": two}
    other = AdapterSource("one", "/other", "c" * 64)
    await registry.want(name_adapter(other, state))
    state = await wait_for_state(watch, lambda s: s.named_adapters["one"].source == other)
    await registry.want(forget_adapter("one", state))
    assert list((await wait_for_state(watch, lambda s: len(s.adapters) == 1)).named_adapters) == ["two"]


async def test_all_incarnations_of_a_name_are_listed_oldest_first(server: Server) -> None:
    registry = server.connect()
    new, old = node(run="new", started_at=2.0), node(run="old", started_at=1.0)
    await registry.lease(new)
    await registry.lease(old)
    await registry.lease(node("prefill-1"))
    assert await registry.namesakes("prefill-0") == [old, new]
    assert await registry.namesakes("prefill") == []


def test_a_flushed_registry_gets_only_the_known_state_that_it_does_not_contradict() -> None:
    memory = DesiredMemory()
    known = DesiredState(frozenset("ab"), decode=frozenset("a"), planned_cordon=frozenset("d"))
    assert memory.merge("one", known) == (known, DesiredChange({}, {}))
    # In the new one somebody has chosen another role and cordoned a third node already.
    fresh = DesiredState(frozenset("bc"), prefill=frozenset("a"))
    believed, again = memory.merge("two", fresh)
    assert believed == DesiredState(frozenset("abc"), prefill=frozenset("a"))
    assert again == cordon("a")
    assert memory.merge("two", DesiredState()) == (DesiredState(), DesiredChange({}, {}))


def test_invalid_node_names_are_skipped() -> None:
    assert DesiredState.of({"cordoned": ["a", "", "b c", "x" * 200]}) == DesiredState(frozenset("a"))
