"""What a router does for operators, with scripted nodes and manual time, and how commands show it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import pytest

from baton.cli.commands.drain import remaining_work
from baton.cli.commands.events import event_row
from baton.cli.commands.set_role import OtherWishes
from baton.cli.commands.wait import nodes_by_name, parse_condition
from baton.errors import BatonError, CacheInUse, ConfigError, InvalidRequest, NodeNotFound, Unreachable, UsageError
from baton.messages.ids import AttemptKey
from baton.messages.node import LoadReport, NodeDescription, Role
from baton.messages.operator import ClusterEvent, DrainProgress, NodeStatus
from baton.node.leftovers import GIVE_UP_AFTER_S
from router.operations.event_ring import EventRing
from router.operations.steering import SETTLE_S, Steering
from router.placement.placer import Placer
from router.placement.view import ClusterView
from tests.doubles.fake_registry import FakeRegistry, FakeRegistryStore
from tests.doubles.fake_timers import FakeTimers
from tests.support.router_parts import MODEL, decode, prefill, record_of

KEY = AttemptKey("r", 1, 5)


class RecordingNodeClient:
    """A client of a node, which records the calls."""

    def __init__(self, rig: Rig, address: str) -> None:
        self._rig = rig
        self._address = address

    async def set_role(self, role: Role, incarnation: str = "", timeout_s: float | None = None) -> None:
        self._rig.asked.put_nowait((self._address, incarnation, role))
        if self._rig.refusal is not None:
            raise self._rig.refusal

    async def reset_prefix_cache(self, incarnation: str = "", timeout_s: float | None = None) -> int:
        self._rig.resets.append((self._address, incarnation))
        if self._rig.in_use:
            raise CacheInUse(self._rig.in_use)
        return 12

    async def drain(self, timeout_s: float | None = None) -> None:
        self._rig.drained.put_nowait(self._address)

    async def close(self) -> None:
        self._rig.closed.put_nowait(self._address)


class Rig:
    """The steering of a router, and the view of the cluster on which it acts."""

    def __init__(self) -> None:
        self.store = FakeRegistryStore()
        self.timers = FakeTimers()
        self.view = ClusterView()
        self.registry = FakeRegistry(self.store, "c")
        self.events = EventRing("r1.a", lambda: 0.0)
        self.asked: asyncio.Queue[tuple[str, str, Role]] = asyncio.Queue()
        self.drained: asyncio.Queue[str] = asyncio.Queue()
        self.closed: asyncio.Queue[str] = asyncio.Queue()
        self.refusal: ConfigError | None = None
        self.resets: list[tuple[str, str]] = []
        self.in_use = ""
        self.steering = Steering(
            self.view,
            self.registry,
            Placer(),
            self.timers,
            self.events,
            lambda address: RecordingNodeClient(self, address),
            MODEL,
        )

    def attach(self, *nodes: NodeDescription) -> None:
        self.view.registered([record_of(node) for node in nodes])
        for node in nodes:
            self.view.attached(node, self.timers.monotonic())

    def placeable(self) -> set[str]:
        return {candidate.node.node_id for candidate in self.view.candidates()}

    def reasons(self) -> list[str]:
        return [event.reason for event in self.events.after(0)]

    def report(self, node: NodeDescription, **load: int) -> None:
        self.view.reported(node.incarnation, LoadReport(total_blocks=64, free_blocks=64, **load))  # type: ignore[arg-type]


@asynccontextmanager
async def steering() -> AsyncIterator[Rig]:
    rig = Rig()
    rig.attach(prefill(), decode(), decode("d2"))
    rig.steering.check_cluster()
    watching = asyncio.create_task(rig.steering.watch())
    try:
        yield rig
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await rig.steering.close()
        await rig.registry.close()


async def test_a_cordon_is_kept_and_every_router_obeys_it() -> None:
    async with steering() as rig:
        other = Rig()
        other.registry = FakeRegistry(rig.store, "c")
        assert await rig.steering.cordon(["d1"]) == ""
        assert rig.placeable() == {"p1", "d2"}
        assert rig.reasons()[-1] == "Cordoned"
        assert (await other.registry.desired()).cordoned == {"d1"}
        # A new incarnation with this name is cordoned, too.
        rig.view.detached("d1.1", "gone", 0.0)
        rig.attach(prefill(), decode(run=2), decode("d2"))
        assert rig.placeable() == {"p1", "d2"}
        assert [s.status for s in rig.view.statuses(0.0, 0.0)] == ["Cordoned", "Ready", "Ready"]
        await rig.steering.uncordon(["d1"])
        assert rig.placeable() == {"p1", "d1", "d2"}
        await other.registry.close()


async def test_a_cache_reset_is_an_event() -> None:
    async with steering() as rig:
        assert await rig.steering.reset_cache("d1") == 12
        assert rig.resets == [(decode().address, "d1.1")]
        event = rig.events.after(0)[-1]
        assert (event.reason, event.subject, event.incarnation, event.detail) == (
            "CacheReset",
            "d1",
            "d1.1",
            "12 blocks forgotten",
        )
        rig.in_use = "blocks are in use: 3 held by requests"
        before = rig.reasons()
        with pytest.raises(CacheInUse, match="d1: blocks are in use: 3 held by requests"):
            await rig.steering.reset_cache("d1")
        assert rig.reasons() == before, "a refused reset is not an event"
        with pytest.raises(NodeNotFound, match="no node is called d7"):
            await rig.steering.reset_cache("d7")
        assert rig.closed.qsize() == 2


async def test_cordoning_the_last_node_of_a_role_gives_a_warning() -> None:
    async with steering() as rig:
        assert await rig.steering.cordon(["d1", "d2"]) == "no decode node is left for new requests"
        warning = await rig.steering.cordon(["p1"])
        assert warning == "nothing is served from now on: no node can serve"
        assert rig.reasons()[-1] == "ClusterUnavailable"
        await rig.steering.uncordon(["d1", "d2", "p1"])
        assert (await rig.steering.set_role("p1", "decode")).warning == "no prefill node is left for new requests"
        rig.attach(prefill("p2"), decode("d3", model_fingerprint="other"))
        warning = await rig.steering.cordon(["d1", "d2"])
        assert warning == "no decode node is left for new requests but d3, which is Incompatible"


async def test_invalid_operations_change_nothing() -> None:
    async with steering() as rig:
        rig.steering.registered_routers({"router-1.x": "router-1"})
        with pytest.raises(NodeNotFound, match=r"no node is called d22 \(did you mean d2\?\)"):
            await rig.steering.cordon(["p1", "d22"])
        with pytest.raises(InvalidRequest, match="router-1 is a router"):
            await rig.steering.cordon(["router-1"])
        with pytest.raises(InvalidRequest, match="nodes: is empty"):
            await rig.steering.uncordon([])
        with pytest.raises(InvalidRequest, match="role: 'both' is none of prefill, decode"):
            await rig.steering.set_role("p1", "both")
        rig.store.stop()
        with pytest.raises(Unreachable, match="nothing was changed"):
            await rig.steering.cordon(["p1"])
        rig.store.restart(empty=False)
        assert rig.placeable() == {"p1", "d1", "d2"}
        assert not rig.store.desired("c").cordoned


async def test_a_node_that_does_not_run_can_be_uncordoned() -> None:
    async with steering() as rig:
        await rig.steering.cordon(["d2"])
        rig.view.detached("d2.1", "gone", 0.0)
        rig.attach(prefill(), decode())
        rig.view.forget_lost(1e9)
        await rig.steering.uncordon(["d2"])
        assert not rig.store.desired("c").cordoned


async def test_a_node_is_asked_for_its_role_once_and_again_after_a_failed_call() -> None:
    async with steering() as rig:
        rig.refusal = ConfigError("not now")
        assert not (await rig.steering.set_role("d1", "prefill")).unchanged
        wanted = (decode().address, "d1.1", Role.PREFILL)
        assert await rig.asked.get() == wanted
        await rig.closed.get()
        rig.refusal = None
        rig.steering.check_cluster()
        assert await rig.asked.get() == wanted
        await rig.closed.get()
        rig.steering.check_cluster()
        assert rig.asked.empty()
        assert rig.reasons().count("RoleRefused") == 1
        (status,) = (s for s in rig.view.statuses(0.0, 0.0) if s.name == "d1")
        assert (status.desired_role, status.detail) == ("prefill", "becomes a prefill node when its work is done")
        # The operator decides that the node keeps its role.
        await rig.steering.set_role("d1", "decode")
        assert await rig.asked.get() == (decode().address, "d1.1", Role.DECODE)
        assert (await rig.steering.set_role("d1", "decode")).unchanged


async def test_a_drain_reports_the_remaining_work_until_none_is_left() -> None:
    async with steering() as rig:
        node = decode()
        rig.report(node, running=2, leased_blocks=3)
        rig.view.dispatched("d1.1", KEY)
        async with aclosing(rig.steering.drain("d1", False)) as progress:  # type: ignore[type-var]
            assert await anext(progress) == DrainProgress(running=2, leased_blocks=3, in_flight=1)
            rig.report(node, quarantined_blocks=1)
            assert await step(rig, progress) == DrainProgress(quarantined_blocks=1, in_flight=1)
            rig.report(node)
            assert await step(rig, progress) == DrainProgress(in_flight=1)
            rig.view.released("d1.1", KEY)
            assert await step(rig, progress) == DrainProgress(idle=True)
            with pytest.raises(StopAsyncIteration):
                await anext(progress)
        assert rig.placeable() == {"p1", "d2"}
        assert rig.drained.empty()


async def test_a_drain_gives_up_on_reads_that_do_not_end_and_reports_it() -> None:
    async with steering() as rig:
        rig.report(decode(), quarantined_blocks=8)
        async with aclosing(rig.steering.drain("d1", False)) as progress:  # type: ignore[type-var]
            assert await anext(progress) == DrainProgress(quarantined_blocks=8)
            waiting = asyncio.ensure_future(anext(progress))
            await settle()
            rig.timers.advance(GIVE_UP_AFTER_S - 1)
            await settle()
            rig.timers.advance(0.9)
            await settle()
            assert not waiting.done()
            rig.timers.advance(0.1)
            await settle()
            rig.timers.advance(1.0)
            assert await waiting == DrainProgress(quarantined_blocks=8, idle=True)
        assert rig.reasons().count("DrainGaveUp") == 1


async def test_a_node_is_not_idle_before_other_routers_know_of_its_cordon() -> None:
    async with steering() as rig:
        rig.steering.registered_routers({"router-1.x": "router-1", "router-2.x": "router-2"})
        progress = rig.steering.drain("d1", False)
        assert await anext(progress) == DrainProgress()
        waiting = asyncio.ensure_future(anext(progress))
        await settle()
        rig.timers.advance(SETTLE_S / 2)
        await settle()
        assert not waiting.done()
        rig.timers.advance(SETTLE_S)
        await settle()
        rig.timers.advance(SETTLE_S)
        assert await waiting == DrainProgress(idle=True)


async def test_a_node_that_is_to_stop_stops_when_it_is_idle() -> None:
    async with steering() as rig:
        progress = rig.steering.drain("d1", True)
        assert await anext(progress) == DrainProgress(idle=True)
        ended = asyncio.ensure_future(anext(progress))
        assert await rig.drained.get() == decode().address
        # Its supervisor starts it again.
        rig.view.detached("d1.1", "ended", 0.0)
        rig.attach(prefill(), decode(run=2), decode("d2"))
        await settle()
        rig.timers.advance(1.0)
        assert await ended == DrainProgress(idle=True, stopped=True)
        assert rig.placeable() == {"p1", "d2"}


async def test_a_drain_ends_when_the_node_is_uncordoned() -> None:
    """Otherwise it would wait for ever, or stop a node that takes requests."""
    async with steering() as rig:
        rig.report(decode(), running=2)
        progress = rig.steering.drain("d1", True)
        assert await anext(progress) == DrainProgress(running=2)
        waiting = asyncio.ensure_future(anext(progress))
        await settle()
        await rig.steering.uncordon(["d1"])
        rig.report(decode())
        await settle()
        rig.timers.advance(1.0)
        await settle()
        with pytest.raises(BatonError, match="d1 takes requests again"):
            await waiting
        assert rig.drained.empty()


async def test_a_dead_node_has_no_remaining_work() -> None:
    async with steering() as rig:
        rig.view.detached("d1.1", "killed", 0.0)
        assert [each async for each in rig.steering.drain("d1", False)] == [DrainProgress(idle=True, stopped=True)]


async def step(rig: Rig, progress: AsyncIterator[DrainProgress]) -> DrainProgress:
    """The next progress report, after as much time as it takes."""
    coming = asyncio.ensure_future(anext(progress))
    while not coming.done():
        await settle()
        rig.timers.advance(1.0)
    return coming.result()


async def settle() -> None:
    """Let every task run until it waits."""
    for _ in range(10):
        await asyncio.sleep(0)


# How commands show it.


def node_status(**changes: object) -> NodeStatus:
    base = NodeStatus("d1", "decode", "Ready", "d1.a", "h:1", 1, "m", 0, 0, 0.0)
    return replace(base, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("condition", "changes", "holds"),
    [
        ("ready", {}, True),
        ("ready", {"status": "Cordoned"}, False),
        ("idle", {}, True),
        ("idle", {"in_flight": 1}, False),
        ("idle", {"leased_blocks": 1}, False),
        ("cordoned", {"cordoned": True}, True),
        ("drained", {"cordoned": True}, True),
        ("drained", {"cordoned": True, "running": 1}, False),
        ("drained", {}, False),
        ("gone", {"status": "Lost"}, True),
        ("gone", {"status": "Draining"}, False),
        ("role=decode", {}, True),
        ("role=decode", {"status": "Cordoned"}, True),
        ("role=decode", {"status": "Draining"}, False),
        ("role=prefill", {}, False),
    ],
)
def test_conditions_of_wait(condition: str, changes: dict[str, object], holds: bool) -> None:
    assert parse_condition(condition).holds(node_status(**changes)) is holds


@pytest.mark.parametrize("text", ["", "redy", "role", "role=router", "ready=1"])
def test_an_unknown_condition_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="there is no such condition"):
        parse_condition(text)


def test_a_name_selects_the_incarnation_that_serves() -> None:
    lost, now, other = node_status(status="Lost"), node_status(incarnation="d1.b"), node_status(name="d2")
    assert nodes_by_name([lost, now, other], ["d1"]) == [now]
    assert nodes_by_name([now, lost, other], []) == [now, other]
    with pytest.raises(NodeNotFound, match="known: d2"):
        nodes_by_name([other], ["d3"])
    assert nodes_by_name([other], ["d3"], allows_missing=True) == []


@pytest.mark.parametrize(
    ("progress", "words"),
    [
        (DrainProgress(running=2, leased_blocks=3, in_flight=4), "2 running, 3 leased blocks"),
        (DrainProgress(in_flight=1), "1 requests on their way"),
        (DrainProgress(), "nothing left, but other routers may not know of the cordon yet"),
        (DrainProgress(idle=True), "nothing left"),
    ],
)
def test_remaining_work_as_text(progress: DrainProgress, words: str) -> None:
    assert remaining_work(progress) == words


def test_an_event_as_a_row() -> None:
    event = ClusterEvent(7, 1.0, "Normal", "Failover", "", request_id="r", detail="attempt 2", router="r1.a")
    assert event_row(event, "3s", wide=False) == ["3s", "Normal", "Failover", "-", "attempt 2"]
    assert event_row(event, "3s", wide=True)[5:] == ["7", "-", "r", "r1.a"]


def test_a_command_does_not_wait_for_a_role_after_a_later_one_wants_another() -> None:
    wishes = OtherWishes("d1", "prefill")
    status = NodeStatus("d1", "decode", "Draining", "d1.a", "h:1", 1, MODEL, 1, 0, 0.5)
    # Routers that read the registry late, or that know of no wish.
    for now, wanted in (
        (0.0, "decode"),
        (4.9, "decode"),
        (5.0, "prefill"),
        (5.1, "decode"),
        (10.0, ""),
        (10.1, "decode"),
    ):
        wishes.check(replace(status, desired_role=wanted), now)
    with pytest.raises(BatonError, match=r"another change of d1's role is under way: .* makes it a decode node"):
        wishes.check(replace(status, desired_role="decode"), 15.2)
