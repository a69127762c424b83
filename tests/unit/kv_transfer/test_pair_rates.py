"""How fast a pair is, and over what: the timed reads of a probe, and what UCX says of its lanes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from baton.errors import TransferCause
from baton.messages.ids import Peer
from baton.messages.node_report import MeasuredPair, ProbeFault
from baton.node.reports.reports import handoff_notice
from kv_transfer.backends.nixl import ucx_defaults
from kv_transfer.backends.ucx_lanes import UcxLog
from kv_transfer.figures import pair_figures
from kv_transfer.link.link_messages import ProbeReady, ProbeResult
from kv_transfer.receiver.join_probe import JoinProbes
from kv_transfer.receiver.pair_rates import PairRates, ReadTiming
from kv_transfer.receiver.probe_values import PairProven, ProbeState, ReadProbe, ReportSlow
from kv_transfer.receiver.transfer_values import TellSender
from tests.doubles.fake_clock import FakeClock

SENDER = Peer("p0", "p0.x", "h:1")
MIB = 1 << 20


def begun(memory_kind: str = "VRAM") -> tuple[JoinProbes, ReadProbe]:
    """Probes of a reader, and the read of its only probe."""
    probes = JoinProbes("d0", "d0.x", FakeClock(10.0), new_nonce=lambda: "nonce", memory_kind="VRAM")
    probes.local_blocks = (100,)
    probes.link_up(SENDER, memory_kind=memory_kind)
    probes.connected("p0.x")
    (read,) = probes.received("p0.x", ProbeReady(1, 900, 71))
    assert isinstance(read, ReadProbe)
    probes.filled(read.read_id, {1: 5})
    return probes, read


def test_a_right_block_is_read_again_to_be_timed_before_the_sender_is_told() -> None:
    probes, read = begun()
    assert probes.read_done(read.read_id, 8 * MIB, 0.4, "cuda_ipc/cuda") == []
    effects = probes.digested(read.read_id, {100: 71})
    for seconds in (0.004, 0.003, 0.005):
        (again,) = effects
        assert isinstance(again, ReadProbe)
        assert (again.read_id, again.seed, again.remote_block) == (read.read_id, "", 900)
        assert probes.state("p0.x") is ProbeState.READING
        effects = probes.read_done(read.read_id, 8 * MIB, seconds)
    told, proven, slow = effects
    assert told == TellSender("p0.x", ProbeResult(1, 71))
    assert proven == PairProven("p0.x")
    assert isinstance(slow, ReportSlow)
    (pair,) = probes.rates.shown()
    assert pair == MeasuredPair("p0", 8 * MIB / 0.003, 8 * MIB, "cuda_ipc/cuda", "VRAM", "VRAM", slow.detail)
    assert [(figure.value, figure.labels) for figure in pair_figures([pair])] == [
        (pair.bytes_per_second, {"peer": "p0", "lane": "cuda_ipc/cuda"})
    ]
    assert handoff_notice([], [], [pair]) == f"KvPairSlow: {pair.why_slow}"
    probes.disconnected("p0.x")
    assert probes.rates.shown() == []


def test_a_read_that_fails_while_it_is_timed_fails_the_probe() -> None:
    probes, read = begun()
    probes.read_done(read.read_id, MIB, 0.01)
    probes.digested(read.read_id, {100: 71})
    told, *_ = probes.read_failed(read.read_id, TransferCause.REFUSED, "no")
    assert isinstance(told, TellSender)
    assert isinstance(told.message, ProbeResult)
    assert (told.message.fault, probes.rates.shown()) == (ProbeFault.READ_FAILED, [])


def test_after_a_first_read_of_seconds_none_is_timed() -> None:
    probes, read = begun("DRAM")
    probes.read_done(read.read_id, MIB, 2.0)
    assert PairProven("p0.x") in probes.digested(read.read_id, {100: 71})
    assert [pair.bytes_per_second for pair in probes.rates.shown()] == [MIB / 2]


@pytest.mark.parametrize(
    ("kind", "num_bytes", "seconds", "is_slow"),
    [
        ("VRAM", 50 * MIB, 0.010, False),
        ("VRAM", 50 * MIB, 0.013, True),
        ("VRAM", MIB, 0.001, False),  # what a wake-up takes says nothing of the lane
        ("DRAM", 50 * MIB, 0.1, False),
    ],
)
def test_only_gpus_between_which_kv_goes_through_the_host_are_slow(
    kind: str, num_bytes: int, seconds: float, is_slow: bool
) -> None:
    rates, timing = PairRates("d0", "VRAM"), ReadTiming()
    for _ in range(2):
        timing.took(num_bytes, seconds, "tcp/eth0")
    reason = rates.measured("p0.x", "p0", kind, timing)
    assert bool(reason) == is_slow
    assert not is_slow or ("GB/s over tcp/eth0" in reason and "less than 5 " in reason)


def test_what_ucx_writes_of_its_lanes_is_read_and_its_log_given_back() -> None:
    log, environ = UcxLog(), {"HOME": "/"}
    assert log.lane() == ""
    with log.asked(environ):
        assert environ["UCX_PROTO_INFO"] == "y"
        file = os.open(environ["UCX_LOG_FILE"], os.O_WRONLY)
    assert environ == {"HOME": "/"}, "no process that starts later has a log that it can't open"

    def ucx_writes(transport: str, endpoint: str = "intra-node") -> None:
        lines = (
            f"d0.x {endpoint} cfg#1",
            "remote memory read by ucp_get* into host",
            f"9..inf | zero-copy | {transport}",
        )
        os.write(file, "".join(f"[1.5] [vm:2:0]  | {line} |\n" for line in lines).encode())

    ucx_writes("self/memory", "self")
    ucx_writes("cma/memory")
    assert log.lane() == "cma/memory"
    assert os.fstat(file).st_size == 0
    assert log.lane() == "cma/memory", "UCX says nothing of another endpoint of the same kind"
    ucx_writes("tcp/eth0")
    assert log.lane() == "tcp/eth0"
    assert log.lane() == "tcp/eth0 or cma/memory"
    os.close(file)


def test_a_log_that_the_operator_has_set_up_stays_so() -> None:
    environ = {"UCX_LOG_LEVEL": "debug"}
    with UcxLog().asked(environ):
        assert environ == {"UCX_LOG_LEVEL": "debug"}
    assert environ == {"UCX_LOG_LEVEL": "debug"}


def test_ucx_reads_from_gpu_to_gpu_without_nvlink_too(tmp_path: Path) -> None:
    assert ucx_defaults("VRAM", tmp_path)["UCX_CUDA_IPC_ENABLE_GET_ZCOPY"] == "on"
    assert "UCX_CUDA_IPC_ENABLE_GET_ZCOPY" not in ucx_defaults("DRAM", tmp_path)
