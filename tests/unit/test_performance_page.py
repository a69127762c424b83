"""Figures come between their markers, and nothing else of the page changes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "performance.py"


@pytest.fixture(scope="module")
def performance() -> ModuleType:
    spec = importlib.util.spec_from_file_location("performance_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_only_what_is_between_the_markers_changes(performance: ModuleType) -> None:
    page = "# A\n<!-- figure: one -->\nold\n<!-- end -->\nprose\n<!-- figure: two -->\nkept\n<!-- end -->\n"
    text = performance.told("baton x", "12 \\1 ms\n", "2 cores of X", "2026-11-21")
    assert performance.rendered(page, {"one": text, "three": "nowhere"}) == (
        "# A\n<!-- figure: one -->\n2 cores of X, 2026-11-21:\n\n```console\n$ baton x\n12 \\1 ms\n```\n<!-- end -->\n"
        "prose\n<!-- figure: two -->\nkept\n<!-- end -->\n"
    )
    again = performance.rendered(page, {"one": text})
    assert performance.rendered(again, {"one": text}) == again


def test_every_command_is_one_that_there_is(performance: ModuleType, capfd: pytest.CaptureFixture[str]) -> None:
    from baton.cli.main import main

    for figure in performance.FIGURES:
        words = figure.command.split()
        if words[0] == "baton":
            named = words[1:3] if words[1] == "bench" else words[1:2]
            assert main([*named, "--help"]) == 0
            told = capfd.readouterr().out
            for flag in (word for word in words if word.startswith("--")):
                assert flag in told, figure.command
        else:
            assert (SCRIPT.parents[1] / words[0]).exists()


def test_a_figure_that_is_not_known_is_bad_usage(performance: ModuleType, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        performance.main(["weather"])
    assert ended.value.code == 2
    assert "no such figure: weather" in capfd.readouterr().err
    assert performance.main(["--list", "engine"]) == 0
    assert "baton bench engine --shape 0.5b" in capfd.readouterr().out
