"""The load generator: when it sends requests, and that the outcomes it records are what the endpoint answered."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import threading
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from baton.bench.load.endpoint import UNREACHABLE, Cancel, Listener, Target, Usage
from baton.bench.load.generator import Generator, sessions, share_of
from baton.bench.load.grpc_endpoint import GrpcEndpoint
from baton.bench.load.http_endpoint import HttpEndpoint
from baton.bench.load.report import remarks
from baton.bench.load.run import GeneratorLoad, LoadPlan, run_load, shares, with_own_ids
from baton.bench.results.outcome import Outcome, Outcomes
from baton.bench.results.result_file import read_result
from baton.bench.results.summary import summarize
from baton.bench.workloads.spec import WorkloadSpec
from baton.bench.workloads.synthetic import MultiTurn
from baton.bench.workloads.workload import Piece, SteadyArrivals, WorkloadRequest
from baton.cli.bench.serve import result_path
from baton.cli.main import main
from baton.errors import Unreachable
from tests.support.canned_endpoint import CannedEndpoint, canned_endpoint
from tests.support.canned_http import canned_http, plain_answer, sse_answer

TARGET = Target("baton", "127.0.0.1:1", path="/v1/completions", model="bench", vocab_size=100, connections=2)


def request(index: int, arrival_s: float = 0.0) -> WorkloadRequest:
    return WorkloadRequest(index, arrival_s, 20, 4, (Piece(index, 20),))


@dataclass
class FakeEndpoint:
    """Keeps what was sent and when; answers at once, with an error, or when the test calls the listeners."""

    sent: list[tuple[bytes, float]] = field(default_factory=list)
    listeners: list[Listener] = field(default_factory=list)
    answer: str | None = "at once"
    """"at once"; an error message; or None: the test calls the listeners."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: list[bytes] = field(default_factory=list)

    async def listener(self, number: int) -> Listener:
        """The listener of the request with this number, once that was sent."""
        while len(self.listeners) <= number:
            self.changed.clear()
            await self.changed.wait()
        return self.listeners[number]

    async def open(self) -> None:
        pass

    def prepare(self, request: WorkloadRequest) -> bytes:
        return str(request.index).encode()

    def send(self, message: bytes, listener: Listener) -> Cancel:
        self.sent.append((message, asyncio.get_running_loop().time()))
        self.listeners.append(listener)
        self.changed.set()
        if self.answer == "at once":
            listener.on_tokens(1)
            listener.on_tokens(3)
            listener.on_end(None, Usage(20, 4))
        elif self.answer is not None:
            listener.on_end(self.answer, None)
        return lambda: self.cancelled.append(message)

    def close(self) -> None:
        pass


async def run(endpoint: FakeEndpoint, requests: list[WorkloadRequest], max_open: int | None = None) -> Generator:
    generator = Generator(endpoint, max_open)
    await generator.run(sessions(requests), asyncio.get_running_loop().time())
    return generator


async def test_requests_are_sent_when_due_and_late_ones_keep_their_planned_time() -> None:
    requests = [request(0, 0.0), request(1, 0.02), request(2, 0.03)]
    endpoint = FakeEndpoint()
    generator = Generator(endpoint, None)
    now = asyncio.get_running_loop().time()
    await generator.run(sessions(requests), now - 0.025)  # the first two are late already
    planned = generator.outcomes.planned_s
    assert planned.tolist() == pytest.approx([0.0, 0.02, 0.03])
    assert (generator.outcomes.sent_s >= planned).all()
    assert generator.outcomes.sent_s[0] >= 0.025
    assert generator.outcomes.ttft_s[0] >= 0.025
    assert generator.progress.completed == 3


async def test_a_closed_loop_sends_the_next_request_when_one_has_ended() -> None:
    endpoint = FakeEndpoint(answer=None)
    generator = Generator(endpoint, 2)
    running = asyncio.create_task(generator.run(sessions([request(i) for i in range(4)]), 0.0))
    await endpoint.listener(1)
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(endpoint.sent) == 2
    for number in range(4):
        listener = await endpoint.listener(number)
        listener.on_tokens(4)
        listener.on_end(None, Usage(20, 4))
    await running
    outcomes = generator.outcomes
    assert outcomes.planned_s[:2].tolist() == [0, 0]
    assert (outcomes.planned_s[2:] >= outcomes.finished_s[:2]).all()
    assert (outcomes.planned_s[2:] <= outcomes.sent_s[2:]).all()


async def test_a_turn_waits_for_the_one_before_and_a_failed_turn_ends_its_session() -> None:
    workload = MultiTurn(SteadyArrivals(1e6), 2, 3, first_length=5, turn_length=5, output_length=4)
    endpoint = FakeEndpoint(answer=None)
    generator = Generator(endpoint, None)
    running = asyncio.create_task(generator.run(sessions(workload), asyncio.get_running_loop().time()))
    await endpoint.listener(1)
    assert [message for message, _ in endpoint.sent] == [b"0", b"3"]
    endpoint.listeners[1].on_end("broken", None)
    for number in (0, 2, 3):
        listener = await endpoint.listener(number)
        listener.on_tokens(4)
        listener.on_end(None, Usage(20, 4))
    await running
    assert [message for message, _ in endpoint.sent] == [b"0", b"3", b"1", b"2"]
    assert generator.progress.completed == 3
    assert generator.outcomes.errors == {"broken": 1}


async def test_stopping_drops_open_requests() -> None:
    endpoint = FakeEndpoint(answer=None)
    generator = Generator(endpoint, None)
    running = asyncio.create_task(generator.run(sessions([request(0), request(1, 1e6)]), 0.0))
    listener = await endpoint.listener(0)
    generator.stop()
    await running
    listener.on_end("too late", None)
    assert len(generator.outcomes) == 0
    assert generator.progress.open == 1


async def test_a_run_ends_when_the_endpoint_has_become_unreachable() -> None:
    generator = await run(FakeEndpoint(answer=f"{UNREACHABLE}: gone"), [request(i) for i in range(1000)])
    assert generator.progress.is_unreachable
    assert len(generator.outcomes) == 20
    generator = await run(FakeEndpoint(answer="full"), [request(i) for i in range(100)])
    assert not generator.progress.is_unreachable
    assert generator.outcomes.errors == {"full": 100}


async def test_a_request_that_times_out_is_cancelled() -> None:
    endpoint = FakeEndpoint(answer=None)
    generator = Generator(endpoint, None, request_timeout_s=0.01)
    await generator.run(sessions([request(0), request(1)]), 0.0)
    assert endpoint.cancelled == [b"0", b"1"]
    assert generator.outcomes.errors == {"no answer in time": 2}


async def test_an_answer_without_a_token_counts_as_failed() -> None:
    endpoint = FakeEndpoint(answer=None)
    generator = Generator(endpoint, None)
    running = asyncio.create_task(generator.run(sessions([request(0)]), 0.0))
    listener = await endpoint.listener(0)
    listener.on_end(None, Usage(20, 0))
    listener.on_end("twice", None)
    await running
    assert generator.outcomes.errors == {"no token arrived": 1}


def test_sessions_and_concurrency_are_shared_among_processes() -> None:
    requests = [replace(request(i), session=i // 3) for i in range(12)]
    parts = [list(share_of(sessions(requests), process, 3)) for process in range(3)]
    found = sorted(one.index for part in parts for session in part for one in session)
    assert found == list(range(12))
    assert all(len({one.session for one in session}) == 1 for part in parts for session in part)
    assert shares(5, 2) == [3, 2]
    assert shares(1, 3) == [1]
    assert shares(None, 2) == [None, None]


class InterruptedSpec(WorkloadSpec):
    """Raises SIGINT when it is serialized, just before the generator process that gets it is started."""

    def to_json(self) -> dict[str, Any]:
        signal.raise_signal(signal.SIGINT)
        return super().to_json()


def test_ctrl_c_while_generators_start_stops_all_of_them() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent_server:
        target = replace(TARGET, address=f"127.0.0.1:{silent_server.getsockname()[1]}")
        ran = run_load(LoadPlan(target, InterruptedSpec(num_prompts=50), limit_s=5.0))
    assert ran.was_interrupted
    assert ran.offered == 0


def test_no_two_runs_have_a_request_id_in_common() -> None:
    ids = {GrpcEndpoint(with_own_ids(TARGET)).prepare(request(0)) for _ in range(8)}
    assert len(ids) == 8


def test_a_late_or_busy_generator_is_the_bottleneck() -> None:
    assert not GeneratorLoad(2, lag_p99_ms=3.0, cpu_share=0.4, cpu_peak=0.6).bottleneck
    assert "250 ms late" in GeneratorLoad(2, lag_p99_ms=250.0, cpu_share=0.4, cpu_peak=0.6).bottleneck
    assert not GeneratorLoad(2, lag_p99_ms=250.0, cpu_share=0.4, cpu_peak=0.6, tolerated_ms=700.0).bottleneck
    assert "95% of a core" in GeneratorLoad(2, lag_p99_ms=3.0, cpu_share=0.4, cpu_peak=0.95).bottleneck


@pytest.mark.parametrize(("took_s", "is_bottleneck"), [(0.1, True), (5.0, False)])
def test_lateness_is_compared_with_the_measured_latency(took_s: float, is_bottleneck: bool) -> None:
    outcomes = Outcomes()
    for index in range(10):
        outcomes.append(Outcome(index, 0.0, 0.3, 0.3 + took_s, 0.3 + took_s, 5, 1))
    assert bool(GeneratorLoad.of(outcomes, [0.1], [0.2]).bottleneck) is is_bottleneck


async def test_a_generator_that_can_not_keep_up_says_so() -> None:
    spec = WorkloadSpec(num_prompts=3000, request_rate=1e6, random_input_len=64, random_output_len=2)
    async with canned_endpoint(2) as address:
        target = replace(TARGET, address=address)
        ran = await asyncio.to_thread(run_load, LoadPlan(target, spec))
    assert ran.load.bottleneck
    assert ran.load.to_json()["is_bottleneck"] is True
    lines = remarks(ran, summarize(ran.outcomes, ran.duration_s), None)
    assert any(line.startswith("the generator was the bottleneck: ") for line in lines)
    assert "use more --processes" in " ".join(lines)
    # Requests count from when they were planned: being late makes nothing look fast.
    assert ran.outcomes.ttft_s.mean() >= (ran.outcomes.sent_s - ran.outcomes.planned_s).mean()


async def through_grpc(tokens: int, status: int = 0, without_chunk: int | None = None) -> Generator:
    async with canned_endpoint(tokens, status, without_chunk) as address:
        endpoint = GrpcEndpoint(replace(TARGET, address=address))
        await endpoint.open()
        generator = Generator(endpoint, None)
        await generator.run(sessions([request(i) for i in range(30)]), asyncio.get_running_loop().time())
        endpoint.close()
        return generator


async def test_the_outcome_of_a_grpc_stream_is_recorded() -> None:
    generator = await through_grpc(tokens=6)
    outcomes = generator.outcomes
    assert outcomes.errors == {}
    assert set(outcomes.output_length.tolist()) == {6}
    assert set(outcomes.input_length.tolist()) == {9}
    assert set(outcomes.cached_tokens.tolist()) == {5}
    assert set(outcomes.attempts.tolist()) == {2}
    assert set(outcomes.node_names()) == {("prefill-0", "decode-0")}
    assert len(outcomes.gaps) == 30 * 5
    assert outcomes.queue_s.tolist() == pytest.approx([1e-4] * 30)


async def test_a_refusal_over_grpc_has_the_servers_status_and_message() -> None:
    generator = await through_grpc(tokens=6, status=14)
    assert generator.outcomes.errors == {"UNAVAILABLE: no room!": 30}
    assert not generator.progress.is_unreachable


async def test_a_grpc_stream_that_lacks_a_chunk_has_failed() -> None:
    generator = await through_grpc(tokens=6, without_chunk=3)
    assert generator.outcomes.errors == {"a chunk begins at token 4 behind 3 tokens": 30}


class Silent(asyncio.Protocol):
    """A server that accepts connections and never answers."""

    def __init__(self, transports: list[asyncio.BaseTransport]) -> None:
        self._transports = transports

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transports.append(transport)


class Mute(asyncio.Protocol):
    """A server that never answers, and records how its client ends the request."""

    def __init__(self, done: list[str], has_event: asyncio.Event) -> None:
        self._done = done
        self._has_event = has_event
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))  # HTTP/2's first frame: empty SETTINGS

    def data_received(self, data: bytes) -> None:
        self._received += data
        # A frame of RST_STREAM for stream 1, with CANCEL.
        if bytes([0, 0, 4, 3, 0, 0, 0, 0, 1, 0, 0, 0, 8]) in self._received:
            self._note("reset")

    def connection_lost(self, exc: Exception | None) -> None:
        self._note("left")

    def _note(self, what: str) -> None:
        self._done.append(what)
        self._has_event.set()


@pytest.mark.parametrize(("make", "expected"), [(GrpcEndpoint, "reset"), (HttpEndpoint, "left")])
async def test_a_request_without_an_answer_in_time_is_cancelled_at_the_server(
    make: type[GrpcEndpoint | HttpEndpoint], expected: str
) -> None:
    done: list[str] = []
    has_event = asyncio.Event()
    server = await asyncio.get_running_loop().create_server(lambda: Mute(done, has_event), "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    endpoint = make(replace(TARGET, address=address, connections=1))
    await endpoint.open()
    generator = Generator(endpoint, None, request_timeout_s=0.01)
    await generator.run(sessions([request(0)]), asyncio.get_running_loop().time())
    await has_event.wait()
    assert done == [expected]
    assert generator.outcomes.errors == {"no answer in time": 1}
    endpoint.close()
    server.close()


class CountedEndpoint(GrpcEndpoint):
    """Sets an event when `count` requests were sent."""

    def __init__(self, target: Target, count: int) -> None:
        super().__init__(target)
        self._left = count
        self.has_sent_them = asyncio.Event()

    def send(self, message: bytes, listener: Listener) -> Cancel:
        cancel = super().send(message, listener)
        self._left -= 1
        if not self._left:
            self.has_sent_them.set()
        return cancel


async def test_connections_that_break_are_made_again() -> None:
    """However many requests were open on them, the endpoint does not count as unreachable."""
    silent: list[asyncio.BaseTransport] = []
    server = await asyncio.get_running_loop().create_server(
        lambda: Silent(silent) if len(silent) < 2 else CannedEndpoint(6, 0), "127.0.0.1", 0
    )
    endpoint = CountedEndpoint(replace(TARGET, address=f"127.0.0.1:{server.sockets[0].getsockname()[1]}"), 25)
    await endpoint.open()
    generator = Generator(endpoint, 25)
    running = asyncio.create_task(generator.run(sessions([request(i) for i in range(60)]), 0.0))
    await endpoint.has_sent_them.wait()
    for transport in silent:
        transport.close()
    await running
    endpoint.close()
    server.close()
    assert sum(generator.outcomes.errors.values()) == 25
    assert all("the connection is lost" in error for error in generator.outcomes.errors)
    assert generator.progress.completed == 35
    assert not generator.progress.is_unreachable


async def through_http(answer: bytes, cuts: list[int], *, is_chat: bool = False, closes: bool = False) -> Generator:
    async with canned_http(answer, cuts, closes=closes) as (address, canned):
        backend = "openai-chat" if is_chat else "openai"
        endpoint = HttpEndpoint(replace(TARGET, backend=backend, address=address))
        await endpoint.open()
        generator = Generator(endpoint, 2)
        await generator.run(sessions([request(i) for i in range(6)]), asyncio.get_running_loop().time())
        endpoint.close()
        assert len(canned.requests) == 6
        assert canned.connections == (6 if closes else 2)
        body = json.loads(canned.requests[0].split(b"\r\n\r\n", 1)[1])
        assert body["stream"] is True
        assert len(body["messages"][0]["content"].split() if is_chat else body["prompt"]) == 20
        return generator


@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize("piece", [1, 7, 40, 100_000])
async def test_the_outcome_of_an_http_stream_is_recorded_however_it_is_split(is_chat: bool, piece: int) -> None:
    answer = sse_answer(4, is_chat=is_chat)
    generator = await through_http(answer, list(range(piece, len(answer), piece)), is_chat=is_chat)
    outcomes = generator.outcomes
    assert outcomes.errors == {}
    assert set(outcomes.output_length.tolist()) == {4}
    assert set(outcomes.cached_tokens.tolist()) == {5}
    assert len(outcomes.gaps) == 6 * 3


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (plain_answer(503, '{"error": {"message": "full"}}'), "HTTP 503: full"),
        (plain_answer(404, "nothing here"), "HTTP 404: nothing here"),
        (sse_answer(2, error="KV lost"), "KV lost"),
        (plain_answer(200, "data: {}\n\n"), "the stream ended without [DONE]"),
    ],
)
async def test_errors_over_http_have_the_servers_message(answer: bytes, message: str) -> None:
    assert (await through_http(answer, [])).outcomes.errors == {message: 6}


async def test_tokens_are_counted_by_the_ids_that_a_router_gives_its_events() -> None:
    events = [(3, "a", None), (4, "b", None), (5, "rest", "length")]
    choices = [json.dumps({"text": text, "finish_reason": reason}) for _, text, reason in events]
    parts = [
        f'id: {event[0]}\ndata: {{"choices": [{choice}]}}\n\n' for event, choice in zip(events, choices, strict=True)
    ]
    generator = await through_http(plain_answer(200, "".join([*parts, "data: [DONE]\n\n"])), [])
    # The text of the last event was kept back: its tokens came earlier.
    assert set(generator.outcomes.output_length.tolist()) == {4}
    assert generator.outcomes.errors == {}


async def test_an_answer_that_is_not_http_ends_its_request() -> None:
    generator = await through_http(b"SSH-2.0-x\r\n\r\n", [], closes=True)
    assert list(generator.outcomes.errors) == ["the answer is not HTTP: 'SSH-2.0-x'"]


@pytest.mark.parametrize("endpoint", [GrpcEndpoint, HttpEndpoint])
async def test_a_refused_connection_is_unreachable(endpoint: type[GrpcEndpoint | HttpEndpoint]) -> None:
    async with canned_http(b"") as (address, _):
        pass
    with pytest.raises(Unreachable, match="can't be reached"):
        await endpoint(replace(TARGET, address=address)).open()


class ShortLived(ThreadingHTTPServer):
    """An OpenAI endpoint that answers a number of requests and then closes its port."""

    daemon_threads = True

    def __init__(self, answers: int) -> None:
        super().__init__(("127.0.0.1", 0), ShortLivedHandler)
        self.left = answers
        self.lock = threading.Lock()


class ShortLivedHandler(BaseHTTPRequestHandler):
    server: ShortLived

    def do_GET(self) -> None:
        self.wfile.write(plain_answer(200, json.dumps({"data": [{"id": "brief", "max_model_len": 512}]})))

    def do_POST(self) -> None:
        with self.server.lock:
            self.server.left -= 1
            if self.server.left == 0:
                self.server.shutdown()
                self.server.socket.close()
            if self.server.left <= 0:
                return
        self.rfile.read(int(self.headers["content-length"]))
        self.wfile.write(sse_answer(3))

    def log_message(self, *_: object) -> None:
        pass


def test_outcomes_until_an_endpoint_went_away_are_kept(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    server = ShortLived(answers=12)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    path = tmp_path / "partial.json"
    words = ("bench", "serve", "--backend", "openai", "--base-url", f"http://127.0.0.1:{server.server_port}")
    load = ("--num-prompts", "200", "--max-concurrency", "1", "--random-input-len", "8", "--random-output-len", "3")
    assert main([*words, *load, "--result-filename", str(path), "--goodput", "ttft:0.0001"]) == 5
    printed = capfd.readouterr()
    result = read_result(path)
    assert result["completed"] == 11
    assert result["is_complete"] is False
    assert len(result["arrangements"][0]["rates"][0]["outcomes"]["index"]) == len(result_errors(result)) + 11
    assert "the endpoint went away" in printed.err
    assert "no request met the SLO: median TTFT was " in printed.err
    assert "Successful requests" in printed.out


def result_errors(result: dict[str, Any]) -> list[str]:
    return [error for error in result["arrangements"][0]["rates"][0]["outcomes"]["error"] if error is not None]


def test_a_result_is_written_into_its_folder_which_need_not_exist(tmp_path: Path) -> None:
    plan = LoadPlan(replace(TARGET, model="some/model"), WorkloadSpec(request_rate=2.0))
    now = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    named = "baton-2qps-some-model-20260102-030405.json"
    for folder in (tmp_path, tmp_path / "new"):
        assert result_path(folder, "", plan, now) == folder / named
        assert result_path(folder, "x.json", plan, now) == folder / "x.json"
    assert result_path(tmp_path.parent, tmp_path.name, plan, now) == tmp_path / named


def test_a_base_url_may_end_in_v1_as_for_openais_clients(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--backend", "openai", "--base-url", "http://127.0.0.1:1/v1/"]) == 5
    assert "127.0.0.1:1 can't be reached" in capfd.readouterr().err
