"""The timer of a decode node's probes: what one pair waits for delays nothing of another."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from baton.errors import TransferCause, TransferFailed
from baton.messages.ids import Peer
from baton.messages.node_report import ProbeFault
from baton.node.kv.pair_prober import PairProber
from kv_transfer.link.link_messages import ProbeResult, ReaderMessage
from kv_transfer.mover.part_mover import DeliverEvent
from kv_transfer.mover.parts_mover import OwnPart, PartsMover
from kv_transfer.receiver.join_probe import JoinProbes
from tests.doubles.fake_mover import FakeMover
from tests.doubles.fake_transfer_backend import FakeTransferBackend, FakeTransferFabric
from tests.support.handoff_rig import new_memory
from tests.support.virtual_time import LoopClock, run_virtually

P0 = Peer("p0", "p0.x", "h:1")
P1 = Peer("p1", "p1.x", "h:2")
REFUSED = TransferFailed(TransferCause.REFUSED, "NIXL refused to connect")


class Rig:
    """A prober whose links and senders the test plays; it notes what it said, and when on the loop's clock."""

    def __init__(self) -> None:
        self.probes = JoinProbes("d0", "d0.x", LoopClock())
        self.told: list[tuple[float, str, ReaderMessage]] = []
        self.opened: list[tuple[float, str]] = []
        memory, fabric = new_memory(), FakeTransferFabric()

        def make_mover(deliver: DeliverEvent) -> FakeMover:
            return FakeMover(lambda: FakeTransferBackend(fabric, "d0.x", memory), deliver, LoopClock())

        self.prober = PairProber(
            self.probes,
            PartsMover(None, [OwnPart(range(1), make_mover)], lambda event: None),
            tell=lambda incarnation, message: self.told.append((now(), incarnation, message)),
            proven=lambda incarnation: None,
            end_link=lambda incarnation, error: None,
            refuse=lambda incarnation, error: None,
            open_link=lambda source: self.opened.append((now(), source.incarnation)),
        )

    def ask(self, source: Peer) -> None:
        """Open a link on which nothing will be heard."""
        self.prober.carry_out(self.probes.link_up(source))

    def fail(self, source: Peer, times: int = 1) -> None:
        """Let so many probes of a sender fail at once."""
        for _ in range(times):
            self.ask(source)
            self.prober.carry_out(self.probes.connect_failed(source.incarnation, REFUSED))
            self.prober.carry_out(self.probes.link_lost(source, TransferCause.PROBE_FAILED, "the sender's words"))


def now() -> float:
    return asyncio.get_running_loop().time()


def check(play: Callable[[Rig, float], Awaitable[None]]) -> None:
    """Play a test in virtual time; it gets the rig and the time at its beginning."""

    async def main() -> None:
        rig = Rig()
        await play(rig, now())
        rig.prober.close()

    run_virtually(main())


def test_a_pair_in_a_long_pause_delays_no_timeout_of_another() -> None:
    async def play(rig: Rig, start: float) -> None:
        rig.fail(P0, times=7)
        await asyncio.sleep(2.0)
        rig.ask(P1)
        await asyncio.sleep(10.0)
        (ended,) = [
            (at - start, message.fault)
            for at, incarnation, message in rig.told
            if incarnation == "p1.x" and isinstance(message, ProbeResult)
        ]
        assert ended == (7.0, ProbeFault.TIMED_OUT)

    check(play)


def test_a_pair_in_a_long_pause_delays_no_repetition_of_another() -> None:
    async def play(rig: Rig, start: float) -> None:
        rig.fail(P0, times=7)
        await asyncio.sleep(2.0)
        rig.fail(P1)
        await asyncio.sleep(70.0)
        assert [(at - start, incarnation) for at, incarnation in rig.opened] == [(3.0, "p1.x"), (60.0, "p0.x")]

    check(play)


def test_what_one_pair_repeats_shortens_no_wait_of_another() -> None:
    async def play(rig: Rig, start: float) -> None:
        rig.fail(P0)
        await asyncio.sleep(0.5)
        rig.ask(P1)
        await asyncio.sleep(10.0)
        (ended_at,) = [at - start for at, _, message in rig.told if isinstance(message, ProbeResult) and at > start]
        assert ended_at == 5.5

    check(play)
