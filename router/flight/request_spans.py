"""A request as spans: one of its own, with a child for each of its stages at the router. Nodes add theirs."""

from __future__ import annotations

from baton.observe.tracing import Attributes, Span, Tracer
from router.admission.request import ValidRequest
from router.flight.timeline import Traced


class RequestSpans:
    """Begins and ends the spans of one router's requests."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def begin(self, request: ValidRequest, parent: str, received: float) -> Span | None:
        """A request was admitted; None where it is not sampled. `parent`: its caller's traceparent, or nothing."""
        attributes: Attributes = {"baton.request_id": request.request_id, "gen_ai.request.model": request.model}
        return self._tracer.begin("generate", parent, received, attributes)

    def end(self, span: Span, traced: Traced) -> None:
        """It is over."""
        moments, last = traced.moments, traced.last
        self._tracer.completed("admit", span.traceparent, moments.received, moments.admitted, {})
        left = traced.ended if moments.placed is None else moments.placed
        self._tracer.completed("queue", span.traceparent, moments.admitted, left, {})
        attributes: dict[str, str | int | float] = {
            "baton.attempts": traced.attempts,
            "baton.prefill_node": last.prompt_node if last.decode_node else "",
            "baton.decode_node": last.decode_node or last.prompt_node,
            "gen_ai.usage.input_tokens": traced.prompt_tokens,
            "gen_ai.usage.output_tokens": traced.completion_tokens,
        }
        if moments.first_token is not None:
            attributes["gen_ai.server.time_to_first_token"] = moments.first_token - moments.received
        is_well = traced.state == "finished"
        span.end(traced.ended, attributes, "" if is_well else f"{traced.state}: {traced.detail}")
