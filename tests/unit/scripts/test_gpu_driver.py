"""The driver of scripts/gpu_check with stages of a few lines: what it writes when they pass, fail, crash or hang."""

from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from select import select
from typing import Any

import pytest

from tests.support.load_script import SCRIPTS

PASSES = "SECONDS = 60\ndef run(context): context.report('figure', value=1)\n"
FAILS = "SECONDS = 60\ndef run(context):\n    context.check('sum', False)\n    context.report('figure', value=2)\n"
CRASHES = "SECONDS = 60\ndef run(context):\n    context.report('figure', value=3)\n    raise ValueError('no kernel')\n"
HANGS = "import time\nSECONDS = 0.1\ndef run(context): time.sleep(600)\n"
LEAVES_A_PROCESS = """
import subprocess
SECONDS = 60
def run(context): context.report("left", pid=subprocess.Popen(["sleep", "600"]).pid)
"""
INTERRUPTS = """
import os, signal, time
SECONDS = 60
def run(context):
    context.report("figure", value=4)
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(600)
"""

Run = Callable[..., Any]


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module that reads result files; scripts import each other by their bare names."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("gpu.results")


@pytest.fixture
def run(results: Any, tmp_path: Path) -> Run:
    """Runs stages with these sources, in their order, and returns the driver."""
    module = importlib.import_module("gpu.driver")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(SCRIPTS)])}

    def run_stages(budget: float = 1e9, **sources: str) -> Any:
        for name, source in sources.items():
            (tmp_path / f"{name}.py").write_text(source)
        driver = module.Driver(tmp_path / "results.jsonl", "full", "cuda", environment, budget)
        driver.run(module.find_stages(tmp_path, list(sources), ""), {"card": "none"})
        return driver

    return run_stages


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also where the runner of the tests ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_stage_that_fails_stops_no_other(run: Run, results: Any) -> None:
    driver = run(failing=FAILS, crashing=CRASHES, hanging=HANGS, passing=PASSES)
    assert driver.outcomes == {
        "failing": "failed",
        "crashing": "crashed",
        "hanging": "deadline",
        "passing": "passed",
    }
    lines = results.read_lines(driver.results)
    figures = [(line["stage"], line["fields"]["value"]) for line in lines if line["kind"] == "report"]
    assert figures == [("failing", 2), ("crashing", 3), ("passing", 1)]
    (end,) = (line for line in lines if line["kind"] == "end" and line["stage"] == "crashing")
    assert end["output"][-1] == "ValueError: no kernel"
    check = importlib.import_module("gpu.check")
    assert check.status(driver.outcomes) == 1
    assert check.status({"passing": "passed"}) == 0


def test_what_does_not_fit_the_budget_is_left_out(run: Run, results: Any) -> None:
    driver = run(budget=30, long=PASSES, short=PASSES.replace("60", "20"))
    assert driver.outcomes == {"long": "left out", "short": "passed"}
    assert importlib.import_module("gpu.check").status(driver.outcomes) == 3


def test_no_process_outlives_its_stage(run: Run, results: Any) -> None:
    driver = run(leaving=LEAVES_A_PROCESS)
    (pid,) = (line["fields"]["pid"] for line in results.read_lines(driver.results) if line["kind"] == "report")
    with suppress(ProcessLookupError):
        process = os.pidfd_open(pid)  # readable once the process has ended
        assert select([process], [], [], 60)[0]
        os.close(process)


@pytest.mark.usefixtures("results")
def test_a_gpu_that_is_not_found_is_no_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, driver = importlib.import_module("gpu.machine"), tmp_path / "nvidiactl"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.card(driver) is None
    driver.touch()
    with pytest.raises(machine.NoAnswer, match=str(driver)):
        machine.card(driver)
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho NVIDIA H200\n")
    program.chmod(0o755)
    assert machine.card(driver) == "NVIDIA H200"


@pytest.mark.usefixtures("results")
def test_the_budget_has_room_for_all_stages_and_the_c_kernels() -> None:
    check, driver = importlib.import_module("gpu.check"), importlib.import_module("gpu.driver")
    stages = driver.find_stages(SCRIPTS / "gpu" / "stages", check.STAGES, "gpu.stages.")
    assert sum(stage.seconds for stage in stages) + driver.KERNELS_S <= check.BUDGET_S


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_the_stage_and_keeps_its_lines(run: Run, results: Any, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(interrupting=INTERRUPTS, never=PASSES)
    begun, figure, end = results.read_lines(tmp_path / "results.jsonl")
    assert begun["kind"] == "run"
    assert figure["fields"] == {"value": 4}
    assert (end["stage"], end["outcome"]) == ("interrupting", "interrupted")


def test_a_run_goes_on_without_what_passed(run: Run, results: Any, tmp_path: Path) -> None:
    run(first=PASSES, second=FAILS)
    file = tmp_path / "results.jsonl"
    with file.open("a") as cut:
        cut.write('{"kind": "end", "stage": "second", "outco')  # the process was killed while it wrote
    assert results.passed_stages(results.read_lines(file)) == {"first"}
    run(second=PASSES)
    lines = results.read_lines(file)
    assert results.passed_stages(lines) == {"first", "second"}
    assert [line["fields"] for line in results.latest(lines, "second") if line["kind"] == "report"] == [{"value": 1}]
    assert [line["fields"] for line in results.latest(lines, "first") if line["kind"] == "report"] == [{"value": 1}]
