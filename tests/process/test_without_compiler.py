"""Without a C compiler Baton installs, runs on torch's products and reports what that costs."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from tests.process.shell import ROOT, Shell

PACKAGES = ("baton", "router", "prefill_node", "decode_node", "kv_transfer")
NO_COMPILER = {"CC": "false", "CFLAGS": ""}


@pytest.fixture
def installed(shell: Shell, tmp_path: Path) -> Path:
    """What pip makes of the sources alone; the dependencies are those of this environment."""
    source, target = tmp_path / "source", tmp_path / "installed"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-deps", "--no-build-isolation"]
    done = shell.run([*pip, "--no-index", "--no-compile", "--target", str(target), str(source)], without(tmp_path))
    assert done.returncode == 0, done.stderr
    assert not list(target.rglob("*.so"))
    return target


def without(tmp_path: Path) -> dict[str, str]:
    """No compiler by any name, also not on the PATH."""
    return NO_COMPILER | {"PATH": str(tmp_path / "no-programs")}


def test_without_a_compiler_baton_runs_and_the_doctor_says_what_it_costs(
    shell: Shell, installed: Path, tmp_path: Path, model: Path
) -> None:
    # In a folder of its own, before whatever is installed here.
    environment = without(tmp_path) | {"PYTHONPATH": str(installed)}
    command = [sys.executable, "-m", "baton.cli.main", "doctor", "--model", str(model), "-o", "json"]
    done = shell.run(command, environment)
    checks = {one["check"]: one for one in json.loads(done.stdout)["checks"]}
    assert checks["kernels"]["status"] == "WARNING", checks
    assert "no C kernels" in checks["kernels"]["says"]
    assert "twelve times as long" in checks["kernels"]["says"]
    assert "install a C compiler" in checks["kernels"]["fix"]
    assert "torch-4-rows-" in checks["model"]["says"]
    assert checks["bit-exact"]["status"] == "OK"
