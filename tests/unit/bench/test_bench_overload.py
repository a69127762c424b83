"""The evaluation of `baton bench overload`: goodput by window, refusals, tenants, and the time to recover."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import numpy as np

from baton.bench.config import OverloadConfig
from baton.bench.overload import (
    GREEDY,
    MODEST,
    PROBE,
    OverloadReport,
    Shifted,
    evaluate,
    recovery_s,
)
from baton.bench.report.panels import draw_panels
from baton.bench.results.outcome import Outcome, Outcomes

CONFIG = OverloadConfig(overload_s=20.0, before_s=10.0, after_s=10.0)


def load(*outcomes: Outcome, offset_s: float = 0.0) -> Shifted:
    taken = Outcomes()
    for outcome in outcomes:
        taken.append(outcome)
    # Outcomes arrive in this form from a generator process.
    return Shifted(Outcomes.from_bytes(taken.to_bytes()), offset_s, 1.0)


def served(at_s: float, ttft_s: float = 0.1, length_s: float = 0.5) -> Outcome:
    return Outcome(0, at_s, at_s, at_s + ttft_s, at_s + length_s, 64, 16)


def refused(at_s: float, error: str = "RESOURCE_EXHAUSTED: busy", retry_after_s: float | None = 1.5) -> Outcome:
    return Outcome(0, at_s, at_s, None, at_s + 0.02, 64, 0, error=error, retry_after_s=retry_after_s)


def report(*greedy: Outcome) -> OverloadReport:
    probe = load(*(served(float(at)) for at in range(40)), offset_s=-10.0)
    return evaluate(CONFIG, 1.0, 10.0, {GREEDY: load(*greedy), MODEST: load(served(3.0)), PROBE: probe})


def verdicts(found: OverloadReport) -> list[bool]:
    return [ok for _, _, ok in found.checks()]


def test_prompt_refusals_and_answers_within_the_slo_pass() -> None:
    found = report(refused(1.0), refused(2.0, "UNAVAILABLE: full"), refused(2.0, "HTTP 429: busy"))
    assert verdicts(found) == [True] * 5
    assert (found.refusals.count, found.refusals.typed, found.refusals.with_retry_after) == (3, 3, 3)
    assert found.windows == [1.1, 1.0]
    assert found.recovery_s == 0.0
    assert found.tenants[MODEST]["good"] == 1 / CONFIG.overload_s


def test_a_refusal_without_retry_after_or_without_a_type_fails() -> None:
    assert verdicts(report(refused(1.0, retry_after_s=None)))[1:3] == [False, True]
    assert verdicts(report(refused(1.0, "INTERNAL: broken", None)))[1:3] == [True, False]


def test_a_run_is_drawn_with_each_window_and_each_answer_of_the_probe() -> None:
    shown = report(refused(1.0))
    drawn = ElementTree.fromstring(draw_panels(*shown.panels()))  # noqa: S314  (our own)
    circles = [(float(dot.attrib["cx"]), float(dot.attrib["cy"])) for dot in drawn.iter() if dot.tag.endswith("circle")]
    assert len(circles) == len(shown.windows) + len(shown.probe)
    _, _, width, height = map(float, drawn.attrib["viewBox"].split())
    assert all(0 < x < width and 0 < y < height for x, y in circles)
    texts = [element.text or "" for element in drawn.iter()]
    assert "the probe: milliseconds to the first token" in texts


def test_late_tokens_do_not_count_as_goodput() -> None:
    found = report(*(served(float(at), ttft_s=2.5, length_s=3.0) for at in range(15)))
    assert found.tenants[GREEDY]["completed"] > 0.0
    assert found.tenants[GREEDY]["good"] == 0.0


def test_the_recovery_time_of_latency_that_becomes_normal_late_or_never() -> None:
    planned = np.arange(20.0, 40.0)
    late = np.where(planned < 31.0, 0.5, 0.1)
    assert recovery_s(planned, late, 0.1, 20.0, 20.0) == 10.0
    assert recovery_s(planned, np.full(20, math.inf), 0.1, 20.0, 20.0) is None
    again = np.where(planned >= 38.0, 0.5, 0.1)
    assert recovery_s(planned, np.where(planned >= 36.0, 0.5, again), 0.1, 20.0, 20.0) is None
