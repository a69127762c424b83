"""The files of `baton up --emit`, run by Slurm and as systemd would: a request is answered and no process is left."""

from __future__ import annotations

import configparser
import json
import os
import shlex
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from baton.client import GenerationClient, OperatorClient
from baton.messages.generation import Chunk, GenerateRequest
from baton.registry.embedded import READY_WORDS
from tests.process.shell import BOUND_S, Shell
from tests.process.test_by_hand import line_with
from tests.support.free_ports import first_free_port
from tests.support.slow_model import expected_tokens_of, slow_request
from tests.support.slurm_site import NoSlurm, SlurmSite, slurm_site

PROMPT = "def fibonacci(n):"
UP = ("up", "--runner", "simulated", "--insecure", "--grpc-port", "0", "--http-port", "0")


def emitted(shell: Shell, kind: str, *flags: object) -> list[Path]:
    done = shell.baton(*UP, *flags, "--emit", kind, "--emit-dir", "out")
    assert (done.returncode, done.stderr) == (0, "")
    return [shell.home / line for line in done.stdout.splitlines()]


@pytest.fixture
def site(shell: Shell, tmp_path: Path) -> Iterator[SlurmSite]:
    """Two nodes."""
    with ExitStack() as stack:
        try:
            opened = stack.enter_context(slurm_site(tmp_path / "site", 2, shell.environment))
        except NoSlurm as reason:
            pytest.skip(str(reason))
        yield opened


@pytest.mark.timeout(300)  # Slurm may have to be installed.
def test_a_node_on_two_hosts_of_a_job_starts_again_as_a_whole(shell: Shell, site: SlurmSite) -> None:
    """Its first host is killed: both hosts start again, and the tokens are the same. A cancelled job drains.

    The prefill node is on one host.
    """
    (script,) = emitted(shell, "slurm", "--runner", "torch", "--decode-hosts", "2", "--drain-s", "25")
    ready_file = shell.home / "ready"
    os.mkfifo(ready_file)
    ports = first_free_port(3)
    given = {
        "BATON_READY_FILE": str(ready_file),
        "BATON_REDIS_PORT": str(ports),
        "BATON_JOB_FIRST_PORT": str(ports + 1),
        "BATON_THREADS": "1",
    }
    # Three tasks: host 1 of the decode node is alone on the second node of the site.
    job = site.run("sbatch", "--parsable", "--nodes=2", script, **given).strip()
    log = site.place / f"baton-{job}.log"
    told = json.loads(site.first_line(ready_file, job))
    address, operators = told["address"], told["operator_address"]
    listed = json.loads(shell.baton("get", "nodes", "--address", operators, "-o", "json").stdout)["items"]
    names = {node["name"]: node["status"] for node in listed}
    assert names == dict.fromkeys(("router-0", "prefill-0", "decode-0"), "Ready")

    def answer() -> list[int]:
        ask = ("generate", PROMPT, "--temperature", 0, "-o", "json", "--address", address)
        answered = json.loads(shell.baton(*ask).stdout)
        assert answered["path"]["prefill_node"] == "prefill-0"
        assert answered["kv_bytes"] > 0
        tokens: list[int] = answered["token_ids"]
        return tokens

    (first,) = (node["incarnation"] for node in listed if node["role"] == "decode")
    tokens = answer()
    assert (bool(first), len(tokens)) == (True, 16)
    (first_host,) = (pid for pid, command in shell.remaining_processes().items() if "--host-rank 0 " in command)
    with closing(OperatorClient(operators)) as operator:
        os.kill(first_host, signal.SIGKILL)
        ready = (event for event in operator.events(follow=True) if event.reason == "NodeReady")
        next(event for event in ready if event.subject == "decode-0" and event.incarnation != first)
    # A stream that is cancelled at its first token: the second host computes until the first one has drained.
    request = GenerateRequest(PROMPT, request_id="long", temperature=0.0, max_tokens=400, ignore_eos=True)
    streamed: list[int] = []
    with GenerationClient(address) as client:
        for event in client.generate(request):
            if isinstance(event, Chunk):
                if not streamed:
                    site.run("scancel", job)
                streamed += event.token_ids
    assert (streamed[: len(tokens)], len(streamed)) == (tokens, request.max_tokens)
    site.wait_for_end(job)
    said = log.read_text()
    assert "Traceback" not in said
    assert said.count("are loaded, and computed for") == 2
    assert "this stage ends with its node" in said
    assert not ready_file.exists()


@pytest.mark.skipif("BATON_RUN_UNITS" not in os.environ, reason="takes a while; BATON_RUN_UNITS=1 runs it")
def test_the_commands_of_the_systemd_units_start_a_cluster(shell: Shell) -> None:
    """Their lines are run with what they say beside them, and told to stop as they say; systemd itself is not here."""
    target, *units = (parsed(path.read_text()) for path in emitted(shell, "systemd", "--prefill", "0"))
    assert len(target["Unit"]["Wants"].split()) == len(units) == 3
    runtime = shell.home / "run"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd, ExitStack() as stack:
        systemd.bind(str(shell.home / "notify"))
        started = []
        for unit in units:
            service = unit["Service"]
            if "RuntimeDirectory" in service:
                (runtime / service["RuntimeDirectory"]).mkdir(mode=0o700, parents=True)
            words = [word.replace("%t", str(runtime)) for word in shlex.split(service["ExecStart"])]
            given = dict(word.split("=", 1) for word in shlex.split(service.get("Environment", "")))
            environment = {**shell.environment, **given, "NOTIFY_SOCKET": str(shell.home / "notify")}
            started.append(stack.enter_context(running(words, environment, shell.home)))
            if service["Type"] == "exec":
                line_with(READY_WORDS, started[-1].stdout)
        assert [systemd.recv(100) for unit in units if unit["Service"]["Type"] == "notify"] == [b"READY=1"] * 2
        redis, node, router = started
        address = json.loads(line_with(b"grpc on", router.stderr))["event"].split("gRPC on ")[1].split(",")[0]
        request = slow_request("short")
        with GenerationClient(address) as client:
            chunks = [event for event in client.generate(request) if isinstance(event, Chunk)]
        assert [token for chunk in chunks for token in chunk.token_ids] == expected_tokens_of(request)
        for process in (node, router, redis):
            process.send_signal(signal.Signals[units[1]["Service"]["KillSignal"]])
            assert process.wait(BOUND_S) == 0


@contextmanager
def running(words: list[str], environment: Mapping[str, str], place: Path) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(words, env=environment, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def parsed(text: str) -> configparser.RawConfigParser:
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string(text)
    return unit
