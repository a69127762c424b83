"""Completion scripts, tested in the shells themselves."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from baton.cli.commands.completion import completions_of
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
