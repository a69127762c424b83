"""Links to scripted nodes: attach, cut, loss, reconnect, and nodes that the registry forgets."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from random import Random

import pytest

from baton.background import BackgroundWatch, current_watch
from baton.errors import BackgroundFault, NodeLost, Unreachable
from baton.messages.ids import AttemptKey
from baton.messages.node import HEARTBEAT_S, Abort, NodeDescription, StepReport
from router.node_links import MAX_BROKEN, NodeLinks
from tests.doubles.fake_node import FakeNode, FakeNodes
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
    def __init__(self, *nodes: NodeDescription) -> None:
        self.timers = FakeTimers()
        self.listener = Listener()
        self.fakes = FakeNodes()
        self.nodes = {node.node_id: self.fakes.add(FakeNode(node)) for node in nodes}
        self.links = NodeLinks(self.fakes.connect, "router-1", self.timers, Random(1))
        self.links.listen(self.listener)

    async def next_event(self) -> tuple[str, str]:
        return await self.listener.heard.get()

    async def retry_is_due(self) -> None:
        """Let the link reach its back-off, then let the back-off pass."""
        await self.timers.is_due(within=2.0)
        self.timers.advance(2.0)

    async def close(self) -> None:
        await self.links.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert self.timers.num_pending == 0
        assert self.fakes.num_open_clients == 0


async def test_a_link_attaches_sends_and_reports_its_loss_once() -> None:
    rig = Rig(decode())
    rig.links.update([record_of(decode())])
    assert not rig.links.send("d1.1", Abort(key(), "too early"))
    assert await rig.next_event() == ("attached", "d1.1")
    for number in range(3):
        assert rig.links.send("d1.1", Abort(key(number), "x"))
    assert [await rig.nodes["d1"].inbox.get() for _ in range(3)] == [Abort(key(number), "x") for number in range(3)]
    rig.nodes["d1"].report()
    assert await rig.next_event() == ("report", "d1.1")
    rig.nodes["d1"].die()
    assert await rig.next_event() == ("cut", "node d1 is gone: connection reset")
    assert not rig.links.send("d1.1", Abort(key(), "too late"))
    assert await rig.next_event() == ("lost", "node d1 is gone: connection reset"), (
        "no time passed: nobody listens there"
    )
    assert not rig.links.send("d1.1", Abort(key(), "too late"))
    assert not rig.links.send("nobody", Abort(key(), "x"))
    await rig.close()
    assert rig.listener.heard.empty()


async def test_a_lost_node_is_attached_again_after_a_back_off() -> None:
    rig = Rig(decode())
    node = rig.nodes["d1"]
    rig.links.update([record_of(decode())])
    await rig.next_event()
    node.die()
    assert [(await rig.next_event())[0] for _ in range(2)] == ["cut", "lost"]
    await rig.retry_is_due()
    await rig.retry_is_due()
    await rig.timers.is_due(within=2.0)
    node.is_up = True
    await rig.retry_is_due()
    assert await rig.next_event() == ("attached", "d1.1")
    assert node.num_attachments == 2
    assert node.kept == (), "a node that was lost keeps nothing"
    await rig.close()


async def test_a_cut_link_reconnects_at_once_and_keeps_running_attempts() -> None:
    rig = Rig(decode())
    node = rig.nodes["d1"]
    rig.links.update([record_of(decode())])
    assert await rig.next_event() == ("attached", "d1.1")
    assert node.kept == ()
    node.cut()
    assert await rig.next_event() == ("cut", "node d1 is gone: connection reset")
    assert await rig.next_event() == ("attached", "d1.1")
    assert node.kept == [key()]
    assert rig.links.send("d1.1", Abort(key(), "x"))
    await rig.close()
    assert await rig.next_event() == ("lost", "the router closed its link")


async def test_a_cut_link_is_lost_when_it_is_not_back_in_time() -> None:
    """The network reports nothing, or that the node is unreachable now: the node may be alive."""
    rig = Rig(decode())
    node = rig.nodes["d1"]
    rig.links.update([record_of(decode())])
    await rig.next_event()
    node.attach_error = Unreachable("no route to host")
    node.cut()
    assert (await rig.next_event())[0] == "cut"
    waited = 0.0
    while rig.listener.heard.empty():
        await rig.timers.is_due(within=2.0)
        rig.timers.advance(0.5)
        waited += 0.5
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert 3.0 <= waited <= 4.0
    assert await rig.next_event() == ("lost", "node d1 is gone: connection reset")
    node.attach_error = None
    await rig.retry_is_due()
    assert await rig.next_event() == ("attached", "d1.1")
    assert node.kept == ()
    await rig.close()


async def test_an_unanswered_attach_does_not_prolong_a_cut() -> None:
    rig = Rig(decode())
    rig.links.update([record_of(decode())])
    await rig.next_event()
    rig.nodes["d1"].is_silent = True
    rig.nodes["d1"].cut()
    assert (await rig.next_event())[0] == "cut"
    await rig.timers.is_due(within=3.0)
    rig.timers.advance(3.0)
    assert (await rig.next_event())[0] == "lost"
    await rig.close()


async def test_a_cut_link_is_lost_at_once_when_another_incarnation_answers() -> None:
    rig = Rig(decode(run=1))
    rig.links.update([record_of(decode(run=1))])
    await rig.next_event()
    rig.nodes["d1"].description = decode(run=2)
    rig.nodes["d1"].cut()
    assert [(await rig.next_event())[0] for _ in range(2)] == ["cut", "lost"]
    await rig.close()


async def test_a_router_that_hung_until_its_links_closed_keeps_running_attempts() -> None:
    """The router sees the end of its stream after sixteen seconds of silence, in which it was the router that hung."""
    rig = Rig(decode())
    rig.links.update([record_of(decode())])
    assert await rig.next_event() == ("attached", "d1.1")
    rig.nodes["d1"].cut()
    rig.timers.advance(16.0)
    assert [(await rig.next_event())[0] for _ in range(2)] == ["cut", "attached"]
    assert rig.nodes["d1"].kept == [key()]
    await rig.close()


async def test_a_cut_link_reconnects_although_the_registry_forgot_its_node() -> None:
    rig = Rig(decode())
    rig.links.update([record_of(decode())])
    await rig.next_event()
    rig.nodes["d1"].cut()
    assert (await rig.next_event())[0] == "cut"
    rig.links.update([])
    assert await rig.next_event() == ("attached", "d1.1")
    await rig.close()


async def test_closing_while_a_link_is_cut_tells_the_listener() -> None:
    rig = Rig(decode())
    rig.links.update([record_of(decode())])
    await rig.next_event()
    rig.nodes["d1"].is_silent = True
    rig.nodes["d1"].cut()
    assert (await rig.next_event())[0] == "cut"
    await rig.close()
    assert (await rig.next_event())[0] == "lost"


async def test_a_node_that_accepts_but_never_answers_is_not_attached() -> None:
    rig = Rig(decode())
    rig.nodes["d1"].is_silent = True
    rig.links.update([record_of(decode())])
    await rig.timers.is_due(within=5.0)
    rig.nodes["d1"].is_silent = False
    rig.timers.advance(5.0)
    await rig.retry_is_due()
    assert await rig.next_event() == ("attached", "d1.1")
    await rig.close()


async def test_another_incarnation_at_the_address_is_not_attached() -> None:
    rig = Rig(decode(run=1))
    stale = record_of(decode(run=1))
    rig.nodes["d1"].description = decode(run=2)
    rig.links.update([stale])
    await rig.retry_is_due()
    await rig.retry_is_due()
    await rig.timers.is_due(within=2.0)
    assert rig.nodes["d1"].num_attachments == 3
    assert rig.nodes["d1"].stream is not None
    assert rig.nodes["d1"].stream.is_closed
    assert rig.listener.heard.empty()
    await rig.close()


async def test_a_node_that_the_registry_forgets_stays_attached_only_while_it_works() -> None:
    rig = Rig(decode(), prefill())
    rig.links.update([record_of(decode()), record_of(prefill())])
    assert {(await rig.next_event())[1], (await rig.next_event())[1]} == {"d1.1", "p1.1"}
    rig.links.update([])
    assert rig.links.send("d1.1", Abort(key(), "still there"))
    rig.nodes["p1"].die()
    assert [(await rig.next_event())[0] for _ in range(2)] == ["cut", "lost"]
    rig.links.update([])
    assert rig.links.send("d1.1", Abort(key(), "still there"))
    rig.nodes["p1"].is_up = True
    rig.links.update([record_of(prefill())])
    assert await rig.next_event() == ("attached", "p1.1")
    await rig.close()


async def test_closing_tells_the_listener_and_the_node() -> None:
    rig = Rig(decode())
    rig.links.update([record_of(decode())])
    await rig.next_event()
    await rig.close()
    assert await rig.next_event() == ("lost", "the router closed its link")
    stream = rig.nodes["d1"].stream
    assert stream is not None
    assert stream.is_closed


async def test_a_link_stopped_while_it_is_being_lost_closes_its_stream() -> None:
    rig = Rig(decode())
    rig.links.update([record_of(decode())])
    await rig.next_event()
    stream = rig.nodes["d1"].stream
    assert stream is not None
    stream.put(NodeLost("it ended"))
    assert await rig.next_event() == ("cut", "it ended")
    await rig.close()
    assert stream.is_closed


async def test_an_internal_error_ends_one_attachment_and_not_the_link() -> None:
    """After any unexpected error the link reconnects without waiting for a change in the registry."""
    rig = Rig(decode())
    node = rig.nodes["d1"]
    node.attach_error = RuntimeError("out of luck")
    rig.links.update([record_of(decode())])
    await rig.timers.is_due(within=2.0)
    node.attach_error = None
    rig.timers.advance(2.0)
    assert await rig.next_event() == ("attached", "d1.1")
    node.send_error = ValueError("that can't be written")
    assert rig.links.send("d1.1", Abort(key(), "x"))
    heard, reason = await rig.next_event()
    assert heard == "lost"
    assert "that can't be written" in reason
    node.send_error = None
    await rig.retry_is_due()
    assert await rig.next_event() == ("attached", "d1.1")
    assert rig.links.send("d1.1", Abort(key(), "y"))
    message = await node.inbox.get()
    assert isinstance(message, Abort)
    assert message.reason == "y"
    await rig.close()


async def test_a_listener_that_raises_at_an_attachment_is_told_of_its_loss_and_leaves_no_stream() -> None:
    rig = Rig(decode())
    rig.listener.attached_error = RuntimeError("out of luck")
    rig.links.update([record_of(decode())])
    heard, reason = await rig.next_event()
    assert heard == "lost"
    assert "out of luck" in reason
    assert not rig.links.send("d1.1", Abort(key(), "nobody is attached"))
    rig.listener.attached_error = None
    await rig.retry_is_due()
    assert await rig.next_event() == ("attached", "d1.1")
    assert rig.links.send("d1.1", Abort(key(), "y"))
    await rig.close()


async def test_a_loss_that_can_not_be_reported_ends_the_process(process_faults: list[BackgroundFault]) -> None:
    """Otherwise requests on that node would wait for ever."""
    rig = Rig(decode())
    rig.listener.lost_error = RuntimeError("out of luck")
    rig.links.update([record_of(decode())])
    assert await rig.next_event() == ("attached", "d1.1")
    rig.nodes["d1"].die()
    assert (await rig.next_event())[0] == "cut"
    await rig.timers.is_due(within=2.0)
    assert [str(fault) for fault in process_faults] == ["background task node-lost failed: RuntimeError('out of luck')"]
    await rig.close()


async def test_a_listener_that_raises_ends_one_attachment_and_not_the_link() -> None:
    rig = Rig(decode())
    rig.listener.report_error = RuntimeError("out of luck")
    rig.links.update([record_of(decode())])
    assert await rig.next_event() == ("attached", "d1.1")
    rig.nodes["d1"].report()
    heard, reason = await rig.next_event()
    assert heard == "lost"
    assert "out of luck" in reason
    rig.listener.report_error = None
    await rig.retry_is_due()
    assert await rig.next_event() == ("attached", "d1.1")
    rig.nodes["d1"].report()
    assert await rig.next_event() == ("report", "d1.1")
    await rig.close()


@pytest.mark.parametrize("num_reports", [0, 1])
async def test_streams_that_break_at_once_are_reopened_with_back_off(num_reports: int) -> None:
    rig = Rig(decode())
    node = rig.nodes["d1"]
    rig.links.update([record_of(decode())])
    for opened in range(1, MAX_BROKEN + 3):
        assert await rig.next_event() == ("attached", "d1.1")
        assert node.num_attachments == opened
        assert node.stream is not None
        for _ in range(num_reports):
            node.report()
            assert await rig.next_event() == ("report", "d1.1")
        node.stream.put(NodeLost("it ended"))
        assert await rig.next_event() == ("cut" if opened <= MAX_BROKEN else "lost", "it ended")
        if opened > 1:
            await rig.retry_is_due()
    await rig.close()


async def test_a_stream_that_worked_for_a_while_is_reopened_at_once() -> None:
    rig = Rig(decode())
    node = rig.nodes["d1"]
    rig.links.update([record_of(decode())])
    assert await rig.next_event() == ("attached", "d1.1")
    for _ in range(4):
        rig.timers.advance(HEARTBEAT_S)
        node.report()
        assert await rig.next_event() == ("report", "d1.1")
    assert node.stream is not None
    node.stream.put(NodeLost("it ended"))
    assert await rig.next_event() == ("cut", "it ended")
    assert await rig.next_event() == ("attached", "d1.1")
    await rig.close()
