"""Completion scripts, tested in the shells themselves."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from baton.cli.commands.completion import NAMES, completions_of
from baton.cli.main import command_tree, main


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from contextlib import redirect_stdout

    path = tmp_path_factory.mktemp("completion") / "baton.bash"
    with path.open("w") as file, redirect_stdout(file):
        assert main(["completion", "bash"]) == 0
    return path


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["get", "re"], {"requests"}),
        (["get", "nodes", "--output", ""], {"table", "wide", "json", "yaml", "name"}),
        (["get", "requests", "--so"], {"--sort-by"}),
        (["up", "--runner", ""], {"torch", "simulated"}),
        (["config", "view", "r"], {"router"}),
        (["dra"], {"drain"}),
        (["completion", "b"], {"bash"}),
    ],
)
def test_bash_offers_completions(script: Path, typed: Sequence[str], offered: set[str]) -> None:
    words = " ".join(repr(word) for word in ["baton", *typed])
    asked = f"source {script}; COMP_WORDS=({words}); COMP_CWORD={len(typed)}; _baton; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=True)
    assert (set(done.stdout.split()), done.stderr) == (offered, "")


FAKE_BATON = """#!/bin/sh
echo "$*" >>"$0.log"
echo "baton: the cluster is not well" >&2
case "$*" in
    "get nodes --no-headers"*) printf 'decode-0 decode Ready\\ndecode-1 decode Ready\\nrouter-0 router Ready\\n' ;;
    "get nodes -o name"*) printf 'decode-0\\nrouter-0\\n' ;;
    "get requests"*) printf 'acme/r:1\\nreq-$(exit)\\n' ;;
    "lora list"*) printf 'poet\\n' ;;
esac
exit 5
"""


@pytest.mark.parametrize(
    ("typed", "offered", "asked"),
    [
        ("cordon d", {"decode-0", "decode-1"}, "get nodes --no-headers --timeout 1"),
        ("uncordon r", set(), "get nodes --no-headers --timeout 1"),
        ("cordon --run-dir /x y", set(), "get nodes --no-headers --timeout 1 --run-dir /x"),
        ("set-role --address=h:1 decode-0 p", {"prefill"}, "get nodes --no-headers --timeout 1 --address h:1"),
        ("describe node r", {"router-0"}, "get nodes -o name --timeout 1"),
        ("describe request r", {"req-$(exit)"}, "get requests -o name --timeout 1"),
        ("trace a", {"acme/r:1"}, "get requests -o name --timeout 1"),
        ("chat --model p", {"poet"}, "lora list -o name --timeout 1"),
        ("lora unload p", {"poet"}, "lora list -o name --timeout 1"),
        ("drain --sto", {"--stop"}, ""),
    ],
)
def test_bash_offers_the_names_that_the_cluster_has(
    script: Path, tmp_path: Path, typed: str, offered: set[str], asked: str
) -> None:
    program = tmp_path / "baton"
    program.write_text(FAKE_BATON)
    program.chmod(0o755)
    words = typed.split()
    line = f"COMP_WORDS=({program} {' '.join(words)}); COMP_CWORD={len(words)}; COMP_LINE='baton {typed}'"
    completed = f'source {script}; {line}; _baton; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", completed], capture_output=True, text=True, check=True)
    assert (set(done.stdout.split()), done.stderr) == (offered, "")
    log = tmp_path / "baton.log"
    assert (log.read_text() if log.exists() else "") == (f"{asked}\n" if asked else "")


def test_names_are_completed_for_commands_and_options_that_there_are() -> None:
    tree = dict(completions_of(command_tree()))
    for place in NAMES:
        path, _, flag = place.partition(" --")
        assert path in tree
        assert not flag or f"--{flag}" in tree[path].options


def test_every_command_is_completed_with_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    tree = dict(completions_of(command_tree()))
    assert {"get nodes", "describe request", "bench serve", "certs init", "config view"} <= tree.keys()
    assert all(text for words in tree.values() for text in words.commands.values())
    assert main(["completion", "fish"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "complete -c baton -f"
    assert any("-a drain -d" in line for line in lines)


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_zsh_and_fish_can_read_their_scripts(shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    assert main(["completion", shell]) == 0
    path = tmp_path / "script"
    path.write_text(capsys.readouterr().out)
    assert subprocess.run([shell, "-n", path], check=False).returncode == 0
