"""`baton logs`: merges the lines of several processes into one stream."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from baton.cli.cluster.log_files import LogFile, LogLine, merged, parse_line
from baton.cli.commands.logs import format_line, is_selected, parse_since
from baton.messages.ids import AttemptKey
from baton.observe.logs import configure_logging, log_also, of_attempt

AT = "2026-11-22T02:11:51.839405Z"
LINE = {"timestamp": AT, "level": "info", "event": "another attempt", "node": "router-0", "request": "r", "attempt": 2}


pytestmark = pytest.mark.usefixtures("logging_as_it_was")


def test_lines_are_read_as_a_process_logged_them(tmp_path: Path) -> None:
    out = io.StringIO()
    configure_logging("info", environ={}, stream=out, node="router-0")
    log_also(incarnation="router-0.a")
    logging.getLogger("router").info("another attempt", extra={**of_attempt(AttemptKey("r", 2, 7)), "cause": "kv_lost"})
    line = parse_line(out.getvalue().strip(), "router-0", 0.0)
    assert (line.level, line.event, line.process) == ("info", "another attempt", "router-0")
    assert line.fields == {"request": "r", "attempt": 2, "cause": "kv_lost", "incarnation": "router-0.a"}
    assert json.loads(out.getvalue())["node"] == "router-0"


def test_lines_of_all_kinds() -> None:
    ours = parse_line(json.dumps(LINE), "router-0", 0.0)
    assert (ours.event, ours.fields) == ("another attempt", {"request": "r", "attempt": 2})
    assert ours.to_json()["timestamp"] == AT
    redis = parse_line("12086:M 22 Nov 2026 02:11:44.482 # WARNING Memory overcommit", "redis", 0.0)
    assert (redis.level, redis.event) == ("warning", "WARNING Memory overcommit")
    for text in ("  File x, line 3", '{"event": "cut o', '{"other": "json"}', "{}", "[]", ""):
        assert parse_line(text, "decode-0", 12.5) == LogLine(12.5, "decode-0", "", text)


def write(path: Path, *lines: tuple[int, str]) -> None:
    with path.open("a") as file:
        for second, event in lines:
            line = {"timestamp": f"2026-11-22T00:00:{second:02d}Z", "level": "info", "event": event}
            file.write(json.dumps(line) + "\n")


def test_files_are_merged_by_time_and_read_further(tmp_path: Path) -> None:
    one, other = tmp_path / "a-0.log", tmp_path / "b-0.log"
    write(one, (1, "first"), (4, "fourth"))
    one.open("a").write("its traceback\n")
    write(other, (2, "second"), (3, "third"))
    files = [LogFile(other), LogFile(one), LogFile(tmp_path / "gone-0.log")]
    assert [line.event for line in merged(files)] == ["first", "second", "third", "fourth", "its traceback"]
    assert merged(files) == []
    other.open("a").write('{"timestamp": "2026-11-22T00:00:09Z", "level": "info", ')
    assert merged(files) == []
    other.open("a").write('"event": "in two pieces"}\n')
    assert [line.event for line in merged(files)] == ["in two pieces"]
    one.write_text("")
    write(one, (5, "of another cluster"))
    assert [line.event for line in merged(files)] == ["of another cluster"]


def test_since() -> None:
    assert [parse_since(text, 1e6) for text in ("30s", "1h30m", "2d")] == [1e6 - 30, 1e6 - 5400, 1e6 - 172800]
    assert parse_since("1970-01-02T00:00:00+00:00", 0.0) == 86400.0
    for bad in ("", "yesterday", "10", "5x"):
        with pytest.raises(typer.BadParameter, match="since"):
            parse_since(bad, 0.0)


def test_which_lines_are_selected() -> None:
    line = parse_line(json.dumps(LINE), "router-0", 0.0)
    assert is_selected(line, None, "debug")
    assert is_selected(line, "r", "info")
    assert not is_selected(line, "other", "debug")
    assert not is_selected(line, None, "warning")
    assert is_selected(LogLine(0.0, "redis", "", "a banner"), None, "error")


def test_a_line_as_text() -> None:
    line = LogLine(
        0.0, "d-0", "error", "attempt failed", {"request": "r", "why": 'a "b"', "exception": "Traceback\n  x"}
    )
    assert format_line(line, 6, coloured=False) == (
        f'{" " * 12}  d-0     error    attempt failed  request=r why="a \\"b\\""\nTraceback\n  x'
    )
    assert "\x1b[31m" in format_line(line, 6, coloured=True)


def baton_logs(run_dir: Path, *words: str) -> subprocess.Popen[str]:
    command = (sys.executable, "-m", "baton.cli.main", "logs", "--run-dir", str(run_dir), *words)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ))


def test_the_command_follows_what_is_written(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    tmp_path.chmod(0o700)
    write(logs / "router-0.log", (1, "first"))
    write(logs / "prefill-0.log", (2, "second"))
    missing = baton_logs(tmp_path, "prefil-0")
    with baton_logs(tmp_path, "-f", "-n", "1", "-o", "json") as following:
        assert following.stdout is not None
        assert json.loads(following.stdout.readline())["event"] == "second"
        write(logs / "router-0.log", (3, "third"))
        assert json.loads(following.stdout.readline())["event"] == "third"
        write(logs / "decode-0.log", (4, "of a process that is new"))
        found = json.loads(following.stdout.readline())
        assert (found["process"], found["event"]) == ("decode-0", "of a process that is new")
        following.terminate()
    _, complaint = missing.communicate()
    assert (missing.returncode, complaint) == (3, "baton: there is no log of prefil-0 (did you mean prefill-0?)\n")
