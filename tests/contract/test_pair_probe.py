"""A whole probe over a real link, with the in-memory fake and with NIXL: it passes where bytes move, and what keeps
them from moving is named at both ends before a request depends on it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest

from baton.engine.runner import KVMemory
from baton.errors import TransferCause
from baton.messages.node_report import FailedProbe, ProbeFault
from baton.runner.blocks import known_bytes
from kv_transfer.backends.base import TransferBackend
from kv_transfer.backends.nixl import NixlBackend
from kv_transfer.receiver.probe_values import ProbeState, ProbeTimes
from tests.doubles.fake_transfer_backend import FakeTransferBackend
from tests.doubles.faulty_transfer_backend import Faults, FaultyTransferBackend
from tests.support.handoff_rig import (
    ATTEMPT,
    BLOCK_BYTES,
    KEY,
    NUM_BLOCKS,
    HandoffRig,
    Recorder,
    new_device_memory,
    new_memory,
    read_block,
    write_block,
)

KINDS = {"memory": None, "nixl": "", "nixl-tcp": "tcp,self"}
AGAIN = ProbeTimes(first_pause_s=0.05, max_pause_s=0.1)
SOON = replace(AGAIN, tick_s=0.02, max_quiet_ticks=25)
LIVES = (f"life-{number}" for number in itertools.count())


class Rigs:
    """Makes a rig over one kind of backend, whose receiver's reads may have faults."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self.receiver: FaultyTransferBackend

    def new(self, faults: Faults | None = None, make_memory: Callable[[], KVMemory] = new_memory) -> HandoffRig:
        rig: HandoffRig
        times = SOON if faults is not None and faults.stall else AGAIN

        def make_backend(incarnation: str, memory: KVMemory, recorder: Recorder) -> TransferBackend:
            inner: TransferBackend
            if self._kind == "memory":
                inner = FakeTransferBackend(rig.fabric, incarnation, memory)
            else:
                inner = NixlBackend(incarnation, memory)
            if incarnation.startswith("p0"):
                return inner
            self.receiver = FaultyTransferBackend(inner, faults, in_probes=True)
            return self.receiver

        rig = HandoffRig(make_backend=make_backend, make_memory=make_memory, life=next(LIVES), probe_times=times)
        return rig


@pytest.fixture(params=KINDS)
def rigs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Rigs:
    tls = KINDS[request.param]
    if tls:
        monkeypatch.setenv("UCX_TLS", tls)
    else:
        monkeypatch.delenv("UCX_TLS", raising=False)
    return Rigs(request.param)


def cache_of(memory: KVMemory) -> list[bytes]:
    return [read_block(memory, block) for block in range(memory.num_blocks)]


async def wait_for_failures(rig: HandoffRig) -> tuple[FailedProbe, FailedProbe]:
    """Return what both ends show once a probe has failed."""
    ends = (rig.sender.handoff, rig.receiver.intake)
    rig.receiver.intake.sender_joined(rig.sender.source)
    await rig.sender.recorder.wait_until(lambda: bool(rig.sender.handoff.failed_probes()))
    # The reader shows it once its sender has ended the link; it keeps the sender busy by trying again.
    await rig.sender.recorder.wait_until(lambda: all(end.failed_probes() for end in ends))
    sender, receiver = (end.report().failed_probes[0] for end in ends)
    return sender, receiver


async def test_a_probe_passes_where_bytes_move_and_touches_probe_blocks_alone(rigs: Rigs) -> None:
    async with rigs.new() as rig:
        memories = (rig.sender.memory, rig.receiver.memory)
        for memory, block in itertools.product(memories, range(NUM_BLOCKS)):
            write_block(memory, block, bytes([block % 251]) * BLOCK_BYTES)
        before = [cache_of(memory) for memory in memories]
        await rig.join()
        assert [cache_of(memory) for memory in memories] == before
        known = read_block(rig.sender.memory, NUM_BLOCKS)
        # A node fills its first probe block for its readers, and reads into the others.
        assert known == read_block(rig.receiver.memory, NUM_BLOCKS + 1)
        assert known != bytes(BLOCK_BYTES)
        assert not rig.sender.handoff.failed_probes()
        assert rig.sender.handoff.probes.outcomes == {("d0", "passed"): 1}
        assert rig.sender.handoff.probes.num_open == 0
        assert "read_started" not in [name for name, *_ in rig.receiver.recorder.events]


async def test_the_first_request_waits_for_the_probe_and_arrives(rigs: Rigs) -> None:
    async with rigs.new() as rig:
        rig.reserve()
        rig.sender.finish()
        await rig.receiver.recorder.arrival()
        rig.assert_blocks()
        assert rig.receiver.intake.probes.outcomes == {("p0", "passed"): 1}


async def test_blocks_on_a_device_are_probed_too() -> None:
    async with Rigs("memory").new(make_memory=new_device_memory) as rig:
        await rig.join()


FAULTS = {
    "corrupt": (Faults(corrupt=1.0), ProbeFault.WRONG_BYTES, "other bytes arrived"),
    "drop": (Faults(drop=1.0), ProbeFault.WRONG_BYTES, "brought nothing"),
    "stall": (Faults(stall=1.0), ProbeFault.TIMED_OUT, "did not arrive within 0.5 s"),
    "disconnect": (Faults(disconnect=1.0), ProbeFault.READ_FAILED, "disconnected"),
}


@pytest.mark.parametrize("name", FAULTS)
async def test_what_keeps_bytes_from_moving_is_named_at_both_ends_until_they_move(rigs: Rigs, name: str) -> None:
    faults, fault, words = FAULTS[name]
    async with rigs.new(faults) as rig:
        for seen, peer in zip(await wait_for_failures(rig), ("d0", "p0"), strict=True):
            assert (seen.peer, seen.fault) == (peer, fault)
            assert "d0 could not read known bytes of p0" in seen.detail
            assert words in seen.detail
        # A request that names the pair fails at once, and by name.
        rig.receiver.intake.expect(ATTEMPT, rig.sender.source)
        failed = await rig.receiver.recorder.failure()
        assert failed.cause is TransferCause.PROBE_FAILED
        assert words in failed.detail
        assert "expected" not in rig.receiver.recorder.names(KEY)
        # Nobody asks for another probe, and it comes.
        rigs.receiver.heal()
        probes = rig.receiver.intake.probes
        incarnation = rig.sender.identity.incarnation
        await rig.sender.recorder.wait_until(lambda: probes.state(incarnation) is ProbeState.PASSED)
        assert not rig.receiver.intake.failed_probes()
        await rig.sender.recorder.wait_until(lambda: not rig.sender.handoff.failed_probes())
        rig.reserve("later#1")
        rig.sender.finish(rig.sender.request("later#1"))
        await rig.receiver.recorder.arrival("later#1")
        rig.assert_blocks("later#1")


async def test_a_request_that_waits_for_a_probe_that_fails_has_its_cause() -> None:
    async with Rigs("memory").new(Faults(corrupt=1.0)) as rig:
        rig.receiver.intake.expect(ATTEMPT, rig.sender.source)
        assert (await rig.receiver.recorder.failure()).cause is TransferCause.PROBE_FAILED


async def test_a_sender_whose_bytes_go_elsewhere_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def misplaced(memory: KVMemory) -> known_bytes.FillBlock:
        fill = real(memory)
        return lambda block, seed, group=0: fill(block + 1, seed, group)

    real = known_bytes.block_filler
    monkeypatch.setattr("kv_transfer.mover.agent_reads.block_filler", misplaced)
    async with Rigs("memory").new() as rig:
        _, seen = await wait_for_failures(rig)
        assert seen.fault is ProbeFault.WRONG_BYTES
