"""The spans of one request from all processes, as a trace collector receives them."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from baton.runner import SimulatedSpec
from baton.runner.simulated import SimulatedRunner
from tests.support.mini_cluster import MiniCluster, mini_cluster

pytestmark = pytest.mark.one_transport

SPEC = SimulatedSpec(num_blocks=96, vocab_size=256, max_model_len=512)
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID = "b7ad6b7169203331"


@dataclass(frozen=True, slots=True)
class ReceivedSpan:
    """One span; ids in hexadecimal digits, times of the day in nanoseconds."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    begun_ns: int
    ended_ns: int
    failed: bool
    service: str
    attributes: dict[str, str | int | float]


@dataclass(slots=True)
class TraceReceiver:
    """The spans that were received so far."""

    address: str = ""
    spans: list[ReceivedSpan] = field(default_factory=list)

    def take(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = next(a.value.string_value for a in resource.resource.attributes if a.key == "service.name")
            for scope in resource.scope_spans:
                for span in scope.spans:
                    attributes = {a.key: getattr(a.value, a.value.WhichOneof("value") or "") for a in span.attributes}
                    self.spans.append(
                        ReceivedSpan(
                            span.name,
                            span.trace_id.hex(),
                            span.span_id.hex(),
                            span.parent_span_id.hex(),
                            span.start_time_unix_nano,
                            span.end_time_unix_nano,
                            span.status.code == span.status.STATUS_CODE_ERROR,
                            service,
                            attributes,
                        )
                    )


@contextmanager
def trace_receiver() -> Iterator[TraceReceiver]:
    """Run a collector on a free port of this host."""
    received = TraceReceiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.take(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        received.address = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield received
        finally:
            server.shutdown()
            thread.join()


async def complete(cluster: MiniCluster, request_id: str, traceparent: str) -> None:
    """Ask over HTTP, to the end."""
    host, _, port = cluster.router.http.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps({"prompt": [1] * 40, "max_tokens": 4, "temperature": 0.0}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
        f"x-request-id: {request_id}\r\ntraceparent: {traceparent}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 200"), answer


async def spans_of(tmp_path: Path, **requests: str) -> list[ReceivedSpan]:
    """What was received of these requests, each with its traceparent."""
    with trace_receiver() as received, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", received.address)
        async with mini_cluster(lambda _: SimulatedRunner(SPEC), tmp_path, token_ids_only=True) as cluster:
            for request_id, traceparent in requests.items():
                await complete(cluster, request_id, traceparent)
            await cluster.wait_until_idle()
    return received.spans


async def test_spans_of_all_processes_belong_to_the_callers_trace(tmp_path: Path) -> None:
    spans = await spans_of(
        tmp_path, traced=f"00-{TRACE_ID}-{PARENT_ID}-01", own="", silent=f"00-{'1' * 32}-{'2' * 16}-00"
    )
    (root,) = [span for span in spans if span.parent_id == PARENT_ID]
    assert (root.name, root.trace_id, root.service) == ("generate", TRACE_ID, "baton-router")
    assert root.attributes["baton.request_id"] == "traced"
    assert root.attributes["gen_ai.usage.output_tokens"] == 4
    children = [span for span in spans if span.parent_id == root.span_id]
    assert {(span.service, span.name) for span in children} == {
        ("baton-router", "admit"),
        ("baton-router", "queue"),
        ("baton-prefill", "queue"),
        ("baton-prefill", "prefill"),
        ("baton-decode", "queue"),
        ("baton-decode", "transfer"),
        ("baton-decode", "decode"),
    }
    assert len(children) == 7
    assert all(span.trace_id == TRACE_ID and not span.failed for span in children)
    assert all(span.begun_ns <= span.ended_ns for span in spans)
    assert {span.attributes["baton.node"] for span in children} == {"router-0", "prefill-0", "decode-0"}
    # Whoever says nothing begins a trace; whoever says that it is not sampled has none.
    (own,) = [span for span in spans if span.attributes.get("baton.request_id") == "own" and not span.parent_id]
    assert own.trace_id not in (TRACE_ID, "1" * 32)
    assert {span.trace_id for span in spans} == {TRACE_ID, own.trace_id}
