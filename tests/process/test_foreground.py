"""`baton up` in the foreground of a terminal: its output can be pasted, and Ctrl-C cuts no stream."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import urllib.request
from pathlib import Path

import grpc
from google.protobuf import json_format

from baton.cli.cluster.run_dir import RunDir
from baton.client import GenerationClient
from baton.messages.generation import Accepted, Chunk, Finished
from baton.v1 import generation_pb2
from tests.process.shell import Shell, refusal
from tests.process.terminal import Terminal
from tests.support.slow_model import FLAGS, STEP_TIMES, expected_tokens_of, slow_request

LAST_LINE = "Ctrl-C stops it.\n"


def test_the_printed_commands_and_addresses_work_when_pasted(shell: Shell, model: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "a run"
    with Terminal(shell, "up", "--model", model, "--grpc-port", 0, "--run-dir", run_dir) as terminal:
        screen = terminal.wait_for_text(LAST_LINE)
        state = RunDir(run_dir).read_state()
        assert state is not None
        lines = screen.splitlines()
        assert lines[:2] == ["Starting …", lines[1]]
        assert lines[1].split() == ["NAME", "ROLE", "STATUS", "PID", "ADDRESS"]
        shown = [line.split() for line in lines[2:6]]
        assert shown == [[p.name, p.role, "Ready", str(p.pid), p.address or "-"] for p in state.processes]
        assert {int(row[3]) for row in shown} < set(shell.remaining_processes())
        served = f"{state.grpc_address} (gRPC) and http://{state.http_address}/v1 (OpenAI)"
        assert f"tiny is served on {served}; operators: {state.operator_address}" in lines

        commands = [line.strip() for line in lines if line.startswith("  ")]
        assert [command.split()[:2] for command in commands[:2]] == [["baton", "generate"], ["baton", "get"]]
        generated, nodes = (shell.run(["sh", "-c", command]) for command in commands[:2])
        assert (generated.returncode, generated.stderr) == (0, "")
        assert generated.stdout.strip()
        assert nodes.stdout.count("Ready") == 3
        assert_curl_works(commands[2], state.http_address)
        assert_grpcurl_works(commands[3], state.grpc_address)

        terminal.ctrl_c()
        assert terminal.end() == 0
        *_, stopping, stopped = terminal.screen.splitlines()
        assert stopping.endswith("Stopping: running requests may end first. Ctrl-C again ends them at once.")
        assert stopped == f"stopped the cluster in {run_dir}"
    assert not shell.remaining_processes()
    assert sorted(path.name for path in run_dir.iterdir()) == ["lock", "logs"]
    assert f"no cluster is running in {run_dir}" in refusal(shell.baton("status", "--run-dir", run_dir), 5)


def assert_curl_works(command: str, address: str) -> None:
    """What curl would do with this line; it need not be installed."""
    words = shlex.split(command)
    assert words[0] == "curl"
    assert words[1].startswith(f"http://{address}/")
    name, _, value = words[words.index("-H") + 1].partition(": ")
    asked = urllib.request.Request(words[1], words[words.index("-d") + 1].encode(), {name: value})
    with urllib.request.urlopen(asked, timeout=60) as answer:
        assert json.load(answer)["choices"][0]["text"]


def assert_grpcurl_works(line: str, address: str) -> None:
    """Do what grpcurl would do with its arguments."""
    program, plaintext, data, body, where, method = shlex.split(line)
    assert (program, plaintext, data, where) == ("grpcurl", "-plaintext", "-d", address)
    service, name = method.split("/")
    described = generation_pb2.DESCRIPTOR.services_by_name["Generation"]
    assert (described.full_name, described.methods_by_name[name].input_type.name) == (service, "GenerateRequest")
    request = json_format.Parse(body, generation_pb2.GenerateRequest())
    with grpc.insecure_channel(where) as channel:
        call = channel.unary_stream(
            f"/{method}",
            request_serializer=generation_pb2.GenerateRequest.SerializeToString,
            response_deserializer=generation_pb2.GenerateResponse.FromString,
        )
        events = list(call(request))
    said = [event.chunk for event in events if event.HasField("chunk")]
    finished = events[-1].finished
    assert finished.usage.completion_tokens == sum(len(chunk.token_ids) for chunk in said)
    # It samples without a seed, as its reader would: now and then the model has less to say.
    at_most = request.sampling_params.max_tokens
    if finished.finish_reason == generation_pb2.FINISH_REASON_LENGTH:
        assert finished.usage.completion_tokens == at_most == 32
    else:
        assert finished.finish_reason == generation_pb2.FINISH_REASON_STOP
        assert 0 < finished.usage.completion_tokens <= at_most


def test_ctrl_c_lets_a_running_stream_end(shell: Shell, tmp_path: Path) -> None:
    shell.environment |= STEP_TIMES
    request = slow_request("drained", max_tokens=40)
    words = ("up", *FLAGS, "--grpc-port", 0, "--run-dir", tmp_path / "run")
    # What is forked for a test never shares its parent's session.
    with Terminal(shell, *words, as_program=True) as terminal:
        terminal.wait_for_text(LAST_LINE)
        state = RunDir(tmp_path / "run").read_state()
        assert state is not None
        tokens: list[int] = []
        with GenerationClient(state.grpc_address) as client:
            for event in client.generate(request):
                if isinstance(event, Accepted):
                    terminal.ctrl_c()
                    terminal.wait_for_text("Stopping:")
                elif isinstance(event, Chunk):
                    tokens += event.token_ids
        assert isinstance(event, Finished)
        assert terminal.end() == 0
    assert tokens == expected_tokens_of(request)
    assert not shell.remaining_processes()


def test_a_log_file_says_what_has_started_and_that_the_cluster_was_stopped(shell: Shell, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with shell.start("up", *FLAGS, "--grpc-port", 0, "--run-dir", run_dir, **pipes) as up:
        assert up.stdout is not None
        while LAST_LINE.encode() not in up.stdout.readline():
            assert up.poll() is None
        up.send_signal(signal.SIGINT)
        first, *ready, stopping, stopped = up.communicate()[1].decode().splitlines()
    assert first == f"Starting 4 processes; logs: {run_dir / 'logs'}"
    assert ready[0] == "Starting: redis is ready (1 of 4)"
    assert [line.partition("ready ")[2] for line in ready] == [f"({number} of 4)" for number in range(1, 5)]
    assert sorted(line.split()[1] for line in ready) == ["decode-0", "prefill-0", "redis", "router-0"]
    assert stopping == "Stopping: running requests may end first. Another signal ends them at once."
    assert stopped == f"stopped the cluster in {run_dir}"
    assert up.returncode == 0


def test_ctrl_c_twice_ends_everything_at_once(shell: Shell, tmp_path: Path) -> None:
    shell.environment |= STEP_TIMES
    with Terminal(shell, "up", *FLAGS, "--grpc-port", 0, "--run-dir", tmp_path / "run") as terminal:
        terminal.wait_for_text(LAST_LINE)
        # A stream that would go on for minutes, and whose client hears its end as an error.
        words = ("generate", "--token-ids", "1,2,3", "--max-tokens", 4000, "--run-dir", tmp_path / "run")
        with shell.start(*words, "-o", "json", stdout=subprocess.PIPE, stderr=subprocess.PIPE) as client:
            while not sum(node["running"] for node in nodes(shell, tmp_path / "run")):
                assert client.poll() is None
            terminal.ctrl_c()
            terminal.wait_for_text("Stopping:")
            terminal.ctrl_c()
            assert terminal.end() == 0
            answer, complaint = client.communicate()
    assert client.returncode not in (0, 130)
    assert answer == b""
    assert complaint.startswith(b"baton: ")
    assert complaint.count(b"\n") == 1
    assert not shell.remaining_processes()


def test_ctrl_c_of_a_client_prints_nothing_and_frees_its_blocks(shell: Shell, tmp_path: Path) -> None:
    shell.environment |= STEP_TIMES
    run_dir = tmp_path / "run"
    words = ("generate", "--token-ids", "1,2,3", "--max-tokens", 4000, "-o", "json", "--run-dir", run_dir)
    with shell.up(*FLAGS, "--grpc-port", 0, run_dir=run_dir):
        with shell.start(*words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as client:
            while not sum(node["running"] for node in nodes(shell, run_dir)):
                assert client.poll() is None
            client.send_signal(signal.SIGINT)
            assert client.communicate() == (b"", b"")
        assert client.returncode == 130
        while sum(node["running"] + node["waiting"] for node in nodes(shell, run_dir)):
            pass
        assert shell.baton("down", "--run-dir", run_dir).returncode == 0


def nodes(shell: Shell, run_dir: Path) -> list[dict[str, int]]:
    """Its nodes; asking takes a while, so that whoever asks again is not in the way of those that are asked."""
    listed = json.loads(shell.baton("get", "nodes", "-o", "json", "--run-dir", run_dir).stdout)
    found: list[dict[str, int]] = listed["items"]
    return found
