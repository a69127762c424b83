"""Senders whose link ended: which of them are dropped, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from baton.messages.ids import Peer
from baton.node.kv.sender_links import MAX_ABSENT, AbsentSenders
from baton.wire.liveness import PortState
from tests.support.virtual_time import run_virtually

FIRST = Peer("p0", "p0.first", "host:1")
OTHER = Peer("p1", "p1.first", "host:2")


class Host:
    """A host on which a process listens at a port until some moment, and then answers as `then` says."""

    def __init__(self) -> None:
        self.ends_at: dict[str, float] = {}
        self.then = PortState.REFUSED
        self.asked = 0

    async def probe_port(self, address: str) -> PortState:
        self.asked += 1
        is_over = asyncio.get_running_loop().time() >= self.ends_at.get(address, float("inf"))
        return self.then if is_over else PortState.LISTENING


def check(play: Callable[[AbsentSenders, Host, list[str]], Awaitable[None]]) -> list[str]:
    """Play a test in virtual time; returns the senders that were dropped, in order."""
    dropped: list[str] = []

    async def main() -> None:
        host = Host()
        senders = AbsentSenders(
            dropped.append, lambda incarnation: dropped.append(f"{incarnation} may live"), host.probe_port
        )
        await play(senders, host, dropped)
        await senders.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtually(main())
    return dropped


def test_a_sender_whose_process_ends_soon_after_its_link_is_dropped() -> None:
    async def play(senders: AbsentSenders, host: Host, dropped: list[str]) -> None:
        host.ends_at["host:1"] = asyncio.get_running_loop().time() + 0.1
        senders.link_ended(FIRST)
        senders.link_ended(OTHER)
        await asyncio.sleep(100)
        assert len(senders) == 1

    assert check(play) == ["p0.first"]


def test_a_sender_that_lives_is_kept_and_may_come_back_repeatedly() -> None:
    async def play(senders: AbsentSenders, host: Host, dropped: list[str]) -> None:
        for _ in range(3):
            senders.link_ended(FIRST)
            await asyncio.sleep(100)
            assert len(senders) == 1
            senders.link_opened("p0", "p0.first")
            assert len(senders) == 0

    assert check(play) == []


def test_a_sender_that_came_back_is_not_probed_any_more() -> None:
    async def play(senders: AbsentSenders, host: Host, dropped: list[str]) -> None:
        host.ends_at["host:1"] = asyncio.get_running_loop().time() + 0.1
        senders.link_ended(FIRST)
        await asyncio.sleep(0.06)
        senders.link_opened("p0", "p0.first")
        asked = host.asked
        await asyncio.sleep(100)
        assert host.asked == asked

    assert check(play) == []


def test_a_sender_that_comes_back_while_it_is_probed_leaves_no_task() -> None:
    async def play(senders: AbsentSenders, host: Host, dropped: list[str]) -> None:
        senders.link_ended(FIRST)
        await asyncio.sleep(0.01)
        senders.link_opened("p0", "p0.first")

    assert check(play) == []


def test_a_newer_process_of_a_node_drops_earlier_ones_and_no_other_node() -> None:
    async def play(senders: AbsentSenders, host: Host, dropped: list[str]) -> None:
        for source in (FIRST, OTHER):
            senders.link_ended(source)
        await asyncio.sleep(100)
        senders.link_opened("p0", "p0.second")
        assert dropped == ["p0.first"]
        senders.link_opened("p0", "p0.third")
        assert len(senders) == 1

    assert check(play) == ["p0.first"]


def test_a_sender_whose_process_ends_long_after_its_link_is_dropped_then() -> None:
    async def play(senders: AbsentSenders, host: Host, dropped: list[str]) -> None:
        host.ends_at["host:1"] = asyncio.get_running_loop().time() + 10_000
        senders.link_ended(FIRST)
        await asyncio.sleep(9_990)
        assert dropped == []
        await asyncio.sleep(100)

    assert check(play) == ["p0.first"]


def test_a_sender_whose_host_does_not_answer_is_dropped_in_the_end() -> None:
    async def play(senders: AbsentSenders, host: Host, dropped: list[str]) -> None:
        host.then, host.ends_at["host:1"] = PortState.SILENT, 0.0
        senders.link_ended(FIRST)
        senders.link_ended(OTHER)
        await asyncio.sleep(600)
        assert dropped == []
        await asyncio.sleep(400)
        assert (dropped, len(senders)) == (["p0.first"], 1)
        senders.link_opened("p0", "p0.second")

    assert check(play) == ["p0.first"]


def test_a_sender_that_answers_now_and_then_is_kept() -> None:
    async def play(senders: AbsentSenders, host: Host, dropped: list[str]) -> None:
        host.then, host.ends_at["host:1"] = PortState.SILENT, 0.0
        senders.link_ended(FIRST)
        for _ in range(5):
            await asyncio.sleep(600)
            host.then = PortState.LISTENING
            await asyncio.sleep(100)
            host.then = PortState.SILENT
        assert len(senders) == 1

    assert check(play) == []


def test_of_too_many_the_one_whose_link_ended_first_is_disconnected_and_does_not_count_as_gone() -> None:
    async def play(senders: AbsentSenders, host: Host, dropped: list[str]) -> None:
        senders.link_ended(FIRST)
        for number in range(MAX_ABSENT):
            senders.link_ended(Peer(f"q{number}", f"q{number}.first", "host:2"))
        assert len(senders) == MAX_ABSENT

    assert check(play) == ["p0.first may live"]
