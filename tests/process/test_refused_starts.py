"""A cluster that can not start says what is wrong and how to fix it in one line, and leaves no process."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.process.shell import Shell, refusal

USAGE, BAD_CONFIG = 2, 78


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield int(listener.getsockname()[1])


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port on which nobody listens or can listen."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])


def assert_nothing_started(shell: Shell, run_dir: Path) -> None:
    """Check that no process runs and no files but the lock and the logs exist."""
    shell.assert_nothing_left()
    if run_dir.exists():
        assert {path.name for path in run_dir.iterdir()} <= {"lock", "logs"}


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--model", "/nowhere"], BAD_CONFIG, "model directory /nowhere does not exist; name a directory with"),
        (["--dtype", "float16"], USAGE, "dtype 'float16' from --dtype: Input should be 'auto', 'float32' or"),
        (["--prefil", "2"], USAGE, "No such option: --prefil. Did you mean '--prefill'? See `baton up -h`"),
        (["extra"], USAGE, "unexpected extra argument(s) (extra): name a model with --model: see `baton up -h`"),
        (["--decode", "0"], USAGE, "decode '0' from --decode"),
        (["--threads", "many"], USAGE, "threads 'many' from --threads"),
        (["-o", "xml"], USAGE, "'xml' is not one of 'text', 'json', 'yaml'"),
        (["--run-dir", ""], USAGE, "--run-dir"),
        (["--host", "192.0.2.1", "--grpc-port", "50051", "--insecure"], BAD_CONFIG, "can't listen on 192.0.2.1:50051"),
        (
            ["--host", "0.0.0.0"],
            BAD_CONFIG,
            "other machines can reach 0.0.0.0: give --tls-cert, --tls-key and --tls-ca",
        ),
        (["--config", "missing.toml"], BAD_CONFIG, "configuration file missing.toml does not exist"),
        (["--registry", "localhost:6379"], BAD_CONFIG, "use redis:// or rediss:// or unix://"),
    ],
)
def test_an_invalid_command_line_is_refused(shell: Shell, words: list[str], code: int, said: str) -> None:
    assert said in refusal(shell.baton("up", "--grpc-port", 0, *words), code)
    assert_nothing_started(shell, shell.home / "baton")


def test_a_misspelt_key_in_the_environment_or_the_file_is_named(shell: Shell) -> None:
    done = shell.baton("up", environment={"BATON_GRPC_PROT": "0"})
    assert "unknown variable BATON_GRPC_PROT (did you mean BATON_GRPC_PORT?)" in refusal(done, BAD_CONFIG)
    (shell.home / "baton.toml").write_text("[up]\ngrpc_prot = 0\n")
    done = shell.baton("up")
    assert "baton.toml: unknown key 'grpc_prot' in [up] (did you mean grpc_port?)" in refusal(done, BAD_CONFIG)
    (shell.home / "baton.toml").write_text("[up\n")
    assert "baton.toml" in refusal(shell.baton("up"), BAD_CONFIG)
    assert_nothing_started(shell, shell.home / "baton")


@pytest.mark.parametrize(("flag", "other"), [("--grpc-port", "--http-port"), ("--http-port", "--grpc-port")])
def test_a_port_in_use_is_named_with_the_flag_for_another(
    shell: Shell, model: Path, taken_port: int, flag: str, other: str
) -> None:
    done = shell.baton("up", "--model", model, flag, taken_port, other, 0)
    said = f"port {taken_port} on 127.0.0.1 is in use: choose another with {flag}, 0 takes a free one"
    assert refusal(done, BAD_CONFIG) == said
    assert_nothing_started(shell, shell.home / "baton")


@pytest.mark.parametrize(
    "command",
    [
        ["up", "--grpc-port", "0"],
        ["router", "--grpc-port", "0"],
        ["node", "--role", "prefill"],
        ["node", "--role", "decode"],
    ],
    ids=" ".join,
)
def test_a_registry_that_does_not_answer_is_refused(
    shell: Shell, model: Path, closed_port: int, command: list[str]
) -> None:
    done = shell.baton(*command, "--model", model, "--registry", f"redis://:secret@127.0.0.1:{closed_port}")
    said = refusal(done, BAD_CONFIG)
    assert f"127.0.0.1:{closed_port} does not answer" in said
    assert said.endswith("with --registry")
    assert "secret" not in said
    assert_nothing_started(shell, shell.home / "baton")


def only_pickles(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")


def no_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()


def cut_short(model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def garbage(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"\x00\xff" * 5000)


def config_with(**changes: object) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | changes))

    return change


def no_config(model: Path) -> None:
    (model / "config.json").unlink()


def config_is_no_json(model: Path) -> None:
    (model / "config.json").write_text("{")


def no_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (only_pickles, "has only pickled weights (pytorch_model.bin), which could run code; convert them with"),
        (no_weights, "has no model.safetensors; copy the weights there"),
        (cut_short, "model.safetensors is truncated"),
        (garbage, "model.safetensors is not a sound safetensors file (bad header); copy it again"),
        (no_config, "has no config.json; is it a transformers model directory?"),
        (config_is_no_json, "config.json can't be read as JSON"),
        (
            config_with(architectures=["T5ForConditionalGeneration"], is_encoder_decoder=True),
            "holds T5ForConditionalGeneration, which is not supported: choose a decoder-only language model",
        ),
        (config_with(vocab_size=None), "config.json has no vocab_size"),
        (no_tokenizer, "tokenizer.json is missing; save the model's fast tokenizer beside its weights"),
    ],
)
def test_a_model_that_can_not_be_served_is_refused(
    shell: Shell, model: Path, tmp_path: Path, spoil: Callable[[Path], None], said: str
) -> None:
    spoilt = tmp_path / "spoilt"
    shutil.copytree(model, spoilt)
    spoil(spoilt)
    done = shell.baton("up", "--detach", "--model", spoilt, "--grpc-port", 0, "--run-dir", tmp_path / "run")
    assert said in refusal(done, BAD_CONFIG)
    assert_nothing_started(shell, tmp_path / "run")


@pytest.mark.parametrize(
    ("spoil", "kv_cache", "found"),
    [
        (None, "4KiB", "0 KV blocks of "),
        (config_with(hidden_size=128), "8MiB", "config.json asks for [256, 128]"),
    ],
)
def test_what_a_process_finds_out_at_its_start_is_refused(
    shell: Shell, model: Path, tmp_path: Path, spoil: Callable[[Path], None] | None, kv_cache: str, found: str
) -> None:
    """In the foreground: what had started is stopped before the command returns."""
    if spoil is not None:
        model = Path(shutil.copytree(model, tmp_path / "spoilt"))
        spoil(model)
    done = shell.baton(
        "up", "--model", model, "--grpc-port", 0, "--kv-cache-memory", kv_cache, "--run-dir", tmp_path / "run"
    )
    *progress, last = done.stderr.splitlines(keepends=True)
    assert {line.partition(" ")[0] for line in progress} == {"Starting", "Starting:"}
    done.stderr = last
    said = refusal(done, BAD_CONFIG)
    assert "did not start: " in said
    assert found in said
    assert (tmp_path / "run" / "logs").as_posix() in said
    assert_nothing_started(shell, tmp_path / "run")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["generate", "x"], 5, "no cluster is running in {home}/baton: start one with `baton up`, or name one with"),
        (["generate", "x", "--run-dir", "elsewhere"], 5, "no cluster is running in {home}/elsewhere"),
        (["generate", "x", "--address", "127.0.0.1:{port}"], 5, "127.0.0.1:{port} does not answer"),
        (["status"], 5, "no cluster is running in"),
        (["get", "nodes"], 5, "no cluster is running in"),
        (["get", "nodes", "--address", "127.0.0.1:{port}"], 5, "is this the router's operator address?"),
        (["generate"], 2, "give either a PROMPT or --token-ids"),
        (["generate", "x", "--max-token", "3"], 2, "--max-tokens"),
        (["generate", "x", "--temperature", "hot"], 2, "--temperature"),
        (["get", "nodez"], 2, "Did you mean 'nodes'?"),
        (["get", "nodes", "-l", "colour=red"], 2, "use name=, role=, status= or model="),
        (["statsu"], 2, "Did you mean 'status'"),
    ],
)
def test_clients_without_a_cluster_are_told_how_to_start_one(
    shell: Shell, closed_port: int, words: list[str], code: int, said: str
) -> None:
    names = {"home": shell.home, "port": closed_port}
    done = shell.baton(*(word.format(**names) for word in words))
    assert said.format(**names) in refusal(done, code)
    assert not list(shell.home.iterdir())
