"""Which latency targets a request kept, and how these are counted."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from baton.messages.generation import Finished, Path
from baton.messages.sampling import SamplingParams
from router.admission.request import ValidRequest
from router.admission.service_class import ServiceClass
from router.attainment import Attainment, Kept, kept_by
from router.placement.cost_model import ServiceLevel

LEVEL = ServiceLevel(1000.0, 50.0)
FINISHED = Finished("stop", None, 10, 11, 0, 0.0, 0.0, 0.0, 1000.0, 1500.0, 0, Path("p", "d", 1, ""))
REQUEST = ValidRequest((1, 2), SamplingParams(), request_id="r", model="m")


@pytest.mark.parametrize(
    ("finished", "kept"),
    [
        (FINISHED, Kept.GOOD),
        (replace(FINISHED, ttft_ms=1000.1, total_ms=1500.1), Kept.LATE),
        (replace(FINISHED, total_ms=1500.1), Kept.SLOW),
        (replace(FINISHED, ttft_ms=1000.1, total_ms=1600.0), Kept.LATE_AND_SLOW),
        (replace(FINISHED, completion_tokens=1, total_ms=9000.0), Kept.GOOD),
        (None, Kept.FAILED),
    ],
)
def test_a_request_keeps_its_targets_or_misses_one(finished: Finished | None, kept: Kept) -> None:
    assert kept_by(LEVEL, finished) is kept
    assert kept_by(ServiceLevel(), finished) is None


def test_a_client_s_own_targets_come_first() -> None:
    assert LEVEL.of(REQUEST) == LEVEL
    assert LEVEL.of(replace(REQUEST, ttft_slo_ms=5.0)) == ServiceLevel(5.0, 50.0)
    assert ServiceLevel().of(replace(REQUEST, tpot_slo_ms=7.0)) == ServiceLevel(math.inf, 7.0)


def test_counts_are_shown_by_class() -> None:
    attainment = Attainment()
    attainment.count(ServiceClass.BATCH, Kept.GOOD)
    attainment.count(ServiceClass.BATCH, Kept.GOOD)
    attainment.count(ServiceClass.BATCH, Kept.FAILED)
    shown = {(figure.labels["class"], figure.labels["result"]): figure.value for figure in attainment.figures()}
    assert {key: count for key, count in shown.items() if count} == {("batch", "good"): 2, ("batch", "failed"): 1}
    assert len(shown) == len(ServiceClass) * len(Kept)
