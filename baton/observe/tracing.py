"""Spans of requests, for whoever collects traces. Nothing is imported, and nothing done, unless the environment asks.

The variables are OpenTelemetry's own (`OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_TRACES_SAMPLER`, ...), the context between
processes is the W3C's `traceparent`. A request is one span of its router with a child for each stage, in whichever
process that stage was; each process measures its own by its own clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

Attributes = Mapping[str, str | int | float]


class Span(Protocol):
    """What goes on until `end`. Times are in seconds on the process's monotonic clock."""

    @property
    def traceparent(self) -> str:
        """What makes another process's spans its children."""
        ...

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits."""
        ...

    def end(self, at: float, attributes: Attributes, error: str = "") -> None:
        """It is over; `error` says that it failed, and why. Call once."""
        ...


class Tracer(Protocol):
    """Where a process leaves its spans. Every method returns at once, but for `close`."""

    def begin(self, name: str, parent: str, at: float, attributes: Attributes) -> Span | None:
        """A request comes, with its caller's traceparent or none; None where it is not sampled."""
        ...

    def completed(
        self, name: str, parent: str, begun: float, ended: float, attributes: Attributes, error: str = ""
    ) -> None:
        """A stage is over, of the span that the traceparent names."""
        ...

    def close(self) -> None:
        """Send what is left, if that takes no longer than a moment. Blocks."""
        ...
