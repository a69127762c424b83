"""Faults at named places: requested by files, triggered once, by the intended request."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.failpoints import configure_failpoints, failpoint


@pytest.fixture
def failpoints_dir(tmp_path: Path) -> Iterator[Path]:
    configure_failpoints(tmp_path)
    yield tmp_path
    configure_failpoints(None)


def test_a_fault_strikes_once_and_leaves_a_proof(failpoints_dir: Path) -> None:
    failpoint("Offer", "r")
    assert list(failpoints_dir.iterdir()) == []
    (failpoints_dir / "Offer").write_text("sleep 0")
    failpoint("Subscribe", "r")
    assert (failpoints_dir / "Offer").exists()
    failpoint("Offer", "r")
    assert [path.name for path in failpoints_dir.iterdir()] == ["Offer.struck"]
    assert (failpoints_dir / "Offer.struck").read_text() == str(os.getpid())
    (failpoints_dir / "Offer.struck").unlink()
    failpoint("Offer", "r")
    assert list(failpoints_dir.iterdir()) == []


def test_a_fault_for_one_request_does_not_strike_another(failpoints_dir: Path) -> None:
    (failpoints_dir / "Offer").write_text("sleep 0 meant")
    failpoint("Offer", "another")
    failpoint("Offer")
    assert not (failpoints_dir / "Offer.struck").exists()
    failpoint("Offer", "meant")
    assert (failpoints_dir / "Offer.struck").exists()


def test_failpoints_are_not_checked_unless_enabled(failpoints_dir: Path) -> None:
    (failpoints_dir / "Offer").write_text("kill")
    configure_failpoints(None)
    failpoint("Offer", "r")
    assert (failpoints_dir / "Offer").exists()


def test_the_action_kill_kills_the_process(tmp_path: Path) -> None:
    (tmp_path / "Offer").write_text("kill r")
    code = (
        "import sys, pathlib; from baton.failpoints import *; "
        "configure_failpoints(pathlib.Path(sys.argv[1])); failpoint('Offer', 'r')"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, timeout=60)
    assert ended.returncode == -signal.SIGKILL
    assert (tmp_path / "Offer.struck").exists()
