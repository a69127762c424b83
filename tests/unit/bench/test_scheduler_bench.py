"""The scheduler benchmark measures all its figures."""

from __future__ import annotations

from baton.bench.config import SchedulerBenchConfig
from baton.bench.micro.scheduler import run


def test_every_figure_is_measured() -> None:
    config = SchedulerBenchConfig(prompt_tokens=64, rounds=1, waiting=20, waiting_running=4, admissions=2)
    report = run(config, running=(2, 3))
    assert list(report.steady_us) == ["2", "3"]
    figures = [*report.steady_us.values(), report.steady_us_with_10000_waiting, report.hash_us]
    assert all(figure > 0 for figure in figures)
