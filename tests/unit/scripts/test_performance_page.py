"""scripts/performance runs commands that exist, and keeps their output in files that the page links."""

from __future__ import annotations

import os
import re
from types import ModuleType

import pytest

from tests.support.load_script import SCRIPTS, load_script


@pytest.fixture(scope="module")
def performance() -> ModuleType:
    return load_script("performance")


def test_an_output_is_kept_with_its_command_and_conditions(performance: ModuleType) -> None:
    text = performance.figure_text("baton x", "12 ms\n", "2 cores of X", "2026-11-21")
    assert text == "2 cores of X, 2026-11-21:\n\n```console\n$ baton x\n12 ms\n```\n"


def test_the_page_links_every_output_that_is_kept(performance: ModuleType) -> None:
    page = (performance.ROOT / "docs/performance.md").read_text()
    kept = {file.name for file in performance.KEPT.glob("*.txt")}
    assert kept == set(re.findall(r"\(performance/([^)]+\.txt)\)", page))


def test_every_command_exists_with_its_flags(performance: ModuleType, capfd: pytest.CaptureFixture[str]) -> None:
    from baton.cli.main import main

    for figure in performance.FIGURES:
        words = figure.command.split()
        if words[0] == "baton":
            named = words[1:3] if words[1] == "bench" else words[1:2]
            assert main([*named, "--help"]) == 0
            help_text = capfd.readouterr().out
            for flag in (word for word in words if word.startswith("--")):
                assert flag in help_text, figure.command
        else:
            assert (SCRIPTS.parent / words[0]).exists()


def test_an_unknown_figure_is_a_usage_error(performance: ModuleType, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        performance.main(["weather"])
    assert ended.value.code == 2
    assert "no such figure: weather" in capfd.readouterr().err
    assert performance.main(["--list", "engine"]) == 0
    assert "baton bench engine --shape 0.5b" in capfd.readouterr().out


def test_the_speed_of_all_cores_is_measured_and_described(performance: ModuleType) -> None:
    speeds: dict[int, list[float]] = {}
    with performance.measured_cores(speeds):
        pass
    assert speeds.keys() == os.sched_getaffinity(0)
    assert all(min(taken) > 0 for taken in speeds.values())
    said = performance.describe({0: [3.0, 2.9, 5.1], 1: [5.0]})
    assert said == (
        "a fixed loop of plain Python took 3.0 [2.9, 5.1] ms on core 0 and 5.0 [5.0, 5.0] ms on core 1 meanwhile"
    )
