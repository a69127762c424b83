"""Ctrl-C at a terminal: the last line says what became of the work, and the exit code is 130."""

from __future__ import annotations

from pathlib import Path

from tests.process.shell import Shell
from tests.process.terminal import Terminal
from tests.support.gguf_models import random_module, write_module


def last_line(terminal: Terminal) -> str:
    return terminal.screen.splitlines()[-1]


def test_up_while_it_prepares_a_model(shell: Shell, tmp_path: Path) -> None:
    shell.environment["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    file = write_module(tmp_path / "tiny.gguf", random_module("llama", num_hidden_layers=1), "Q8_0")
    with Terminal(shell, "up", "--model", file, "--grpc-port", 0, "--run-dir", tmp_path / "run") as terminal:
        shell.wait_for_process("convert_gguf")
        terminal.ctrl_c()
        assert terminal.end() == 130
        assert last_line(terminal) == "baton: interrupted: the cluster is not started, and no process of it is left"
    shell.assert_nothing_left()


def test_a_benchmark_in_the_middle(shell: Shell) -> None:
    with Terminal(shell, "bench", "router", "--streams", 10, "--nodes", 2, "--rounds", 500) as terminal:
        terminal.wait_for_text("measuring with 10 streams")
        terminal.ctrl_c()
        assert terminal.end() == 130
        assert last_line(terminal) == "baton: interrupted: the measurement is not complete, and no file was written"
    assert not shell.remaining_processes()


def test_a_chat_ends_with_the_second_one_in_a_row(shell: Shell) -> None:
    with Terminal(shell, "chat", "--url", "http://127.0.0.1:1") as terminal:
        terminal.wait_for_text("> ")
        terminal.paste("three\nlines of\none message")
        refused = "does not answer"
        terminal.wait_for_text(refused)
        terminal.wait_for_text("\n> ")
        terminal.wait_until_idle()
        assert terminal.screen.count(refused) == 1
        terminal.ctrl_c()
        terminal.wait_for_text("Ctrl-C again, Ctrl-D or /exit ends the chat\n> ")
        terminal.wait_until_idle()
        terminal.ctrl_c()
        assert terminal.end() == 130
        assert last_line(terminal) == "baton: interrupted: the chat is over, and nothing of it is kept"
