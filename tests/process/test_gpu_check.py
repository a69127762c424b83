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


def test_every_stage_runs_to_its_end_and_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.syspath_prepend(str(SCRIPTS))
    stages, results = importlib.import_module("gpu.check").STAGES, importlib.import_module("gpu.results")
    file = tmp_path / "results.jsonl"
    command = [sys.executable, "-m", "gpu.check", "--device", "cpu"]
    paths = os.pathsep.join(map(str, (SCRIPTS, SCRIPTS.parent)))
    for option in ("--results", "--resume"):
        subprocess.run([*command, option, file], env={**os.environ, "PYTHONPATH": paths}, check=True)
        ends = [line for line in results.read_lines(file) if line["kind"] == "end"]
        assert [(line["stage"], line["outcome"]) for line in ends] == [(stage, "passed") for stage in stages]
