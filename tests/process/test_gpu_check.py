"""scripts/gpu_check without a GPU: no stage has a mistake that would first be seen on a machine with one."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.load_script import SCRIPTS

pytestmark = pytest.mark.timeout(600)

_ALL_STAGES = """
import importlib, sys
from pathlib import Path
from gpu.check import STAGES
from gpu.results import ResultFile
from gpu.stage import StageContext

results = ResultFile(Path(sys.argv[1]))
for stage in STAGES:
    context = StageContext(stage, "tiny", "cpu", 600.0, results)
    importlib.import_module(f"gpu.stages.{stage}").run(context)
    print(f"== {stage}: {context.failed}", flush=True)
"""


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment of the stages' processes."""
    pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.syspath_prepend(str(SCRIPTS))
    machine = importlib.import_module("gpu.machine")
    found: dict[str, str] = machine.stage_environment("cpu", "tiny")
    return found


def test_every_stage_runs_to_its_end(tmp_path: Path, environment: dict[str, str]) -> None:
    """In one process: each would import torch and Triton for seconds."""
    command = [sys.executable, "-c", _ALL_STAGES, str(tmp_path / "results.jsonl")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    ends = [line for line in done.stdout.splitlines() if line.startswith("== ")]
    assert ends == [f"== {stage}: []" for stage in importlib.import_module("gpu.check").STAGES]


def test_a_stage_that_has_passed_is_not_run_again(tmp_path: Path, environment: dict[str, str]) -> None:
    file = tmp_path / "results.jsonl"
    command = [sys.executable, "-m", "gpu.check", "--device", "cpu", "--only", "environment"]
    for option in ("--results", "--resume"):
        subprocess.run([*command, option, file], env={**os.environ, **environment}, check=True)
        lines = importlib.import_module("gpu.results").read_lines(file)
        ends = [(line["stage"], line["outcome"]) for line in lines if line["kind"] == "end"]
        assert ends == [("environment", "passed")]
