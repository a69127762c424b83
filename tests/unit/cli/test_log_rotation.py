"""Logs stay bounded while processes write to them, and readers miss no line."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from baton.cli.cluster.log_files import LogFile, LogRotation, older_parts
from baton.cli.cluster.run_dir import RunDir

MAX_BYTES = 1000
NUM_KEPT = 3


class Process:
    """Writes lines to a log through an open descriptor, as a child of the supervisor does."""

    def __init__(self, log: Path) -> None:
        self._descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self.num_written = 0

    def write(self, count: int) -> None:
        for _ in range(count):
            line = {"timestamp": "2026-11-22T00:00:00Z", "level": "info", "event": str(self.num_written)}
            os.write(self._descriptor, json.dumps(line).encode() + b"\n")
            self.num_written += 1

    def close(self) -> None:
        os.close(self._descriptor)


@contextmanager
def process(log: Path) -> Iterator[Process]:
    made = Process(log)
    yield made
    made.close()


def events(log: LogFile) -> list[int]:
    return [int(line.event) for line in log.read()]


def test_logs_are_bounded_and_keep_the_latest_lines(tmp_path: Path) -> None:
    rotation, log = LogRotation(tmp_path, MAX_BYTES, NUM_KEPT), tmp_path / "decode-0.log"
    with process(log) as one:
        for _ in range(100):
            one.write(5)
            rotation.rotate_large_logs()
        assert [path.name for path in older_parts(log)] == [f"decode-0.log.{n}" for n in range(1, NUM_KEPT + 1)]
        sizes = [path.stat().st_size for path in tmp_path.iterdir()]
        assert len(sizes) == NUM_KEPT + 1
        assert max(sizes) < 2 * MAX_BYTES
        assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}
        kept = events(LogFile(log))
        assert kept == list(range(kept[0], one.num_written))
        assert len(kept) > 40


def test_a_log_can_be_followed_across_rotations_without_missing_a_line(tmp_path: Path) -> None:
    rotation, log = LogRotation(tmp_path, MAX_BYTES, NUM_KEPT), tmp_path / "decode-0.log"
    found: list[int] = []
    follower = LogFile(log)
    with process(log) as one:
        for number in range(200):
            one.write(1 + number % 7)
            if number % 3 == 0:
                rotation.rotate_large_logs()
            # Reads happen within a part, right after a rotation, and after up to two rotations.
            if number % 5 == 0 or number % 7 == 0:
                found += events(follower)
        found += events(follower)
        assert found == list(range(one.num_written))
        assert events(follower) == []


def test_a_log_that_can_not_be_copied_is_truncated(tmp_path: Path) -> None:
    log = tmp_path / "decode-0.log"
    # A directory with this name makes the copy fail, as on a full disk.
    (tmp_path / "decode-0.log.new").mkdir()
    with process(log) as one:
        one.write(100)
        LogRotation(tmp_path, MAX_BYTES).rotate_large_logs()
        one.write(1)
        assert events(LogFile(log)) == [100]


def test_the_next_cluster_removes_the_rotated_logs(tmp_path: Path) -> None:
    place = RunDir(tmp_path / "run")
    place.create()
    for name in ("decode-0.log", "decode-0.log.1", "router-1.log.12", "redis.log.new", "mine.log.1", "notes"):
        (place.logs / name).touch()
    place.clear_logs()
    assert sorted(path.name for path in place.logs.iterdir()) == ["mine.log.1", "notes"]


def test_a_process_goes_on_when_its_log_is_on_a_full_disk() -> None:
    lines = """
import logging
from baton.observe.logs import configure_logging
configure_logging("info", environ={}, node="decode-0")
for place in range(1000):
    logging.getLogger("baton").error("line %d", place)
print("alive")
"""
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", lines], stdout=subprocess.PIPE, stderr=full, check=False)
    assert done.stdout == b"alive\n"
    # 120: Python could not flush its buffer at its end.
    assert done.returncode in (0, 120)
