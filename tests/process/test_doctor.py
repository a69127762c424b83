"""`baton doctor` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

from tests.process.shell import Shell

CHECKS = [
    "kernels",
    "bfloat16",
    "model",
    "bit-exact",
    "compute",
    "threads",
    "memory",
    "gpu",
    "redis",
    "nixl",
    "shm",
    "memlock",
]
CHECKS += ["port", "disk", "clock", "versions"]
LEVELS = ["OK", "WARNING", "CRITICAL", "UNKNOWN"]


def test_the_doctor_reports_every_check(shell: Shell, model: Path, tmp_path: Path) -> None:
    done = shell.baton("doctor", "--model", model, "--run-dir", tmp_path / "elsewhere", "-o", "json")
    report = json.loads(done.stdout)
    assert [one["check"] for one in report["checks"]] == CHECKS
    assert LEVELS[done.returncode] == report["status"]
    by_name = {one["check"]: one for one in report["checks"]}
    for name in ("kernels", "model", "bit-exact", "compute", "redis", "nixl", "clock", "versions"):
        assert by_name[name]["status"] == "OK", by_name[name]
    assert f"free for {tmp_path / 'elsewhere'}, where logs go" in by_name["disk"]["says"]
    for one in report["checks"]:
        assert bool(one["fix"]) == (one["status"] != "OK"), one


def test_a_problem_sets_the_exit_code(shell: Shell, tmp_path: Path) -> None:
    done = shell.baton("doctor", "--model", tmp_path / "nowhere", environment={"UCX_TLS": "nothing"})
    assert done.returncode == 2
    said = [line.split()[1] for line in done.stdout.splitlines() if line and not line.startswith((" ", "CRITICAL:"))]
    assert said == CHECKS
    assert "does not exist" in done.stdout
    assert "CRITICAL  nixl" in done.stdout
    assert "fix: " in done.stdout
