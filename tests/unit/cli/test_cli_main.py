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


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["version"], 0, ""),
        (["generate"], 2, "give either a PROMPT or --token-ids"),
        (["generate", "x", "--token-ids", "1"], 2, "give either a PROMPT or --token-ids"),
        (["generate", "--token-ids", "1,x"], 2, "--token-ids"),
        (["generate", "x", "--max-tokens", "many"], 2, "--max-tokens"),
        (["generate", "x"], 5, "no cluster is running in"),
        (["generate", "x", "--address", "127.0.0.1:1", "--timeout", "10"], 5, "127.0.0.1:1 does not answer"),
        (["status"], 5, "start one with `baton up`"),
        (["status", "--address", "127.0.0.1:1"], 5, "127.0.0.1:1 does not answer"),
        (["get", "nodes"], 5, "no cluster is running in"),
        (["get", "nodes", "-l", "colour=red"], 2, "-l colour=red"),
        (["get", "lease", "-l", "colour=red"], 2, "-l colour=red"),
        (["chat", "the", "capital"], 2, "(capital): put the message between quotes: see `baton chat -h`"),
        (["top"], 5, "no cluster is running in"),
        (["chat"], 5, "or name one with --run-dir or --url"),
        (["chat", "--url", "localhost:8000"], 2, "use http://HOST:PORT"),
        (["get", "nodes", "--watch"], 5, "no cluster is running in"),
        (["get", "leases"], 5, "no cluster is running in"),
        (["get", "leases", "-l", "colour=red"], 2, "-l colour=red"),
        (["describe", "node", "decode-0"], 5, "no cluster is running in"),
        (["describe", "node"], 2, "NAME"),
        (["generat"], 2, "Did you mean 'generate'"),
        (["serve"], 2, "baton: No such command 'serve'. Did you mean `baton up`? See `baton -h`"),
        (
            ["get", "serve"],
            2,
            "No such command 'serve': `baton get` has nodes, requests and leases: see `baton get -h`",
        ),
        (["generate", "x", "--temp", "1"], 2, "No such option: --temp. Did you mean '--temperature'?"),
        (["generate", "the", "capital"], 2, "(capital): put the prompt between quotes: see `baton generate -h`"),
        (["generate", "--grpc-port", "1"], 2, "No such option: --grpc-port. It belongs to `baton up`: see"),
        (
            ["up", "--temp", "1"],
            2,
            "--temp. --temperature belongs to `baton generate` and `baton chat`: see `baton up -h`",
        ),
        (["up", "--port", "1"], 2, "Did you mean '--grpc-port', '--http-port' or '--metrics-port'?"),
        (["up", "--modle", "x"], 2, "No such option: --modle. Did you mean '--model'?"),
        (
            ["--model", "x", "up"],
            2,
            "--model. It belongs to `baton up`, `baton generate` and `baton chat`: see `baton -h`",
        ),
        (["down"], 0, ""),
        (["up", "--prefil", "1"], 2, "--prefill"),
        (["up", "--decode", "0"], 2, "decode '0' from --decode"),
        (["up", "--decode-hosts", "2"], 2, "`baton up` starts all processes on this machine: leave --prefill-hosts"),
        (["up", "--model", "/nowhere"], 78, "model directory /nowhere does not exist"),
        (["up", "--registry", "localhost"], 78, "use redis:// or rediss:// or unix://"),
        (["up", "--registry", "redis://127.0.0.1:1"], 78, "does not answer"),
        (["up", "--config", "missing.toml"], 78, "missing.toml does not exist"),
        (["node", "--role", "prefill"], 2, "--registry is required"),
        (["node", "--registry", "redis://x"], 2, "--role is required"),
        (["router"], 2, "--registry is required"),
    ],
)
def test_exit_codes_and_messages(
    words: list[str], code: int, message: str, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    if words[0] == "up":
        words = [*words, "--grpc-port", "0", "--http-port", "0"]
    assert command.main(words) == code
    out, err = capfd.readouterr()
    assert message in err
    assert not err if code == 0 else not out
    if code not in (0, 2) and "Usage" not in err:
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
