"""The tests that need a GPU, and those of Triton's kernels, which are compiled here instead of interpreted."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from xml.etree import ElementTree

from gpu.machine import ROOT
from gpu.stage import StageContext

SECONDS = 120

MARKS = re.compile(r"\bmark\.(gpu|triton)\b")
SMALL = ("tests/unit/runner/test_shared_splits.py",)
"""What is run without a GPU, to see that this stage works: tests of a second."""
LAST_S = 10.0
"""Seconds before the deadline at which pytest is interrupted, so that it writes which tests were done."""
SLOWEST = 10


def run(context: StageContext) -> None:
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory, "report.xml")
        started = time.monotonic()
        status = _pytest(context, report)
        context.check("pytest ends by itself", status is not None, seconds=time.monotonic() - started)
        if not context.check("pytest writes its report", report.exists(), status=status):
            return
        cases = list(ElementTree.parse(report).iter("testcase"))  # noqa: S314  (pytest wrote it)
    failed = [_name(case) for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [_name(case) for case in cases if case.find("skipped") is not None]
    passed = len(cases) - len(failed) - len(skipped)
    context.check("tests", status == 0 and passed > 0, passed=passed, failed=failed, skipped=len(skipped))
    slowest = sorted(cases, key=_seconds, reverse=True)[:SLOWEST]
    context.report("slowest tests", seconds={_name(case): _seconds(case) for case in slowest})


def _pytest(context: StageContext, report: Path) -> int | None:
    """Run pytest; its exit status, or None if it had to be interrupted."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    command += SMALL if context.tiny else ["-m", "gpu or triton", "-n", "6", *_files()]
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        return process.wait(max(context.seconds_left - LAST_S, 1.0))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(LAST_S / 2)
        return None
    finally:
        process.kill()
        process.wait()


def _files() -> list[str]:
    """The files with such tests: others import packages that a GPU machine need not have."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(file.relative_to(ROOT)) for file in files if MARKS.search(file.read_text(encoding="utf-8"))]


def _name(case: ElementTree.Element) -> str:
    return f"{case.get('classname')}.{case.get('name')}"


def _seconds(case: ElementTree.Element) -> float:
    return float(case.get("time", "0"))
