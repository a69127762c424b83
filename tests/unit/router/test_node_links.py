"""Links to scripted nodes: attach, cut, loss, reconnect, and nodes that the registry forgets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from random import Random

import pytest

from baton.background import BackgroundWatch, current_watch
from baton.errors import BackgroundFault, NodeLost, Unreachable
from baton.messages.ids import AttemptKey
from baton.messages.node import HEARTBEAT_S, Abort, NodeDescription, StepReport
from router.node_links import MAX_BROKEN, NodeLinks
from tests.doubles.fake_node import FakeNode, FakeNodes, FakeStream
from tests.doubles.fake_timers import FakeTimers
from tests.support.router_parts import decode, key, prefill, record_of


@pytest.fixture
def process_faults() -> Iterator[list[BackgroundFault]]:
    """The faults that would have ended the process."""
    faults: list[BackgroundFault] = []
    before = current_watch.set(BackgroundWatch(faults.append))
    yield faults
    current_watch.reset(before)


class Listener:
    """Records the events of links."""

    def __init__(self) -> None:
        self.heard: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        self.report_error: Exception | None = None
        self.attached_error: Exception | None = None
        self.lost_error: Exception | None = None
        self.running: Sequence[AttemptKey] = [key()]

    def attempts_on(self, incarnation: str) -> Sequence[AttemptKey]:
        return self.running

    def on_cut(self, incarnation: str, reason: str) -> None:
        self.heard.put_nowait(("cut", reason))

    def on_attached(self, description: NodeDescription) -> None:
        if self.attached_error is not None:
            raise self.attached_error
        self.heard.put_nowait(("attached", description.incarnation))

    def on_report(self, incarnation: str, report: StepReport) -> None:
        if self.report_error is not None:
            raise self.report_error
        self.heard.put_nowait(("report", incarnation))

    def on_lost(self, incarnation: str, reason: str) -> None:
        if self.lost_error is not None:
            raise self.lost_error
        self.heard.put_nowait(("lost", reason))


class Rig:
    """Links to fake nodes, of which the first is `node`."""

    def __init__(self, *nodes: NodeDescription) -> None:
        self.timers = FakeTimers()
        self.listener = Listener()
        self.fakes = FakeNodes()
        self.nodes = {node.node_id: self.fakes.add(FakeNode(node)) for node in nodes}
        self.node = self.nodes[nodes[0].node_id]
        self.links = NodeLinks(self.fakes.connect, "router-1", self.timers, Random(1))
        self.links.listen(self.listener)

    async def next_event(self) -> tuple[str, str]:
        return await self.listener.heard.get()

    async def hears(self, *events: str | tuple[str, str]) -> None:
        """Check the next events of the links, or their names alone."""
        for expected in events:
            heard = await self.next_event()
            assert expected in (heard, heard[0])

    async def hears_loss(self, reason: str) -> None:
        """Check that the next event is a loss for a reason with these words."""
        heard, why = await self.next_event()
        assert heard == "lost"
        assert reason in why

    @property
    def stream(self) -> FakeStream:
        assert self.node.stream is not None
        return self.node.stream

    async def retry_is_due(self) -> None:
        """Let the link reach its back-off, then let the back-off pass."""
        await self.timers.is_due(within=2.0)
        self.timers.advance(2.0)

    async def close(self) -> None:
        await self.links.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert self.timers.num_pending == 0
        assert self.fakes.num_open_clients == 0


@asynccontextmanager
async def linked(*nodes: NodeDescription, is_attached: bool = True) -> AsyncIterator[Rig]:
    """Yield a rig whose first node, d1 if none is given, is registered and attached; nothing is left at its end."""
    rig = Rig(*(nodes or (decode(),)))
    try:
        if is_attached:
            rig.links.update([record_of(rig.node.description)])
            await rig.hears(("attached", rig.node.incarnation))
        yield rig
    finally:
        await rig.close()


RESET = "node d1 is gone: connection reset"
ATTACHED = ("attached", "d1.1")


async def test_a_link_attaches_sends_and_reports_its_loss_once() -> None:
    rig = Rig(decode())
    rig.links.update([record_of(decode())])
    assert not rig.links.send("d1.1", Abort(key(), "too early"))
    await rig.hears(ATTACHED)
    aborts = [Abort(key(number), "x") for number in range(3)]
    assert all(rig.links.send("d1.1", abort) for abort in aborts)
    assert [await rig.node.inbox.get() for _ in aborts] == aborts
    rig.node.report()
    await rig.hears(("report", "d1.1"))
    rig.node.die()
    await rig.hears(("cut", RESET))
    assert not rig.links.send("d1.1", Abort(key(), "too late"))
    # No time passed: nobody listens there.
    await rig.hears(("lost", RESET))
    assert not rig.links.send("d1.1", Abort(key(), "too late"))
    assert not rig.links.send("nobody", Abort(key(), "x"))
    await rig.close()
    assert rig.listener.heard.empty()


async def test_a_lost_node_is_attached_again_after_a_back_off() -> None:
    async with linked() as rig:
        rig.node.die()
        await rig.hears("cut", "lost")
        await rig.retry_is_due()
        await rig.retry_is_due()
        await rig.timers.is_due(within=2.0)
        rig.node.is_up = True
        await rig.retry_is_due()
        await rig.hears(ATTACHED)
        assert (rig.node.num_attachments, rig.node.kept) == (2, ()), "a node that was lost keeps nothing"


async def test_a_cut_link_reconnects_at_once_and_keeps_running_attempts() -> None:
    async with linked() as rig:
        assert rig.node.kept == ()
        rig.node.cut()
        await rig.hears(("cut", RESET), ATTACHED)
        assert rig.node.kept == [key()]
        assert rig.links.send("d1.1", Abort(key(), "x"))
    await rig.hears(("lost", "the router closed its link"))


async def test_a_cut_link_is_lost_when_it_is_not_back_in_time() -> None:
    """The network reports nothing, or that the node is unreachable now: the node may be alive."""
    async with linked() as rig:
        rig.node.attach_error = Unreachable("no route to host")
        rig.node.cut()
        await rig.hears("cut")
        waited = 0.0
        while rig.listener.heard.empty():
            await rig.timers.is_due(within=2.0)
            rig.timers.advance(0.5)
            waited += 0.5
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert 3.0 <= waited <= 4.0
        await rig.hears(("lost", RESET))
        rig.node.attach_error = None
        await rig.retry_is_due()
        await rig.hears(ATTACHED)
        assert rig.node.kept == ()


async def test_an_unanswered_attach_does_not_prolong_a_cut() -> None:
    async with linked() as rig:
        rig.node.is_silent = True
        rig.node.cut()
        await rig.hears("cut")
        await rig.timers.is_due(within=3.0)
        rig.timers.advance(3.0)
        await rig.hears("lost")


async def test_a_cut_link_is_lost_at_once_when_another_incarnation_answers() -> None:
    async with linked() as rig:
        rig.node.description = decode(run=2)
        rig.node.cut()
        await rig.hears("cut", "lost")


async def test_a_router_that_hung_until_its_links_closed_keeps_running_attempts() -> None:
    """The router sees the end of its stream after sixteen seconds of silence, in which it was the router that hung."""
    async with linked() as rig:
        rig.node.cut()
        rig.timers.advance(16.0)
        await rig.hears("cut", "attached")
        assert rig.node.kept == [key()]


async def test_a_cut_link_reconnects_although_the_registry_forgot_its_node() -> None:
    async with linked() as rig:
        rig.node.cut()
        await rig.hears("cut")
        rig.links.update([])
        await rig.hears(ATTACHED)


async def test_closing_while_a_link_is_cut_tells_the_listener() -> None:
    async with linked() as rig:
        rig.node.is_silent = True
        rig.node.cut()
        await rig.hears("cut")
    await rig.hears("lost")


async def test_a_node_that_accepts_but_never_answers_is_not_attached() -> None:
    async with linked(is_attached=False) as rig:
        rig.node.is_silent = True
        rig.links.update([record_of(decode())])
        await rig.timers.is_due(within=5.0)
        rig.node.is_silent = False
        rig.timers.advance(5.0)
        await rig.retry_is_due()
        await rig.hears(ATTACHED)


async def test_another_incarnation_at_the_address_is_not_attached() -> None:
    async with linked(is_attached=False) as rig:
        rig.node.description = decode(run=2)
        rig.links.update([record_of(decode(run=1))])
        await rig.retry_is_due()
        await rig.retry_is_due()
        await rig.timers.is_due(within=2.0)
        assert rig.node.num_attachments == 3
        assert rig.stream.is_closed
        assert rig.listener.heard.empty()


async def test_a_node_that_the_registry_forgets_stays_attached_only_while_it_works() -> None:
    async with linked(decode(), prefill()) as rig:
        rig.links.update([record_of(decode()), record_of(prefill())])
        await rig.hears(("attached", "p1.1"))
        rig.links.update([])
        assert rig.links.send("d1.1", Abort(key(), "still there"))
        rig.nodes["p1"].die()
        await rig.hears("cut", "lost")
        rig.links.update([])
        assert rig.links.send("d1.1", Abort(key(), "still there"))
        rig.nodes["p1"].is_up = True
        rig.links.update([record_of(prefill())])
        await rig.hears(("attached", "p1.1"))


async def test_closing_tells_the_listener_and_the_node() -> None:
    async with linked() as rig:
        stream = rig.stream
    await rig.hears(("lost", "the router closed its link"))
    assert stream.is_closed


async def test_a_link_stopped_while_it_is_being_lost_closes_its_stream() -> None:
    async with linked() as rig:
        stream = rig.stream
        stream.put(NodeLost("it ended"))
        await rig.hears(("cut", "it ended"))
    assert stream.is_closed


async def test_an_internal_error_ends_one_attachment_and_not_the_link() -> None:
    """After any unexpected error the link reconnects without waiting for a change in the registry."""
    async with linked(is_attached=False) as rig:
        rig.node.attach_error = RuntimeError("out of luck")
        rig.links.update([record_of(decode())])
        await rig.timers.is_due(within=2.0)
        rig.node.attach_error = None
        rig.timers.advance(2.0)
        await rig.hears(ATTACHED)
        rig.node.send_error = ValueError("that can't be written")
        assert rig.links.send("d1.1", Abort(key(), "x"))
        await rig.hears_loss("that can't be written")
        rig.node.send_error = None
        await rig.retry_is_due()
        await rig.hears(ATTACHED)
        assert rig.links.send("d1.1", Abort(key(), "y"))
        assert await rig.node.inbox.get() == Abort(key(), "y")


async def test_a_listener_that_raises_at_an_attachment_is_told_of_its_loss_and_leaves_no_stream() -> None:
    async with linked(is_attached=False) as rig:
        rig.listener.attached_error = RuntimeError("out of luck")
        rig.links.update([record_of(decode())])
        await rig.hears_loss("out of luck")
        assert not rig.links.send("d1.1", Abort(key(), "nobody is attached"))
        rig.listener.attached_error = None
        await rig.retry_is_due()
        await rig.hears(ATTACHED)
        assert rig.links.send("d1.1", Abort(key(), "y"))


async def test_a_loss_that_can_not_be_reported_ends_the_process(process_faults: list[BackgroundFault]) -> None:
    """Otherwise requests on that node would wait for ever."""
    async with linked() as rig:
        rig.listener.lost_error = RuntimeError("out of luck")
        rig.node.die()
        await rig.hears("cut")
        await rig.timers.is_due(within=2.0)
    assert [str(fault) for fault in process_faults] == ["background task node-lost failed: RuntimeError('out of luck')"]


async def test_a_listener_that_raises_ends_one_attachment_and_not_the_link() -> None:
    async with linked() as rig:
        rig.listener.report_error = RuntimeError("out of luck")
        rig.node.report()
        await rig.hears_loss("out of luck")
        rig.listener.report_error = None
        await rig.retry_is_due()
        await rig.hears(ATTACHED)
        rig.node.report()
        await rig.hears(("report", "d1.1"))


@pytest.mark.parametrize("num_reports", [0, 1])
async def test_streams_that_break_at_once_are_reopened_with_back_off(num_reports: int) -> None:
    async with linked(is_attached=False) as rig:
        rig.links.update([record_of(decode())])
        for opened in range(1, MAX_BROKEN + 3):
            await rig.hears(ATTACHED)
            assert rig.node.num_attachments == opened
            for _ in range(num_reports):
                rig.node.report()
                await rig.hears(("report", "d1.1"))
            rig.stream.put(NodeLost("it ended"))
            await rig.hears(("cut" if opened <= MAX_BROKEN else "lost", "it ended"))
            if opened > 1:
                await rig.retry_is_due()


async def test_a_stream_that_worked_for_a_while_is_reopened_at_once() -> None:
    async with linked() as rig:
        for _ in range(4):
            rig.timers.advance(HEARTBEAT_S)
            rig.node.report()
            await rig.hears(("report", "d1.1"))
        rig.stream.put(NodeLost("it ended"))
        await rig.hears(("cut", "it ended"), ATTACHED)
