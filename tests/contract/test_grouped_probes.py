"""A probe over a real link whose reader is in parts: one of them has layers of one group alone."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from baton.clock import SystemClock
from baton.engine.runner import KVLayout, KVMemory, LayerGeometry, LayerGroup
from baton.messages.node_report import ProbeFault
from baton.node.kv.intake import Intake
from baton.runner.blocks.block_digests import block_digests
from kv_transfer.backends.base import TransferBackend
from kv_transfer.layout import LayoutFingerprint, LinkIdentity, part_name
from kv_transfer.mover.mover import Mover
from kv_transfer.mover.part_mover import DeliverEvent
from kv_transfer.mover.parts_mover import OwnPart, PartsMover
from kv_transfer.receiver.join_probe import JoinProbes
from kv_transfer.receiver.pair_rates import TIMED_READS
from kv_transfer.receiver.probe_values import ProbeState, ProbeTimes
from kv_transfer.receiver.transfer import TransferBook
from tests.doubles.fake_clock import FakeClock
from tests.doubles.fake_transfer_backend import FakeTransferBackend, FakeTransferFabric
from tests.doubles.faulty_transfer_backend import Faults, FaultyTransferBackend
from tests.support.handoff_rig import Recorder, SenderHalf
from tests.support.node_parts import new_memory

GROUPS = (LayerGroup((0, 1)), LayerGroup((2, 3), 64))
LAYOUT = KVLayout(4, (LayerGeometry(1, 8, 8),) * 4, "float32", GROUPS)
FINGERPRINT = LayoutFingerprint("model-1", "cpu-1", "float32", 4, "4*1x(8+8)", LAYOUT.block_bytes, "memory")
PARTS = (range(2), range(2, 4))
NUM_BLOCKS, NUM_PROBE_BLOCKS = 8, 4
LIVES = (f"groups-{number}" for number in itertools.count())


@asynccontextmanager
async def joined(faults: Faults | None) -> AsyncIterator[tuple[SenderHalf, Intake, Recorder]]:
    """A sender in one part that has joined the cluster of a reader in two, whose second part's reads have faults."""
    fabric, life, clock, recorder = FakeTransferFabric(), next(LIVES), FakeClock(10.0), Recorder()

    def backend(agent: str, memory: KVMemory) -> TransferBackend:
        inner = FakeTransferBackend(fabric, agent, memory)
        return FaultyTransferBackend(inner, faults, in_probes=True) if agent.endswith("/1") else inner

    def part(number: int) -> Callable[[DeliverEvent], Mover]:
        memory, agent = new_memory(LAYOUT, NUM_BLOCKS, NUM_PROBE_BLOCKS, PARTS[number]), part_name(f"d0.{life}", number)
        return lambda deliver: Mover(
            lambda: backend(agent, memory), deliver, SystemClock(), digests=block_digests(memory)
        )

    sender = SenderHalf(
        lambda agent, memory, _: backend(agent, memory),
        LinkIdentity("c", "p0", f"p0.{life}", FINGERPRINT),
        clock,
        new_memory(LAYOUT, NUM_BLOCKS, NUM_PROBE_BLOCKS),
    )
    intake = Intake(
        LinkIdentity("c", "d0", f"d0.{life}", FINGERPRINT),
        lambda deliver: PartsMover(LAYOUT, [OwnPart(PARTS[n], part(n)) for n in range(2)], deliver),
        TransferBook(digest_every=0),
        JoinProbes("d0", f"d0.{life}", SystemClock(), ProbeTimes(first_pause_s=0.05, max_pause_s=0.1)),
        recorder.tell_engine,
        recorder.record,
        asyncio.get_running_loop().call_soon_threadsafe,
        SystemClock(),
        layout=LAYOUT,
    )
    await sender.start()
    await intake.start()
    intake.sender_joined(sender.source)
    yield sender, intake, recorder
    await intake.stop()
    await sender.stop()


async def test_a_sender_is_used_once_each_group_was_read() -> None:
    async with joined(None) as (sender, intake, _):
        name = sender.identity.incarnation
        await sender.recorder.wait_until(lambda: intake.probes.state(name) is ProbeState.PASSED)
        await sender.recorder.wait_until(lambda: not sender.handoff.probes.num_open)
        assert sender.handoff.probes.outcomes == {("d0", "passed"): 2}, "one for each group"
        assert intake.probes.outcomes == {("p0", "passed"): 1}
        in_time = LAYOUT.block_bytes * TIMED_READS  # of the last group alone
        assert [part.figures.bytes_arrived for part in intake.mover.parts] == [
            LAYOUT.block_bytes,
            LAYOUT.block_bytes + in_time,
        ]


async def test_a_part_that_has_no_layer_of_the_first_group_is_probed_too() -> None:
    async with joined(Faults(corrupt=1.0)) as (sender, intake, _):
        await sender.recorder.wait_until(lambda: bool(sender.handoff.failed_probes()))
        (failed,) = sender.handoff.failed_probes()
        assert failed.fault is ProbeFault.WRONG_BYTES
        assert intake.probes.outcomes["p0", "passed"] == 0
