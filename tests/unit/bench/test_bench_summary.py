"""Summaries of runs equal what numpy computes by vLLM's definitions; result files are read as they were written."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.bench.results.gaps import Gaps
from baton.bench.results.outcome import Outcome, Outcomes
from baton.bench.results.result_file import new_result, read_result, without_secrets, write_result
from baton.bench.results.summary import Slo, summarize, ttft_parts
from baton.errors import InvalidRequest

SPANS = st.floats(1e-6, 100.0)


@st.composite
def outcome(draw: st.DrawFn) -> Outcome:
    planned = draw(SPANS)
    sent = planned + draw(SPANS)
    if draw(st.integers(0, 4)) == 0:
        return Outcome(draw(st.integers(0, 99)), planned, sent, None, sent + draw(SPANS), 7, 0, error="gone")
    first = sent + draw(SPANS)
    gaps = draw(st.lists(SPANS, max_size=5))
    return Outcome(
        draw(st.integers(0, 99)), planned, sent, first, first + sum(gaps), draw(st.integers(1, 99)), len(gaps) + 1, gaps
    )


def gathered(many: list[Outcome]) -> Outcomes:
    outcomes = Outcomes()
    for one in many:
        outcomes.append(one)
    return outcomes


@given(st.lists(outcome(), max_size=12), st.floats(0.1, 50), st.floats(1.0, 1e5), st.floats(1.0, 1e5))
def test_a_summary_equals_numpys(many: list[Outcome], duration: float, ttft_ms: float, tpot_ms: float) -> None:
    summary = summarize(gathered(many), duration, Slo(ttft_ms, tpot_ms), (50, 99))
    ended = [one for one in many if one.error is None and one.first_token_s is not None]
    ttfts = [((one.first_token_s or 0) - one.planned_s) * 1e3 for one in ended]
    tpots = [
        (one.finished_s - (one.first_token_s or 0)) * 1e3 / (one.output_length - 1) if one.output_length > 1 else 0.0
        for one in ended
    ]
    several = [tpot for tpot, one in zip(tpots, ended, strict=True) if one.output_length > 1]
    gaps = [gap * 1e3 for one in ended for gap in one.gaps]
    assert summary["completed"] == len(ended)
    assert summary["failed"] == len(many) - len(ended)
    assert summary["request_throughput"] == pytest.approx(len(ended) / duration)
    assert summary["output_throughput"] == pytest.approx(sum(one.output_length for one in ended) / duration)
    for name, values in (("ttft", ttfts), ("tpot", several)):
        assert summary[f"mean_{name}_ms"] == pytest.approx(np.mean(values) if values else 0)
        assert summary[f"median_{name}_ms"] == pytest.approx(np.median(values) if values else 0)
        assert summary[f"std_{name}_ms"] == pytest.approx(np.std(values) if values else 0, abs=1e-6)
        assert summary[f"p99_{name}_ms"] == pytest.approx(np.percentile(values, 99) if values else 0)
    assert summary["mean_itl_ms"] == pytest.approx(np.mean(gaps) if gaps else 0)
    good = sum(ttft <= ttft_ms and tpot <= tpot_ms for ttft, tpot in zip(ttfts, tpots, strict=True))
    assert summary["request_goodput"] == pytest.approx(good / duration)
    assert summary["attainment"] == pytest.approx(good / len(many) if many else 0)


@given(st.lists(st.floats(2e-6, 1e4), min_size=1, max_size=300), st.floats(0, 100))
def test_percentiles_of_gaps_are_exact_to_half_a_thousandth(values: list[float], percent: float) -> None:
    gaps = Gaps()
    gaps.add(values[: len(values) // 2])
    other = Gaps()
    other.add(values[len(values) // 2 :])
    gaps.merge(Gaps.from_bytes(other.to_bytes()))
    assert len(gaps) == len(values)
    assert gaps.mean() == pytest.approx(np.mean(values))
    assert gaps.std() == pytest.approx(np.std(values), abs=1e-4 * max(values))
    exact = sorted(values)[round(percent / 100 * (len(values) - 1))]
    assert gaps.percentile(percent) == pytest.approx(exact, rel=6e-4)
    assert sum(gaps.histogram()["counts"]) == len(values)


@given(st.lists(outcome(), max_size=8), st.lists(outcome(), max_size=8))
def test_outcomes_of_several_processes_are_merged(some: list[Outcome], others: list[Outcome]) -> None:
    together = gathered(some)
    together.extend(Outcomes.from_bytes(gathered(others).to_bytes()))
    alone = gathered(some + others)
    assert together.columns() == alone.columns()
    assert together.errors == alone.errors
    assert list(together.error_texts()) == [one.error for one in some + others]


def test_node_names_and_errors_survive_merging() -> None:
    mine = gathered([Outcome(0, 0, 0, 1, 1, 1, 1, prefill_node="a", decode_node="b")])
    mine.extend(gathered([Outcome(1, 0, 0, 1, 1, 1, 1, prefill_node="b", decode_node="c", error="x")]))
    assert list(mine.node_names()) == [("a", "b"), ("b", "c")]
    assert list(mine.error_texts()) == [None, "x"]


def test_latencies_include_the_generators_lateness() -> None:
    summary = summarize(gathered([Outcome(0, 1.0, 3.0, 3.5, 4.0, 5, 2, [0.5])]), 4.0)
    assert summary["mean_ttft_ms"] == pytest.approx(2500)
    assert summary["mean_e2el_ms"] == pytest.approx(3000)
    assert summary["mean_tpot_ms"] == pytest.approx(500)
    assert summary["request_goodput"] is None


def test_attainment_is_over_offered_requests() -> None:
    outcomes = gathered([Outcome(0, 0.0, 0.0, 0.01, 0.01, 5, 1)])
    assert summarize(outcomes, 1.0, Slo(ttft_ms=20), offered=4)["attainment"] == 0.25


def test_parts_of_the_time_to_first_token_add_up() -> None:
    outcomes = gathered([Outcome(0, 0.0, 0.0, 0.5, 1.0, 5, 2, [0.5], queue_s=0.125, prefill_s=0.25)])
    assert ttft_parts(outcomes) == {"queue": 125, "prefill": 250, "rest": 125}
    assert ttft_parts(gathered([Outcome(0, 0.0, 0.0, 0.5, 1.0, 5, 2, [0.5])])) is None


def test_slos_are_parsed_as_in_vllm() -> None:
    assert Slo.parse(["ttft:250", "tpot:100.5"]) == Slo(250, 100.5)
    assert not Slo.parse([])
    assert Slo(10, None, 5).scaled(2) == Slo(20, None, 10)
    for word in ("ttft", "ttft:x", "tbt:3", "tpot:0", "tpot:-1", "tpot:nan", "e2el:inf"):
        with pytest.raises(InvalidRequest, match="--goodput"):
            Slo.parse([word])


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["bench", "serve", "--api-key", "sk-1", "--seed", "2"], ["bench", "serve", "--api-key", "...", "--seed", "2"]),
        (["--api-key=sk-1"], ["--api-key=..."]),
        (["--registry", "redis://me:p@ss@host:1/0"], ["--registry", "redis://me:...@host:1/0"]),
        (["--registry=rediss://:secret@host"], ["--registry=rediss://:...@host"]),
        (["--base-url", "http://host:8000"], ["--base-url", "http://host:8000"]),
    ],
)
def test_the_command_in_a_result_has_no_secrets(words: list[str], shown: list[str]) -> None:
    assert without_secrets(words) == shown


def test_a_result_is_read_as_it_was_written(tmp_path: Path) -> None:
    result = new_result("serve", {"seed": 1}, [{"name": "x", "rates": []}], 1, "2026-01-01T00:00:00+00:00")
    path = tmp_path / "there" / "result.json"
    write_result(path, result)
    assert read_result(path) == json.loads(json.dumps(result))
    assert [file.name for file in path.parent.iterdir()] == ["result.json"]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"schema": "baton.bench/1", "kind": "x"}', "\xff"])
def test_a_file_that_is_not_a_result_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "result.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(InvalidRequest, match=r"result\.json"):
        read_result(path)
