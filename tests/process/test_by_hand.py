"""`baton node` and `baton router` started by hand, as on several hosts: a shared Redis and no supervisor."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

import pytest

from baton.registry.embedded import READY_WORDS, find_redis_server
from tests.process.shell import BOUND_S, Shell, refusal
from tests.support.free_ports import first_free_port


def line_with(words: bytes, output: IO[bytes] | None) -> bytes:
    """Read up to the line with these words in it; fails when the output ends before."""
    assert output is not None
    seen = []
    for line in output:
        seen.append(line)
        if words in line.lower():
            return line
    raise AssertionError(f"{words!r} never came: {b''.join(seen).decode()}")


@pytest.fixture
def registry(shell: Shell) -> Iterator[str]:
    """URL of a Redis on loopback."""
    port = first_free_port(1)
    command = [str(find_redis_server()), "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=shell.home, env=shell.environment) as redis:
        line_with(READY_WORDS, redis.stdout)
        yield f"redis://127.0.0.1:{port}"
        redis.terminate()


@contextmanager
def process(shell: Shell, *words: object) -> Iterator[subprocess.Popen[bytes]]:
    """One process of a cluster; at the end it is asked to stop, and must have nothing to complain about."""
    with shell.start(*words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as started:
        try:
            yield started
        finally:
            started.send_signal(signal.SIGTERM)
            output, _ = started.communicate(timeout=BOUND_S)
    assert (started.returncode, output) == (0, b"")


def test_a_cluster_without_a_supervisor_serves_requests(shell: Shell, registry: str, model: Path) -> None:
    common = ("--registry", registry, "--cluster", "by-hand", "--model", model, "--runner", "simulated")
    commands: Sequence[tuple[object, ...]] = (
        ("router", *common, "--router-id", "front", "--grpc-port", 0),
        ("node", "--role", "prefill", *common, "--node-id", "left"),
        ("node", "--role", "decode", *common),
    )
    with ExitStack() as stack:
        started = [stack.enter_context(process(shell, *words)) for words in commands]
        said = [json.loads(line_with(b"ready", one.stderr)) for one in started]
        assert [line["node"] for line in said[:2]] == ["front", "left"]
        assert said[2]["node"].startswith("decode-")
        grpc, operators = (said[0]["event"].split(f"{word} on ")[1].split(",")[0] for word in ("gRPC", "operators"))

        ask = ("generate", "--token-ids", "1,2,3", "--temperature", 0, "-o", "json", "--address", grpc)
        nodes = wait_for_nodes(shell, operators, 3)
        answer = json.loads(shell.baton(*ask).stdout)
        assert answer["usage"]["completion_tokens"] == 16
        assert answer["path"]["prefill_node"] == "left"
        assert answer["kv_bytes"] > 0
        assert {node["role"]: node["pid"] for node in nodes} == {
            role: one.pid for role, one in zip(("router", "prefill", "decode"), started, strict=True)
        }

        # Nobody takes another one's name while it lives, whatever its role.
        taken = refusal(shell.baton("node", "--role", "decode", *common, "--node-id", "left"), 78)
        assert re.search(
            rf"the name left is taken: left\.\w+ at \S+ \(pid {started[1].pid}\) lives; .* --node-id", taken
        )
        taken = refusal(shell.baton(*commands[0]), 78)
        assert re.search(rf"the name front is taken: front\.\w+ .*\(pid {started[0].pid}\) .* --router-id", taken)

        # A node that leaves is missed by nobody for whom another can stand in.
        with process(shell, *commands[1][:-1], "right") as another:
            line_with(b"ready", another.stderr)
            started[1].send_signal(signal.SIGTERM)
            assert started[1].wait(BOUND_S) == 0
            wait_for_nodes(shell, operators, 3)
            again = json.loads(shell.baton(*ask).stdout)
            assert again["path"]["prefill_node"] == "right"
            assert again["token_ids"] == answer["token_ids"]


def wait_for_nodes(shell: Shell, operators: str, count: int) -> list[dict[str, object]]:
    """Ask until so many are ready; asking takes a while, so that it is not in the way of those that are asked."""
    while True:
        done = shell.baton("get", "nodes", "-l", "status=Ready", "-o", "json", "--address", operators)
        nodes: list[dict[str, object]] = json.loads(done.stdout)["items"]
        if len(nodes) == count:
            return nodes


def test_a_second_router_on_the_same_port_is_refused(shell: Shell, registry: str, model: Path) -> None:
    with process(shell, "router", "--registry", registry, "--model", model, "--grpc-port", 0) as first:
        port = json.loads(line_with(b"ready", first.stderr))["event"].split("gRPC on ")[1].split(",")[0].split(":")[1]
        said = refusal(shell.baton("router", "--registry", registry, "--model", model, "--grpc-port", port), 78)
        assert f"can't listen on 127.0.0.1:{port}: the port is in use, or " in said


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["node", "--role", "prefill"], 2, "--registry is required"),
        (["node", "--registry", "redis://127.0.0.1:1"], 2, "--role is required"),
        (["node", "--role", "both", "--registry", "redis://127.0.0.1:1"], 2, "role 'both' from --role"),
        (["router"], 2, "--registry is required"),
        (["router", "--registry", "redis://127.0.0.1:1", "--model", "/nowhere"], 78, "/nowhere does not exist"),
        (["node", "--role", "decode", "--registry", "redis://127.0.0.1:1", "--model", "/nowhere"], 78, "/nowhere does"),
    ],
)
def test_a_process_that_can_not_start_says_why(shell: Shell, words: list[str], code: int, said: str) -> None:
    assert said in refusal(shell.baton(*words), code)
