"""Every block of README.md and docs/grpc.md does what it says: all are run one after another on one cluster."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass

import pytest

from baton.cli.cluster.run_dir import RunDir, default_run_dir
from tests.process.shell import ROOT, Shell
from tests.process.test_foreground import assert_grpcurl_works

PAGES = ("README.md", "docs/grpc.md")
ELSEWHERE = {
    "./scripts/demo --model smollm2": "it fetches a model; test_gguf_model.py runs it with a tiny one",
    ".venv/bin/baton up --model smollm2": "tests/oracle/test_smollm2.py asks this model",
    ".venv/bin/baton chat --temperature 0": "test_gguf_model.py chats with a tiny model",
    "./scripts/test": "this is one of its tests",
    "pip install 'torch<2.14' --index-url https://download.pytorch.org/whl/cpu": "tests use no network",
    "pip install dist/baton_serve-*.whl": "test_wheel.py installs it",
    "baton demo": "test_wheel.py runs it",
}
"""Commands that are not run here, and why."""
DIFFER = {"generate", "trace"}
"""Subcommands whose output differs with the processor, or from run to run: they only have to print something."""
PICTURE = re.compile(r"[─│►◄┌┐└┘]")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Command:
    """A line behind a prompt, and what README prints below it."""

    line: str
    output: str


def blocks() -> list[tuple[str, str]]:
    """Language and text of each."""
    return [block for page in PAGES for block in FENCE.findall((ROOT / page).read_text())]


def commands(block: str) -> list[Command]:
    """What is typed in a block of a terminal."""
    found = [part.partition("\n") for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]]
    return [Command(line, output) for line, _, output in found]


def pattern(output: str) -> re.Pattern[str]:
    """Matches what differs from run to run, too: numbers, spaces of a table, and what stands in brackets."""
    words = re.split(r"(\[[^\]]*\]|\d+|\s+)", output.strip())
    said = [
        ".*" if w[0] == "[" else r"\d+" if w.isdigit() else r"\s+" if w.isspace() else re.escape(w) for w in words if w
    ]
    return re.compile("".join(said), re.DOTALL)


@pytest.mark.timeout(300)
def test_every_block_does_what_it_says(shell: Shell) -> None:
    (shell.home / ".venv").symlink_to(sys.prefix)
    todo = blocks()
    typed = [command for language, text in todo if language == "console" for command in commands(text)]
    assert {command.line for command in typed} >= set(ELSEWHERE), "a reason for a command that is gone"
    ours = [command for command in typed if command.line not in ELSEWHERE]
    last = [command for command in ours if command.line.endswith("baton down")]
    assert last, "README stops what it starts"
    for command in [each for each in ours if each not in last]:
        run(shell, command)
    state = RunDir(default_run_dir(shell.environment)).read_state()
    assert state is not None
    for language, text in todo:
        here = re.sub(r"localhost:5005\d", state.grpc_address, text).replace("localhost:8000", state.http_address)
        if language == "python":
            done = shell.run([sys.executable, "-c", here])
            assert (done.returncode, done.stderr) == (0, ""), here
            assert done.stdout.strip(), here
        elif not language and "grpcurl" in here:
            assert_grpcurl_works(here.replace("\\\n", " "), state.grpc_address)
        else:
            assert language == "console" or PICTURE.search(text), f"nobody runs this block:\n{text}"
    for command in last:
        run(shell, command)


def run(shell: Shell, command: Command) -> None:
    """As typed; what it prints is as README has it, except for the commands of `DIFFER`."""
    environment = {"BATON_GRPC_PORT": "0", "BATON_HTTP_PORT": "0", "BATON_THREADS": "1"}
    done = shell.run(["bash", "-c", command.line], environment)
    assert (done.returncode, done.stderr) == (0, ""), command
    if set(shlex.split(command.line)[1:2]) & DIFFER:
        assert done.stdout.strip()
    else:
        assert pattern(command.output).fullmatch(done.stdout.strip()), (command, done.stdout)
