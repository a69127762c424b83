"""Reports: what they say, that any result file is rendered or refused, and that names in it are escaped."""

from __future__ import annotations

import copy
import csv
import io
import json
import os
import random
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.bench.report.comparison import answer, compared
from baton.bench.report.html import tag
from baton.bench.report.measured import parse_result
from baton.bench.report.page import page, to_csv, to_json, write_report
from baton.bench.results.result_file import read_result
from baton.cli.bench.options import write_files
from baton.cli.main import main
from baton.errors import InvalidRequest
from tests.support.example_results import (
    COLOCATED,
    DISAGGREGATED,
    SLO,
    Behaviour,
    all_failed,
    comparison,
)

HOSTILE = "</script><script>window.pwned=1</script><img src=x onerror=alert(1)>\"'&"

JUNK: tuple[Any, ...] = (None, "x", -1, 0, float("nan"), 1e308, [], {}, [None], [[]], True)


class Tags(HTMLParser):
    """Collects the names of all tags, all attributes, and all text outside of scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attributes: dict[str, list[str]] = {}
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        for name, value in attrs:
            self.attributes.setdefault(name, []).append(value or "")

    def handle_data(self, data: str) -> None:
        if self.names[-1:] not in (["script"], ["style"]):
            self.text += data


def simple(**rates: dict[float, float]) -> dict[str, Any]:
    """A result that has only the attainment by rate of each arrangement."""
    result = comparison((), ())
    result["arrangements"] = [
        {
            "name": name.replace("_", " "),
            "gpus": 2,
            "rates": [
                {
                    "rate": rate,
                    "summary": {
                        "offered": 100,
                        "completed": 100,
                        "failed": 0,
                        "attainment": share,
                        "request_goodput": rate * share,
                        "goodput_slo": SLO.to_json(),
                    },
                }
                for rate, share in points.items()
            ],
        }
        for name, points in rates.items()
    ]
    return result


def answer_text(result: dict[str, Any]) -> str:
    found = answer(parse_result(result))
    return f"{found.headline} {found.detail}".replace("\u00a0", " ")


class TestAnswer:
    def test_the_best_arrangement_is_compared_with_the_colocated_one(self) -> None:
        result = simple(
            two_colocated={2: 1.0, 4: 0.95, 6: 0.5}, one_more={2: 1.0, 4: 1.0, 6: 0.8}, disagg={4: 1.0, 8: 0.95, 9: 0.2}
        )
        assert answer_text(result) == (
            "disagg serves 2 times the requests of two colocated within TTFT 250 ms and TPOT 100 ms. 8 against 4 "
            "requests/s: at least 90 % of the offered requests keep all limits, on 2 GPUs each."
        )

    def test_the_highest_rate_that_was_tried_is_a_lower_bound(self) -> None:
        assert "may serve more" in answer_text(simple(a={2: 1.0, 4: 1.0}, b={2: 1.0, 4: 0.1}))
        assert "may serve more" not in answer_text(simple(a={2: 1.0, 4: 1.0, 6: 0.2}, b={2: 1.0, 4: 0.1}))

    def test_unequal_engines_are_compared_per_engine(self) -> None:
        result = simple(colocated={4: 1.0, 8: 0.0}, disagg={6: 1.0, 8: 0.0})
        result["arrangements"][0]["gpus"] = 1
        text = answer_text(result)
        assert text.startswith("colocated serves 1.3 times the requests per GPU of disagg")
        assert "each" not in text

    def test_the_goodput_of_a_search_takes_precedence_over_single_runs(self) -> None:
        result = simple(colocated={2: 1.0, 4: 1.0, 8: 0.1}, split={4: 1.0, 9: 0.0})
        result["arrangements"][0]["goodput"] = {"rates": [2.9, 3.0, 3.1]}
        result["arrangements"][1]["goodput"] = {"rate": 7.5, "target": 0.95}
        result |= {"goodput_ratio": 2.4, "goodput_ratio_spread": {"p10": 2.3, "p90": 2.6}, "p99_gap_ratio": 0.2}
        text = answer_text(result)
        assert text.startswith("split serves 2.5 times the requests of colocated within")
        assert "7.5 against 3 requests/s: at least 95 %" in text
        assert "Measured in turns: 2.4 [2.3, 2.6] times." in text
        assert "largest gap between tokens is 0.2 [0.2, 0.2] times as long." in text

    def test_what_is_not_settled_has_no_ratio_in_its_headline(self) -> None:
        result = simple(colocated={2: 1.0, 4: 0.1}, split={2: 1.0, 4: 1.0, 6: 0.0})
        result["verdict"] = {"is_settled": False, "finding": "runs of 4 requests differ by chance", "remedy": "more"}
        assert answer_text(result) == (
            "It is not settled which arrangement has the higher goodput. Runs of 4 requests differ by chance. What "
            "would settle it: more. Goodput within TTFT 250 ms and TPOT 100 ms: split 4 requests/s, colocated 2 "
            "requests/s."
        )
        result["verdict"] = {"is_settled": True, "finding": "split leads", "remedy": ""}
        assert answer_text(result).startswith("split serves 2 times the requests of colocated")

    def test_limits_are_not_rounded(self) -> None:
        result = simple(a={2: 0.95, 4: 0.1}, b={2: 0.5})
        result["slo"] = {"ttft_ms": 1234.5, "tpot_ms": 45.625}
        assert "TTFT 1234.5 ms and TPOT 45.625 ms" in answer_text(result)

    def test_the_median_of_repeated_runs_counts(self) -> None:
        result = simple(a={2: 1.0, 4: 0.2})
        lucky = copy.deepcopy(result["arrangements"][0]["rates"][1])
        lucky["summary"]["attainment"] = 1.0
        result["arrangements"][0]["rates"] += [lucky, copy.deepcopy(result["arrangements"][0]["rates"][1])]
        assert "up to 2 requests/s" in answer_text(result)

    def test_only_one_arrangement_keeps_the_limits(self) -> None:
        assert answer_text(simple(a={2: 0.95, 4: 0.1}, b={2: 0.5})).startswith(
            "Only a keeps TTFT 250 ms and TPOT 100 ms: up to 2 requests/s."
        )

    def test_no_arrangement_keeps_the_limits(self) -> None:
        text = answer_text(simple(a={2: 0.4, 4: 0.1}, b={2: 0.5}))
        assert text == (
            "No arrangement keeps TTFT 250 ms and TPOT 100 ms for 90 % of the requests at any rate tried. "
            "The nearest was b at 2 requests/s: 50 % kept them."
        )
        assert "Not one request kept all limits" in answer_text(simple(a={2: 0.0}))

    def test_the_answer_of_a_single_run(self) -> None:
        assert answer_text(simple(mine={3: 0.973})).startswith(
            "mine kept TTFT 250 ms and TPOT 100 ms for 97.3 % of 100 requests at 3 requests/s."
        )

    def test_everything_failed(self) -> None:
        assert answer_text(all_failed()) == "All 40 requests failed. Most often: connection refused"
        assert answer(parse_result(all_failed())).is_bad

    def test_nothing_was_measured(self) -> None:
        assert answer_text(comparison((), ())).startswith("Nothing was measured.")
        assert answer_text(comparison((COLOCATED,), ())).startswith("Nothing was measured.")

    def test_without_a_service_level(self) -> None:
        result = simple(a={2: 1.0})
        result["arrangements"][0]["rates"][0]["summary"] = {
            "completed": 9,
            "request_throughput": 3.0,
            "median_ttft_ms": 20.0,
        }
        assert answer_text(result).startswith("a answered 3 requests/s, half of the first tokens within 20 ms.")

    def test_arrangements_are_compared_near_the_best_ones_capacity(self) -> None:
        measured = parse_result(simple(a={2: 1.0, 5: 0.1}, b={2: 1.0, 4: 0.95, 8: 0.1}))
        assert [one.at.rate for one in compared(measured)] == [5.0, 4.0]

    def test_arrangements_are_compared_at_the_common_rate(self) -> None:
        result = simple(a={2: 1.0, 5: 0.1}, b={2: 1.0, 4: 0.95})
        for arrangement in result["arrangements"]:
            arrangement["rates"][0]["is_common"] = True
        assert [one.at.rate for one in compared(parse_result(result))] == [2.0, 2.0]


class TestRead:
    def test_attainment_of_single_requests_equals_the_summarys(self) -> None:
        for arrangement in parse_result(comparison(requests=80)).arrangements:
            for one in arrangement.measurements:
                assert one.latencies is not None
                assert one.latencies.within(SLO) == pytest.approx(one.attainment)
                assert one.summary["median_ttft_ms"] == pytest.approx(one.ttft.quantile(0.5), rel=0.05)

    def test_a_file_without_single_requests_gives_the_same_distributions(self) -> None:
        full, short = (
            parse_result(comparison(rates=(2.0, 12.0), requests=200, has_outcomes=has)) for has in (True, False)
        )
        for one, other in zip(full.arrangements, short.arrangements, strict=True):
            for mine, theirs in zip(one.measurements, other.measurements, strict=True):
                assert theirs.latencies is None
                assert theirs.ttft.count == mine.ttft.count
                assert theirs.ttft.quantile(0.5) == pytest.approx(mine.ttft.quantile(0.5), rel=0.08)
                assert mine.latencies is not None
                kept = [[scale, mine.latencies.within(SLO.scaled(scale))] for scale, _ in theirs.attainment_by_scale]
                assert kept == [[scale, pytest.approx(share)] for scale, share in theirs.attainment_by_scale]

    def test_failed_requests_count_as_offered(self) -> None:
        (arrangement,) = parse_result(all_failed()).arrangements
        (one,) = arrangement.measurements
        assert (one.offered, one.failed, one.errors, one.ttft.count) == (40, 40, {"connection refused": 40}, 0)
        assert one.latencies is not None
        assert one.latencies.within(SLO) == 0.0

    def test_contradictory_values_are_refused_with_the_fields_name(self) -> None:
        result = comparison((COLOCATED,), (2.0,), 5)
        rate = result["arrangements"][0]["rates"][0]
        rate["outcomes"]["finished_s"].pop()
        with pytest.raises(InvalidRequest, match=r"arrangements\[0\].rates\[0\].outcomes: columns of different"):
            parse_result(result)
        del rate["outcomes"]
        rate["timeline"] = {"n": [[2.0, 1.0, "decode"]]}
        with pytest.raises(InvalidRequest, match=r"timeline\['n'\]: from 2.0 to 1.0"):
            parse_result(result)
        with pytest.raises(InvalidRequest, match="schema"):
            parse_result({"schema": "other"})

    def test_any_changed_file_is_rendered_or_refused(self) -> None:
        sound = comparison((DISAGGREGATED,), (4.0,), 2)
        page(parse_result(sound))
        every = [(path, junk) for path in _paths(sound) for junk in JUNK]
        random.Random(11).shuffle(every)
        refused = 0
        for path, junk in every[: int(os.environ.get("BATON_BROKEN_RESULTS", "80"))]:
            try:
                page(parse_result(_changed(sound, path, junk)))
            except InvalidRequest:
                refused += 1
        assert refused > 5


class TestPage:
    def test_names_are_escaped(self) -> None:
        result = comparison((Behaviour(HOSTILE, 1, 0.0, 0.01), COLOCATED), (2.0,), 20)
        rate = result["arrangements"][0]["rates"][0]
        rate["timeline"] = {HOSTILE: [[0.0, 1.0, HOSTILE, 3]]}
        rate["ttft_parts"] = {HOSTILE: 3.0}
        rate["summary"]["errors"] = {HOSTILE: 2}
        result |= {"command": ["baton", HOSTILE], "notes": [HOSTILE], "kind": HOSTILE, "machine": {HOSTILE: HOSTILE}}
        found = Tags(page(parse_result(result)))
        assert found.names.count("script") == 1
        assert "img" not in found.names
        assert not any(name.startswith("on") for name in found.attributes)
        assert found.text.count(HOSTILE) > 8

    @given(st.text(st.characters(exclude_categories=["Cs"])))
    def test_any_text_is_parsed_back_unchanged(self, text: str) -> None:
        # HTML has no NUL, and normalizes line ends.
        text = text.replace("\0", "").replace("\r", "")
        found = Tags(tag("p", text, data_tip=text))
        assert found.names == ["p"]
        assert found.text == text
        assert found.attributes["data-tip"] == [text]

    def test_text_is_escaped_and_markup_is_not(self) -> None:
        attributes: dict[str, str | float | bool | None] = {
            "class_": "a<b",
            "aria_label": "\"'",
            "hidden": True,
            "tabindex": 0.5,
            "title": None,
            "open": False,
        }
        assert tag("p", "1 < 2 & {0}", tag("br"), None, tag("b", "'"), **attributes) == (
            '<p class="a&lt;b" aria-label="&#34;&#39;" hidden tabindex="0.5">1 &lt; 2 &amp; {0}<br/><b>&#39;</b></p>'
        )

    def test_the_page_has_the_conditions_and_every_figure(self) -> None:
        text = Tags(page(parse_result(comparison(requests=60)))).text.replace("\u00a0", " ")
        for condition in ("AMD EPYC (Zen 5)", "torch 2.13.0", "--goodput ttft:250 tpot:100", "random input len 512"):
            assert condition in text
        for figure in ("prefill-0", "colocated-1", "1P1D conditional", "router and network"):
            assert figure in text

    def test_the_page_says_what_was_interrupted_or_failed(self) -> None:
        result = comparison((COLOCATED, DISAGGREGATED), (2.0,), 10)
        result |= {"is_complete": False, "notes": ["the generator was the bottleneck"]}
        result["arrangements"][0]["rates"][0]["summary"] |= {"failed": 3, "errors": {"unavailable: no node": 3}}
        result["arrangements"][1]["rates"] = []
        text = Tags(page(parse_result(result))).text.replace("\u00a0", " ")
        assert "interrupted" in text
        assert "the generator was the bottleneck" in text
        assert "3 requests of 10 failed (30 %)" in text
        assert "unavailable: no node" in text
        assert "Nothing was measured of 1P1D." in text

    @pytest.mark.parametrize("result", [all_failed(), comparison((), ()), comparison((COLOCATED,), (), 0)])
    def test_a_result_without_data_is_a_page_without_plots(self, result: dict[str, Any]) -> None:
        found = Tags(page(parse_result(result)))
        assert "plot-goodput" not in found.attributes.get("id", []) or "All 40" in found.text.replace("\u00a0", " ")
        assert found.names.count("h2") == found.names.count("section") + 1, "the conditions are no section"
        assert found.names.count("table") == found.names.count("section"), "a section without a plot has figures"
        assert "Not shown" in found.text
        assert "Time to first token by stage: " in found.text

    def test_a_goodput_without_measurements_is_not_shown(self) -> None:
        result = comparison((COLOCATED, DISAGGREGATED), (2.0,), 10)
        result["arrangements"][0]["rates"] = []
        result["arrangements"][0]["goodput"] = {"rate": 5.0}
        name = result["arrangements"][0]["name"]
        assert f"Nothing was measured of {name}." in Tags(page(parse_result(result))).text

    def test_the_page_of_a_large_run_is_not_larger(self) -> None:
        few, many = (len(page(parse_result(_run(count)))) for count in (5_000, 40_000))
        assert many < few * 1.5 < 400_000


class TestPrograms:
    def test_json_has_the_answer_and_every_summary(self) -> None:
        text = to_json(parse_result(simple(a={2: 1.0, 4: 0.95}, b={2: 0.1})))
        assert text["goodput"] == {"a": 4.0, "b": 0.0}
        assert text["answer"] == "Only a keeps TTFT 250 ms and TPOT 100 ms: up to 4 requests/s."
        assert [one["attainment"] for one in text["measurements"]] == [1.0, 0.95, 0.1]

    def test_csv_has_a_line_for_each_measurement_and_no_formula(self) -> None:
        result = simple(a={2: 1.0, 4: 0.95})
        result["arrangements"][0]["name"] = "=cmd|' /C calc'!A0"
        rows = list(csv.DictReader(io.StringIO(to_csv(parse_result(result)))))
        assert [row["rate"] for row in rows] == ["2.0", "4.0"]
        assert {row["arrangement"] for row in rows} == {"'=cmd|' /C calc'!A0"}

    def test_the_command_writes_a_page_beside_the_result(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file = tmp_path / "run.json"
        file.write_text(json.dumps(simple(a={2: 1.0, 4: 0.95})))
        assert main(["bench", "report", str(file)]) == 0
        assert (tmp_path / "run.html").read_text().startswith("<!doctype html>")
        assert main(["bench", "report", str(file), "-o", "json"]) == 0
        assert json.loads(capsys.readouterr().out)["goodput"] == {"a": 4.0}
        assert main(["bench", "report", str(file), "-o", "csv", "--out", str(tmp_path / "deep" / "run.csv")]) == 0
        assert (tmp_path / "deep" / "run.csv").read_text().startswith("arrangement,engines,rate")

    def test_a_refused_result_does_not_overwrite_an_earlier_page(self, tmp_path: Path) -> None:
        path = tmp_path / "run.html"
        write_report(simple(a={2: 1.0}), path)
        before = path.read_bytes()
        with pytest.raises(InvalidRequest):
            write_report({"schema": "other"}, path)
        assert path.read_bytes() == before
        assert list(tmp_path.iterdir()) == [path]

    def test_half_a_surrogate_pair_in_a_name_can_be_written(self, tmp_path: Path) -> None:
        result = simple(a={2: 1.0})
        result["arrangements"][0]["name"] = json.loads('"\\ud800"')
        write_report(result, tmp_path / "run.html")
        assert "? kept TTFT" in (tmp_path / "run.html").read_text(encoding="utf-8")


def _run(count: int) -> dict[str, Any]:
    """A run with `count` requests and as many steps, which are divided among 40 nodes."""
    result = comparison((COLOCATED,), (), 0)
    rng = np.random.default_rng(5)
    planned = np.arange(count) / 100.0
    first = planned + rng.lognormal(-2.0, 0.5, count)
    summary = {"offered": count, "completed": count, "failed": 0, "attainment": 0.95, "goodput_slo": SLO.to_json()}
    steps = [[float(at), float(at) + 0.005, "decode", 8] for at in planned]
    result["arrangements"][0]["rates"] = [
        {
            "rate": 100.0,
            "summary": summary,
            "outcomes": {
                "planned_s": planned.tolist(),
                "first_token_s": first.tolist(),
                "finished_s": (first + 1.0).tolist(),
                "output_length": [20] * count,
            },
            "timeline": {f"node-{node}": steps[node::40] for node in range(40)},
        }
    ]
    return result


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values in a JSON value; only the first two of a list."""
    yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _paths(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value[:2]):
            yield from _paths(inner, (*path, index))


def _changed(value: Any, path: tuple[Any, ...], to: Any) -> Any:
    if not path:
        return to
    copied = copy.copy(value)
    copied[path[0]] = _changed(value[path[0]], path[1:], to)
    return copied


@pytest.mark.parametrize(("wants_result", "wants_report"), [(True, True), (True, False), (False, True), (False, False)])
def test_the_files_that_were_asked_for_are_written(tmp_path: Path, wants_result: bool, wants_report: bool) -> None:
    result = comparison((COLOCATED,), (2.0,), 10)
    files = tmp_path / "r.json", tmp_path / "r.html"
    write_files(result, files[0] if wants_result else None, files[1] if wants_report else None)
    assert [file.exists() for file in files] == [wants_result, wants_report]
    if wants_report:
        assert files[1].read_text() == page(parse_result(result))
    if wants_result:
        assert to_json(parse_result(read_result(files[0]))) == to_json(parse_result(result))


@pytest.mark.parametrize(
    ("named", "subject"),
    [
        ({"model_id": "tiny", "max_concurrency": 16}, "tiny, at most 16 requests at once"),
        ({"model": HOSTILE, "max_concurrency": None}, f"{HOSTILE}, any number of requests at once"),
        ({"models": [{"model": "a"}, {"model": "b"}, {"model": "a"}, {"model": 1}, 2]}, "a, b"),
        ({"model_id": ["x"], "max_concurrency": "many"}, ""),
    ],
)
def test_a_report_names_the_model_and_how_many_requests_were_open(named: dict[str, Any], subject: str) -> None:
    result = simple(a={2: 1.0}) | named
    measured = parse_result(result)
    assert measured.subject == subject
    tags = Tags(page(measured))
    assert (f": {subject}" if subject else "Comparison of arrangements") in tags.text
    assert f"Baton: {measured.model}" in tags.text, "the title has the model"
    assert "img" not in tags.names
    row = next(csv.DictReader(io.StringIO(to_csv(measured))))
    assert row["model"] == measured.model
    assert row["max_concurrency"] == ("16" if "16" in subject else "")
