"""What a fork server starts is a child of its owner, has what its command says, and needs the fork server no more."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.processes.fork_server import ForkServer
from tests.support.forked_witness import OTHER_VARIABLE, VARIABLE

WITNESS = [sys.executable, "-m", "tests.support.forked_witness"]
BOUND_S = 60.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ForkServer]:
    # Output is kept until the end, whatever the environment of the tests says.
    variables = {"PYTHONPATH": str(Path(__file__).parents[3]), "PYTHONUNBUFFERED": ""}
    opened = ForkServer.start("tests.support.forked_witness", variables, 200, tmp_path / "log")
    opened.wait_until_loaded()
    assert opened.is_usable, (tmp_path / "log").read_text()
    yield opened
    opened.close()


def run(server: ForkServer, *words: str, number: int = 17, **settings: Any) -> tuple[int, list[dict[str, Any]]]:
    """The exit code of a witness, and what it and those that it started told on the descriptor `number`."""
    read_end, write_end = os.pipe()
    forked = server.fork([*WITNESS, str(number), *words], {number: write_end}, {VARIABLE: "told"}, **settings)
    os.close(write_end)
    assert forked is not None
    with open(read_end) as told:
        found = [json.loads(line) for line in told]
    code = forked.wait(BOUND_S)
    assert found[0]["pid"] == forked.pid
    assert (forked.poll(), forked.wait()) == (code, code)
    return code, found


def test_a_forked_process_is_a_child_of_the_owner_and_what_its_command_says(
    server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(OTHER_VARIABLE, "set since the fork server was started")
    for number in (3, 17):
        code, (told,) = run(server, "5", number=number)
        assert code == 5
        assert told["parent"] == os.getpid()
        assert told["environment"] == ["told", "set since the fork server was started"]
        assert told["directory"] == str(tmp_path)
        assert told["command"] == [*WITNESS, str(number), "5"]
        assert not told["has_fork_server"]


def test_a_forked_process_may_have_a_fork_server_of_its_own(server: ForkServer) -> None:
    for number in range(3, 12):
        code, (first, second) = run(server, "7", "its child", number=number, has_fork_server=True)
        assert (code, first["has_fork_server"]) == (7, True)
        assert (second["parent"], second["has_fork_server"]) == (first["pid"], False)


def test_a_wait_ends_and_a_signal_is_an_exit_code(server: ForkServer) -> None:
    read_end, write_end = os.pipe()
    # The witness waits for a reader, since the pipe is full.
    os.set_blocking(write_end, False)
    while True:
        try:
            os.write(write_end, b"\n" * 4096)
        except BlockingIOError:
            break
    os.set_blocking(write_end, True)
    forked = server.fork([*WITNESS, "9", "0"], {9: write_end}, {})
    assert forked is not None
    with pytest.raises(subprocess.TimeoutExpired):
        forked.wait(0.0)
    assert forked.poll() is None
    forked.kill()
    assert forked.wait(BOUND_S) == -signal.SIGKILL
    forked.kill()
    for end in (read_end, write_end):
        os.close(end)


def test_a_forked_process_ends_after_its_threads_exit_functions_and_output(server: ForkServer, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.forked_ending", "7"]
    read_end, write_end = os.pipe()
    os.close(read_end)
    with (tmp_path / "output").open("wb") as output, (tmp_path / "errors").open("wb") as errors:
        for standard_output in (output.fileno(), write_end):
            forked = server.fork(command, {1: standard_output, 2: errors.fileno()}, {})
            assert forked is not None
            assert forked.wait(BOUND_S) == 7
    os.close(write_end)
    assert (tmp_path / "output").read_text() == "main, thread, exit function, "
    # Objects are not freed. Who reads no output any more gets the rest and the code.
    assert (tmp_path / "errors").read_text() == "error " * 2


def test_a_fork_server_that_is_gone_starts_nothing(server: ForkServer) -> None:
    os.kill(server.pid, signal.SIGKILL)
    assert server.fork([*WITNESS, "1", "0"], {}, {}) is None
    assert not server.is_usable
    server.close()


def test_a_child_of_the_owner_does_not_use_its_fork_server(server: ForkServer) -> None:
    child = os.fork()
    if child == 0:
        os._exit(0 if server.fork([*WITNESS, "1", "0"], {}, {}) is None else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert run(server, "0")[0] == 0


def test_nothing_is_forked_into_a_directory_that_was_removed(
    server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "removed").mkdir()
    monkeypatch.chdir(tmp_path / "removed")
    (tmp_path / "removed").rmdir()
    assert server.fork([*WITNESS, "1", "0"], {}, {}) is None
    monkeypatch.chdir(tmp_path)
    assert run(server, "0")[0] == 0
