"""A tracer that uses OpenTelemetry's SDK; no other module imports it."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter
from opentelemetry.trace import Span as OtSpan
from opentelemetry.trace import SpanKind, Status, StatusCode, format_trace_id, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from baton import __version__
from baton.observe.tracing import Attributes, Span

_CLOSE_WITHIN_S = 1.5
"""How long a process that ends may wait for its collector of spans."""
_PROPAGATOR = TraceContextTextMapPropagator()


def exporter_of(environ: Mapping[str, str]) -> SpanExporter:
    """The exporter that the environment names, which reads its other settings from the environment itself.

    Raises ValueError for one that is not known, ImportError for one that is not installed.
    """
    exporter = environ.get("OTEL_TRACES_EXPORTER", "").lower() or "otlp"
    if exporter == "console":
        return ConsoleSpanExporter()
    if exporter != "otlp":
        raise ValueError(f"OTEL_TRACES_EXPORTER={exporter!r} is none of otlp, console, none")
    general = environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    protocol = environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", general)
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter()
    if protocol != "http/protobuf":
        raise ValueError(f"OTEL_EXPORTER_OTLP_PROTOCOL={protocol!r} is none of grpc, http/protobuf")
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    return HttpExporter()


class OtelTracer:
    """A `Tracer` with a provider of its own. It samples as the environment says."""

    def __init__(self, exporter: SpanExporter, role: str, name: str, incarnation: str) -> None:
        named = Resource.create({"service.instance.id": incarnation, "service.version": __version__})
        if str(named.attributes.get("service.name", "unknown_service")).startswith("unknown_service"):
            named = named.merge(Resource({"service.name": f"baton-{role}"}))
        self._exporter = exporter
        # Otherwise the SDK would make the process wait at its end; `close` decides for how long.
        self._provider = TracerProvider(resource=named, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("baton", __version__)
        self._own: dict[str, str] = {"baton.node": name, "baton.incarnation": incarnation}

    def begin(self, name: str, parent: str, at: float, attributes: Attributes) -> Span | None:
        span = self._start(name, parent, at, attributes, SpanKind.SERVER)
        return span if span.is_recording else None

    def completed(
        self, name: str, parent: str, begun: float, ended: float, attributes: Attributes, error: str = ""
    ) -> None:
        self._start(name, parent, begun, attributes, SpanKind.INTERNAL).end(ended, {}, error)

    def close(self) -> None:
        # The SDK would ask a collector that does not answer again and again, until its own timeouts are over.
        sending = threading.Thread(target=self._provider.shutdown, name="baton-last-spans", daemon=True)
        sending.start()
        sending.join(_CLOSE_WITHIN_S)
        self._exporter.shutdown()

    def _start(self, name: str, parent: str, at: float, attributes: Attributes, kind: SpanKind) -> _Span:
        # With an invalid traceparent the span begins a trace of its own.
        context = _PROPAGATOR.extract({"traceparent": parent}, Context())
        begun_ns = _wall_ns(at)
        of = {**self._own, **attributes}
        return _Span(self._tracer.start_span(name, context, kind, attributes=of, start_time=begun_ns), at, begun_ns)


class _Span:
    """One span. Its duration is from the monotonic clock: two readings of the wall clock could make it negative."""

    def __init__(self, span: OtSpan, begun: float, begun_ns: int) -> None:
        self._span = span
        self._begun = begun
        self._begun_ns = begun_ns
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, set_span_in_context(span, Context()))
        self.traceparent = carrier.get("traceparent", "")

    @property
    def is_recording(self) -> bool:
        return self._span.is_recording()

    @property
    def trace_id(self) -> str:
        return format_trace_id(self._span.get_span_context().trace_id)

    def end(self, at: float, attributes: Attributes, error: str = "") -> None:
        self._span.set_attributes(dict(attributes))
        if error:
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end(self._begun_ns + round((at - self._begun) * 1e9))


def _wall_ns(monotonic_s: float) -> int:
    """The time of the day at a moment of this process's monotonic clock, in nanoseconds."""
    return time.time_ns() - round((time.monotonic() - monotonic_s) * 1e9)
