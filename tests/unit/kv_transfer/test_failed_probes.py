"""Names of peers that are longer than what is kept of them."""

from __future__ import annotations

from baton.messages.node_report import ProbeFault
from kv_transfer.link.failed_probes import FailedProbes
from tests.doubles.fake_clock import FakeClock

LONG = "p" * 200


def test_a_pass_forgets_earlier_incarnations_of_a_node_with_a_long_name() -> None:
    failed = FailedProbes(FakeClock())
    failed.failed("p.first", LONG, ProbeFault.TIMED_OUT, "nothing came")
    assert [each.peer for each in failed.shown()] == [LONG[:128]]
    failed.passed("p.second", LONG)
    assert failed.shown() == []
