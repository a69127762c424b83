"""Reports in a browser: no network requests, no errors, every plot visible, on a phone, too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton.bench.report.page import write_report
from tests.support.browser import Browser
from tests.support.example_results import CONDITIONAL, DISAGGREGATED, Behaviour, all_failed, comparison

HOSTILE = "</script><script>window.pwned=1</script><img src=http://192.0.2.1/x onerror=window.pwned=1>\"'&"
PLOTS = """[...document.querySelectorAll('.plot, .lanes, .stacks')].map(plot => {
  const box = plot.getBoundingClientRect();
  const shapes = [...plot.querySelectorAll('path, rect, .stack > span')].filter(shape => {
    const drawn = shape.getBoundingClientRect();
    return drawn.width > 0 || drawn.height > 0;
  });
  const least = [...plot.querySelectorAll('svg')].map(svg => svg.getBoundingClientRect())
    .every(drawn => drawn.width > 180 && drawn.height > 20);
  return [plot.id, box.width, box.height, least ? shapes.length : 0];
})"""
DRAWN = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))"
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
BACKGROUND = "getComputedStyle(document.documentElement).backgroundColor"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "run.html"
    write_report(comparison(requests=120), path)
    return path


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 400, 1200])
def test_every_plot_is_visible_on_every_screen(chromium: Browser, report: Path, width: int, scheme: str) -> None:
    chromium.open(report, width=width, scheme=scheme)
    assert chromium.complaints == []
    assert chromium.requests == [report.as_uri()]
    plots = {name: (wide, high, shapes) for name, wide, high, shapes in chromium.run(PLOTS)}
    assert {"plot-goodput", "plot-attainment", "plot-ttft-cdf", "plot-itl-cdf", "plot-parts"} <= plots.keys()
    for arrangement in range(3):
        for name in ("plot-ttft-histogram", "plot-itl-histogram", "plot-timeline", "plot-moment"):
            assert f"{name}-{arrangement}" in plots
    for name, (wide, high, shapes) in plots.items():
        assert (wide >= 180, high >= 50, shapes >= 1) == (True, True, True), name
    assert chromium.run(OVERFLOW) == 0
    red, green, blue = (
        int(part) for part in chromium.run(BACKGROUND).removeprefix("rgb(").removesuffix(")").split(",")
    )
    assert (red + green + blue > 600) == (scheme == "light")


_CUT_TABLES = """[...document.querySelectorAll('.figures, dd')].filter(each => each.scrollWidth > each.clientWidth)
  .map(each => each.textContent)"""
_EMPTY_FIELDS = """[...document.querySelectorAll('section, table td, table th, dd, dt, figure, p')]
  .filter(each => ['', '\u2013'].includes(each.textContent.trim())).map(each => each.outerHTML)"""
_BROKEN_WORDS = """[...document.querySelectorAll('.word')].filter(each => each.getClientRects().length > 1
  || each.offsetHeight > 2 * parseFloat(getComputedStyle(each).fontSize)).map(each => each.textContent)"""


def test_no_column_is_cut_no_field_empty_and_no_address_broken_on_a_desktop(chromium: Browser, tmp_path: Path) -> None:
    result = comparison(requests=120)
    result["command"] = ["baton", "bench", "serve", "--goodput", *["--base-url", "http://llm.example.com:8000/v1"] * 5]
    result["workload"] = {"dataset": "random", "ramp_up": None, "dataset_path": "", "seed": 0}
    path = tmp_path / "run.html"
    write_report(result, path)
    chromium.open(path, width=1280)
    assert chromium.run(_CUT_TABLES) == []
    assert chromium.run(_EMPTY_FIELDS) == []
    assert chromium.run("document.querySelectorAll('.word').length") > 10
    assert chromium.run(_BROKEN_WORDS) == []
    assert chromium.run("[...document.querySelectorAll('dd')].map(each => each.textContent)").count(
        "dataset random, seed 0"
    )


def test_what_can_not_be_drawn_is_no_section_but_a_line_with_the_reason(chromium: Browser, tmp_path: Path) -> None:
    result = comparison(requests=40)
    result.pop("slo", None)
    for one in result["arrangements"]:
        for rate in one["rates"]:
            rate["summary"].pop("goodput_slo", None)
    path = tmp_path / "run.html"
    write_report(result, path)
    chromium.open(path, width=1280)
    assert not chromium.run("document.querySelector('#goodput')")
    assert chromium.run("[...document.querySelectorAll('section')].every(each => each.querySelector('figure, table'))")
    assert "How much load it serves: This result has no SLO" in chromium.run(
        "document.querySelector('footer').innerText"
    )


def test_labels_do_not_overlap(chromium: Browser, report: Path) -> None:
    """Words below and beside an axis, and of the legend."""
    for width in (360, 1200):
        chromium.open(report, width=width)
        assert chromium.run(_COVERED) == []


def test_pointing_at_a_plot_shows_its_values(chromium: Browser, report: Path) -> None:
    chromium.open(report)
    for name, told in (("plot-ttft-cdf", "within"), ("plot-goodput", "requests/s"), ("plot-parts", "prefill: ")):
        target = f"document.getElementById('{name}')"
        if name == "plot-parts":
            target += ".querySelector('.w0')"
        chromium.run(f"{target}.scrollIntoView({{block: 'center'}})")
        # Scrolling hides what is told, and the page hears of it before it draws the next picture.
        chromium.run(DRAWN)
        box = chromium.run(
            f"(box => [box.x + box.width / 2, box.y + box.height / 2])({target}.getBoundingClientRect())"
        )
        chromium.point(*box)
        tip = chromium.run("(tip => tip.hidden ? '' : tip.innerText)(document.getElementById('tip'))")
        assert told in tip.replace("\u00a0", " ")
    assert chromium.complaints == []


def test_the_whole_report_fits_on_paper(chromium: Browser, report: Path, tmp_path: Path) -> None:
    chromium.open(report, width=780, media="print", scheme="dark")
    assert chromium.run(OVERFLOW) == 0
    assert chromium.run(BACKGROUND) == "rgb(255, 255, 255)"
    chromium.print(tmp_path / "run.pdf")
    assert (tmp_path / "run.pdf").read_bytes().startswith(b"%PDF")


def test_names_in_a_result_run_no_script(chromium: Browser, tmp_path: Path) -> None:
    result = comparison((Behaviour(HOSTILE, 1, 0.0, 0.01), DISAGGREGATED), (2.0, 4.0), 30)
    for rate in result["arrangements"][0]["rates"]:
        rate["timeline"] = {HOSTILE: [[0.0, 1.0, HOSTILE, 3]]}
        rate["ttft_parts"] = {HOSTILE: 3.0}
    result |= {"notes": [HOSTILE], "command": [HOSTILE]}
    path = tmp_path / "run.html"
    write_report(result, path)
    chromium.open(path, width=400)
    assert chromium.run("window.pwned === undefined && document.images.length === 0")
    assert chromium.requests == [path.as_uri()]
    assert chromium.complaints == []
    assert chromium.run(OVERFLOW) == 0
    assert chromium.run(f"document.body.innerText.split({json.dumps(HOSTILE)}).length") > 5


@pytest.mark.parametrize("result", [all_failed(), comparison((), ()), comparison((CONDITIONAL,), (2.0,), 1)])
def test_little_or_no_data_still_makes_a_page(chromium: Browser, tmp_path: Path, result: dict[str, Any]) -> None:
    path = tmp_path / "run.html"
    write_report(result, path)
    chromium.open(path, width=400)
    assert chromium.complaints == []
    assert chromium.run(OVERFLOW) == 0
    assert chromium.run("document.querySelector('h1').getBoundingClientRect().height") > 20


def test_a_page_loads_nothing_and_runs_no_other_script(chromium: Browser, tmp_path: Path, report: Path) -> None:
    """Breaks in on purpose: even where somebody got markup into the page, its policy holds."""
    path = tmp_path / "run.html"
    path.write_text(
        report.read_text().replace("<footer>", "<script>window.pwned=1</script><img src='http://192.0.2.1/x'><footer>")
    )
    chromium.open(path)
    assert chromium.run("window.pwned === undefined")
    refused = [complaint for complaint in chromium.complaints if "Content Security Policy" in complaint]
    assert ["192.0.2.1" in complaint for complaint in refused] == [False, True]


_COVERED = """[...document.querySelectorAll('.plot, .lane-axis, .legend')].flatMap(plot => {
  const words = [...plot.querySelectorAll(':scope > span:not(.mark-text), :scope > li')]
    .map(word => [word.innerText, word.getBoundingClientRect()])
    .filter(([, box]) => box.width > 0);
  return words.flatMap(([text, one], index) => words.slice(index + 1)
    .filter(([, other]) => one.left < other.right && other.left < one.right
                        && one.top < other.bottom && other.top < one.bottom)
    .map(([other]) => `${plot.id}: ${text} over ${other}`));
})"""
