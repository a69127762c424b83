"""The command as a whole: exit codes, one line on stderr, clean output, and no large imports for help."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.cli import main as command
from baton.errors import ConfigError, Unreachable

pytestmark = pytest.mark.usefixtures("logging_as_it_was")


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in [name for name in os.environ if name.startswith("BATON_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("BATON_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def taken_port() -> Callable[[], int]:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    return lambda: int(listener.getsockname()[1])


EXITS = """
 0 | version |
 2 | generate | give either a PROMPT or --token-ids
 2 | generate x --token-ids 1 | give either a PROMPT or --token-ids
 2 | generate --token-ids 1,x | --token-ids
 2 | generate x --max-tokens many | --max-tokens
 5 | generate x | no cluster is running in
 5 | generate x --address 127.0.0.1:1 --timeout 10 | 127.0.0.1:1 does not answer
 5 | status | start one with `baton up`
 5 | status --address 127.0.0.1:1 | 127.0.0.1:1 does not answer
 5 | get nodes | no cluster is running in
 2 | get nodes -l colour=red | -l colour=red
 2 | get lease -l colour=red | -l colour=red
 2 | chat the capital | (capital): put the message between quotes: see `baton chat -h`
 5 | top | no cluster is running in
 5 | chat | or name one with --run-dir or --url
 2 | chat --url localhost:8000 | use http://HOST:PORT
 5 | get nodes --watch | no cluster is running in
 5 | get leases | no cluster is running in
 2 | get leases -l colour=red | -l colour=red
 5 | describe node decode-0 | no cluster is running in
 2 | describe node | NAME
 2 | generat | Did you mean 'generate'
 2 | serve | baton: No such command 'serve'. Did you mean `baton up`? See `baton -h`
 2 | get serve | No such command 'serve': `baton get` has nodes, requests, tenants, leases and plan: see `baton get -h`
 2 | generate x --temp 1 | No such option: --temp. Did you mean '--temperature'?
 2 | generate the capital | (capital): put the prompt between quotes: see `baton generate -h`
 2 | generate --grpc-port 1 | No such option: --grpc-port. It belongs to `baton up`: see
 2 | up --temp 1 | --temp. --temperature belongs to `baton generate` and `baton chat`: see `baton up -h`
 2 | up --port 1 | Did you mean '--grpc-port', '--http-port' or '--metrics-port'?
 2 | up --modle x | No such option: --modle. Did you mean '--model'?
 2 | --model x up | --model. It belongs to `baton up`, `baton generate` and `baton chat`: see `baton -h`
 0 | down |
 2 | up --prefil 1 | --prefill
 2 | up --decode 0 | decode '0' from --decode
 2 | up --decode-hosts 2 | `baton up` starts all processes on this machine: leave --prefill-hosts
78 | up --model /nowhere | model directory /nowhere does not exist
78 | up --registry localhost | use redis:// or rediss:// or unix://
78 | up --registry redis://127.0.0.1:1 | does not answer
78 | up --config missing.toml | missing.toml does not exist
 2 | node --role prefill | --registry is required
 2 | node --registry redis://x | --role is required
 2 | router | --registry is required
"""
"""Exit codes, command lines, and a part of what standard error says."""


@pytest.mark.parametrize(("code", "words", "message"), [line.split(" |") for line in EXITS.strip("\n").splitlines()])
def test_exit_codes_and_messages(
    code: str, words: str, message: str, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    free_ports = ("--grpc-port", "0", "--http-port", "0") if words.split()[0] == "up" else ()
    assert command.main([*words.split(), *free_ports]) == int(code)
    out, err = capfd.readouterr()
    assert message.strip() in err
    assert not err if int(code) == 0 else not out
    if int(code) not in (0, 2) and "Usage" not in err:
        assert err.startswith("baton: ")
        assert err.count("\n") == 1
    assert not list((tmp_path / "run").glob("*.json")), "something was started"


@pytest.mark.parametrize("name", sorted(command.command_tree().commands))
def test_a_wrong_flag_ends_every_subcommand_with_the_same_code(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert command.main([name, "--no-such-flag"]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("baton: No such option: --no-such-flag")


@pytest.mark.parametrize("group", ["", "get", "bench", "config", "certs", "keys"])
def test_help_cuts_no_summary(group: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert command.main([*group.split(), "-h"]) == 0
    out = capfd.readouterr().out
    listed = out.partition("Commands:\n")[2].splitlines()
    assert listed
    assert not [line for line in listed if line.endswith("...") or len(line) > 80]


def test_a_port_in_use_is_named(taken_port: Callable[[], int], capfd: pytest.CaptureFixture[str]) -> None:
    assert command.main(["up", "--grpc-port", str(taken_port())]) == 78
    assert f"port {taken_port()} on 127.0.0.1 is in use: choose another with --grpc-port" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("config", "weights", "complaint"),
    [
        (None, "model.safetensors", "has no config.json"),
        ({"architectures": ["LlamaForCausalLM"]}, "pytorch_model.bin", "pickled weights"),
        ({"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}, None, "not supported"),
        ({"architectures": ["BertModel"]}, None, "holds BertModel, which is not supported"),
    ],
)
def test_a_model_that_can_not_be_served_is_refused_before_a_process_starts(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    config: dict[str, object] | None,
    weights: str | None,
    complaint: str,
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    if config is not None:
        (model / "config.json").write_text(json.dumps(config))
    header = b"{}"
    (model / (weights or "model.safetensors")).write_bytes(len(header).to_bytes(8, "little") + header)
    assert command.main(["up", "--model", str(model), "--grpc-port", "0", "--http-port", "0"]) == 78
    assert complaint in capfd.readouterr().err


def test_an_error_has_no_control_characters(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def fail(_words: list[str], _command: str) -> int:
        raise ConfigError("a hub says \x1b]0;title\x07, \udcff and é\nin lines")

    monkeypatch.setattr(command, "_run", fail)
    assert command.main(["version"]) == 78
    assert capfd.readouterr().err == "baton: a hub says \\x1b]0;title\\x07, \\udcff and é in lines\n"


def test_version_as_json_is_json_and_nothing_else(capfd: pytest.CaptureFixture[str]) -> None:
    assert command.main(["version", "-o", "json"]) == 0
    out, err = capfd.readouterr()
    assert set(json.loads(out)) == {"version", "python", "platform"}
    assert err == ""


@pytest.mark.parametrize(
    ("error", "code"),
    [(ConfigError("a\nb"), 78), (Unreachable("a b"), 5), (KeyboardInterrupt(), 130), (BrokenPipeError(), 1)],
)
def test_errors_become_exit_codes(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(_words: list[str], _command: str) -> int:
        raise error

    monkeypatch.setattr(command, "_run", fail)
    stdout = os.dup(1)
    try:
        assert command.main(["version"]) == code
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
    assert capfd.readouterr().err == ("" if code in (130, 1) else "baton: a b\n")


@pytest.mark.parametrize("words", [["-V"], ["--version"], ["help"], ["help", "get", "nodes"]])
def test_what_other_commands_have_taught_is_understood(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert command.main(words) == 0
    assert capfd.readouterr().out.startswith(
        "baton 0" if "help" not in words else f"Usage: {' '.join(['baton', *words[1:]])}"
    )


def test_a_terminal_without_some_characters_shows_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with (tmp_path / "screen").open("w", encoding="latin-1") as screen:
        monkeypatch.setattr(sys, "stdout", screen)
        monkeypatch.setattr(command, "_run", lambda *_: screen.write("a █ b\n") and 0)
        command.main(["trace"])
    assert (tmp_path / "screen").read_text("latin-1") == "a ? b\n"


def test_a_closed_pipe_is_no_error_message(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    words = [sys.executable, "-m", "baton.cli.main", "version"]
    done = subprocess.run(words, stdout=write_end, stderr=subprocess.PIPE, cwd=tmp_path, check=False)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (1, b"")


LEAVES_A_CYCLE = """
import gc, sys
from baton.cli.main import main

class Left:
    def __del__(self):
        sys.stderr.write("collected")

gc.disable()
left = Left()
left.itself = left
del left
sys.argv[1:] = ["version"]
sys.exit(main(%s))
"""


@pytest.mark.parametrize(("argv", "said"), [("None", b""), ("sys.argv[1:]", b"collected")])
def test_only_a_process_that_ends_with_its_command_collects_no_garbage_at_the_end(argv: str, said: bytes) -> None:
    """With a model it would take seconds, during which no signal is handled."""
    done = subprocess.run([sys.executable, "-c", LEAVES_A_CYCLE % argv], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, said)


LARGE_PACKAGES = (
    "asyncio cryptography google.protobuf grpc nixl numpy opentelemetry redis rich ssl structlog torch transformers"
)


@pytest.mark.parametrize("do", ["main(['version'])", "command_tree()"], ids=["one", "all"])
def test_help_and_completion_import_no_large_package(do: str, tmp_path: Path) -> None:
    """Help and completion must be fast, so a command imports large packages only when it runs."""
    script = (
        "import sys; from baton.cli.main import command_tree, main; "
        f"{do}; sys.exit(' '.join(sorted(set('{LARGE_PACKAGES}'.split()) & set(sys.modules))) or None)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, cwd=tmp_path, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
