"""The tokens of a step are tuned for the SLO before a comparison: sizes that are tried, in the time that there is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.bench.arrangement import Arrangement, chosen
from baton.bench.compare.interleaved import OVERHEAD_S, RunningArrangement
from baton.bench.compare.run import LARGEST, SMALLEST, ChunkSizeSearch, TriedSize, Tuned, tune_all
from baton.bench.config import CompareConfig
from baton.bench.experiment import Experiment
from baton.bench.load.endpoint import Target
from baton.bench.results.summary import Slo
from baton.bench.workloads.spec import WorkloadSpec
from baton.models.resolve import FoundModel
from tests.doubles.fake_clock import FakeClock
from tests.unit.bench.test_compare_interleaved import TOKENS, FormulaMachine


def sizes(goodput_at: Callable[[int], float], first: int = 512, max_tries: int = 8) -> list[int]:
    """The sizes that a search tries."""
    search = ChunkSizeSearch(first, max_tries)
    while (size := search.size) is not None:
        search.add_result(goodput_at(size))
    return [each.max_num_batched_tokens for each in search.tried]


def test_the_search_goes_on_in_the_direction_in_which_the_goodput_rises() -> None:
    assert sizes(lambda size: 1 / size) == [512, 256, 128, 64]
    assert sizes(lambda size: size) == [512, 256, 1024, 2048, 4096, 8192]
    assert sizes(lambda size: -abs(size - 256)) == [512, 256, 128]
    assert sizes(lambda size: -abs(size - 512)) == [512, 256, 1024]
    assert sizes(lambda _: 1.0) == [512, 256, 1024], "the first size is kept unless another one is better"
    assert sizes(lambda size: -size, first=64) == [64, 128]
    assert sizes(lambda size: 1 / size, max_tries=2) == [512, 256]


@given(st.dictionaries(st.integers(6, 13).map(lambda power: 1 << power), st.floats(0, 10)), st.integers(1, 9))
def test_the_best_size_is_one_that_was_tried(goodputs: dict[int, float], max_tries: int) -> None:
    search = ChunkSizeSearch(512, max_tries)
    while (size := search.size) is not None:
        assert SMALLEST <= size <= LARGEST
        assert size not in [each.max_num_batched_tokens for each in search.tried]
        search.add_result(goodputs.get(size, 0.0))
    assert 1 <= len(search.tried) <= max_tries
    assert search.best.goodput == max(each.goodput for each in search.tried)


def tuned(
    goodput_at: Callable[[int], float],
    *,
    deadline_s: float = math.inf,
    slo: Slo | None = None,
    alone: bool = False,
    fixed: int | None = None,
    clock: FakeClock | None = None,
) -> tuple[list[Tuned], list[str], list[tuple[str, int]]]:
    """Tunes colocated and 1p1d on a simulated machine. Returns that, the printed lines and what was started."""
    clock = clock or FakeClock()
    lines: list[str] = []
    started: list[tuple[str, int]] = []

    @contextmanager
    def start(arrangement: Arrangement, size: int) -> Iterator[RunningArrangement]:
        started.append((str(arrangement), size))
        machine = FormulaMachine(clock, [goodput_at(size)])
        clock.advance(20.0)
        yield RunningArrangement(Target("baton", "0"), {}, lambda plan: machine.run(0, plan))

    config = CompareConfig(
        chosen(("colocated", "1p1d"), 2),
        FoundModel(Path("model"), "model"),
        "auto",
        WorkloadSpec(random_input_len=512, random_output_len=TOKENS),
        slo,
        max_num_batched_tokens=fixed,
        is_baseline_tuned_alone=alone,
    )
    return tune_all(config, Experiment(lines.append, clock, deadline_s), start), lines, started


def test_each_arrangement_gets_the_size_with_its_highest_goodput() -> None:
    found, lines, started = tuned(lambda size: 2.0 if size == 256 else 0.8)
    assert [(str(one.arrangement), one.best.max_num_batched_tokens) for one in found] == [
        ("colocated:2", 256),
        ("1p1d", 256),
    ]
    assert started == [(name, size) for name in ("colocated:2", "1p1d") for size in (512, 256, 128)]
    assert found[0].best.goodput == pytest.approx(2.0, rel=0.2)
    assert lines[1].startswith("colocated:2 with steps of 256 tokens: goodput ")
    assert lines[3] == "colocated:2 is compared with steps of 256 tokens"
    assert found[0].slo == found[1].slo, "all are tuned for the SLO of the comparison"


def test_an_slo_of_the_command_line_is_what_sizes_are_tuned_for() -> None:
    slo = Slo(ttft_ms=1234.5, tpot_ms=100.25)
    assert {one.slo for one in tuned(lambda _: 1.0, slo=slo)[0]} == {slo}


def test_a_size_of_the_command_line_is_not_tuned() -> None:
    assert tuned(lambda _: 1.0, fixed=128) == ([], [], [])


def test_a_quick_comparison_tunes_the_baseline_alone() -> None:
    found, _, _ = tuned(lambda _: 1.0, alone=True)
    assert [one.arrangement.is_colocated for one in found] == [True]


@given(st.floats(60, 2000))
def test_tuning_ends_in_time_with_the_sizes_that_were_measured(deadline_s: float) -> None:
    clock = FakeClock()
    (found,), lines, started = tuned(lambda size: 200 / size, deadline_s=deadline_s, alone=True, clock=clock)
    assert lines[-1] == f"colocated:2 is compared with steps of {found.best.max_num_batched_tokens} tokens"
    assert found.best in found.tried or found.best == TriedSize(512, 0.0)
    assert len(found.tried) >= len(started) - 1
    # Calibrating takes a second at least, and starting the load is not in its limit.
    assert clock.monotonic() <= deadline_s + OVERHEAD_S + 1
    if deadline_s > 1000:
        assert found.best.max_num_batched_tokens == SMALLEST
