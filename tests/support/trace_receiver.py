"""A trace collector that receives spans from OpenTelemetry's exporters over HTTP and keeps them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


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
