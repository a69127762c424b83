"""The interface of tracers. OpenTelemetry is imported, and spans are made, only if the environment asks for them.

The variables are OpenTelemetry's own (`OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_TRACES_SAMPLER`, ...); the context between
processes is a `traceparent` (W3C Trace Context). A request is one span of its router, with a child for each stage, in
the process where that stage was. Each process measures its stages by its own clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

Attributes = Mapping[str, str | int | float]


class Span(Protocol):
    """A span that lasts until `end`. Times are seconds on the process's monotonic clock."""

    @property
    def traceparent(self) -> str:
        """The context that makes spans of another process children of this one."""
        ...

    @property
    def trace_id(self) -> str:
        """The id of the trace, 32 hexadecimal digits."""
        ...

    def end(self, at: float, attributes: Attributes, error: str = "") -> None:
        """End the span; `error`: why it failed, empty if it did not. To be called once."""
        ...


class Tracer(Protocol):
    """Takes the spans of one process. All methods but `close` return at once."""

    def begin(self, name: str, parent: str, at: float, attributes: Attributes) -> Span | None:
        """Begin the span of a request; `parent`: its caller's traceparent, or empty. None if it is not sampled."""
        ...

    def completed(
        self, name: str, parent: str, begun: float, ended: float, attributes: Attributes, error: str = ""
    ) -> None:
        """Add the span of a stage that is over, as a child of the span with the traceparent `parent`."""
        ...

    def close(self) -> None:
        """Send the remaining spans, if that takes no longer than a moment. Blocks."""
        ...
