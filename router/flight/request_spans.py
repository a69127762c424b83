"""Traces a request: a span for it, with a child for each of its stages at the router. Nodes add their own spans."""

from __future__ import annotations

from baton.observe.tracing import Attributes, Span, Tracer
from router.admission.request import ValidRequest
from router.flight.timeline import EndedRequest


class RequestSpans:
    """Begins and ends the spans of one router's requests."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def begin(self, request: ValidRequest, parent: str, received: float) -> Span | None:
        """Begin the span of an admitted request, if it is sampled. `parent`: the caller's traceparent, or empty."""
        attributes: Attributes = {"baton.request_id": request.request_id, "gen_ai.request.model": request.model}
        return self._tracer.begin("generate", parent, received, attributes)

    def end(self, span: Span, ended: EndedRequest) -> None:
        """End the span of a request that has ended, and add the spans of its stages."""
        moments, last = ended.moments, ended.at_end
        self._tracer.completed("admit", span.traceparent, moments.received, moments.admitted, {})
        left = ended.ended_at if moments.placed is None else moments.placed
        self._tracer.completed("queue", span.traceparent, moments.admitted, left, {})
        attributes: dict[str, str | int | float] = {
            "baton.attempts": ended.attempts,
            "baton.prefill_node": last.prompt_node if last.decode_node else "",
            "baton.decode_node": last.decode_node or last.prompt_node,
            "gen_ai.usage.input_tokens": ended.prompt_tokens,
            "gen_ai.usage.output_tokens": ended.completion_tokens,
        }
        if moments.first_token is not None:
            attributes["gen_ai.server.time_to_first_token"] = moments.first_token - moments.received
        is_well = ended.state == "finished"
        span.end(ended.ended_at, attributes, "" if is_well else f"{ended.state}: {ended.detail}")
