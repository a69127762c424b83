"""The rules of deploy/monitoring, checked and tested by Prometheus' own tool."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "deploy/monitoring"


@pytest.fixture(scope="module")
def promtool() -> str:
    found = subprocess.run([ROOT / "scripts/promtool"], capture_output=True, text=True, check=False, timeout=110)
    if found.returncode:
        pytest.skip(f"no promtool: {found.stderr.strip().splitlines()[-1:]}")
    return found.stdout.strip()


@pytest.mark.timeout(150)  # It may have to be fetched.
def test_prometheus_reads_the_rules_and_alerts_as_specified(promtool: str, tmp_path: Path) -> None:
    def run_promtool(*words: str) -> tuple[int, str]:
        done = subprocess.run([promtool, *words], cwd=tmp_path, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    for name in ("rules.yml", "rules_test.yml"):
        shutil.copy(MONITORING / name, tmp_path)
    code, output = run_promtool("check", "rules", "--lint=all", "--lint-fatal", "rules.yml")
    assert code == 0, output
    assert "30 rules found" in output
    code, output = run_promtool("test", "rules", "rules_test.yml")
    assert code == 0, output
    rules = tmp_path / "rules.yml"
    rules.write_text(rules.read_text().replace("ratio5m > 0.01", "ratio5m > 0.1"))
    code, output = run_promtool("test", "rules", "rules_test.yml")
    assert code == 1
    assert "BatonRequestsFail" in output
