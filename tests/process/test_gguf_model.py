"""A GGUF file as a user serves it: `baton up`, `baton chat`, and the demo."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.process.shell import BOUND_S, ROOT, Shell, refusal
from tests.support.gguf_models import random_module, write_module


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    module = random_module("llama", max_position_embeddings=8192)
    return write_module(tmp_path_factory.mktemp("gguf") / "tiny.gguf", module, "Q8_0")


def test_a_gguf_file_is_served_and_chats(shell: Shell, tmp_path: Path, gguf_file: Path) -> None:
    shell.environment["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    words = ("up", "--model", gguf_file, "--grpc-port", 0, "--kv-cache-memory", "16MiB")
    with shell.start(*words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as up, ExitStack() as stack:
        stack.callback(up.kill)
        assert up.stdout is not None
        assert up.stderr is not None
        shown = b""
        while b"stops it" not in shown:
            line = up.stdout.readline()
            assert line, up.stderr.read().decode()
            shown += line
        asked = [shell.baton("chat", "--max-tokens", 8, "--temperature", 0, input="the answer\n") for _ in range(2)]
        assert shell.baton("down").returncode == 0
        assert up.wait(BOUND_S) == 0
        assert b"Converting tiny.gguf" in up.stderr.read()
    assert b"\ntiny is served on " in shown
    assert b"baton chat\n" in shown
    assert b"/v1/chat/completions" in shown
    assert asked[0].returncode == 0, asked[0].stderr
    assert asked[0].stdout == asked[1].stdout


def test_the_demo_asks_a_chat_model_questions(shell: Shell, tmp_path: Path, gguf_file: Path) -> None:
    shell.environment["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    command = [sys.executable, "-m", "baton.cli.main", "demo", "--model", str(gguf_file)]
    done = shell.run(command, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "What is the capital of France?\n" in done.stdout
    lines = done.stdout.splitlines()
    table = next(number for number, line in enumerate(lines) if line.startswith("PROMPT"))
    assert all("  prefill-0  " in line and "  decode-0  " in line for line in lines[table + 1 : table + 5])
    assert lines[-1] == "All processes are stopped."


def test_a_file_that_is_none_is_refused_before_anything_starts(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(100))
    done = shell.baton("up", "--model", tmp_path / "bad.gguf", environment={"XDG_CACHE_HOME": str(tmp_path)})
    assert refusal(done, 78).startswith(f"{tmp_path / 'bad.gguf'} is not a sound GGUF file: version 0")
