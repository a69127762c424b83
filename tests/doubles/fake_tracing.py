"""The fake of `baton.observe.otel`: a tracer that keeps its spans in memory."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from baton.observe.tracing import Attributes


@dataclass(slots=True)
class FakeSpan:
    """One span, with times in seconds on the caller's clock."""

    name: str
    parent: str
    begun: float
    traceparent: str
    attributes: dict[str, str | int | float] = field(default_factory=dict)
    ended: float | None = None
    error: str = ""

    @property
    def trace_id(self) -> str:
        return self.traceparent.split("-")[1]

    def end(self, at: float, attributes: Attributes, error: str = "") -> None:
        assert self.ended is None, f"{self.name} ends twice"
        self.ended, self.error = at, error
        self.attributes |= attributes


class FakeTracer:
    """A tracer that samples every request, and keeps its spans in `spans`."""

    def __init__(self) -> None:
        self.spans: list[FakeSpan] = []
        self._numbers = itertools.count(1)

    def begin(self, name: str, parent: str, at: float, attributes: Attributes) -> FakeSpan:
        number = next(self._numbers)
        trace_id = parent.split("-")[1] if parent else f"{number:032x}"
        span = FakeSpan(name, parent, at, f"00-{trace_id}-{number:016x}-01", dict(attributes))
        self.spans.append(span)
        return span

    def completed(
        self, name: str, parent: str, begun: float, ended: float, attributes: Attributes, error: str = ""
    ) -> None:
        self.begin(name, parent, begun, attributes).end(ended, {}, error)

    def close(self) -> None:
        return
