"""Timelines: where a request's time went, in stages that add up exactly to its time to first token and its latency.

A traced request has the same moments in the spans of its router; nodes add their own.

The rules:

1. Clocks of different processes are never compared. The router's clock says how long the whole took, in whole
   nanoseconds; a node says how long it had the request, by its own.
2. Both legs of an attempt are sent at the same moment. So the part of the decode node's work that lies within the time
   to the first token has cost nothing and is no stage; the part after it is.
3. Time in which no process had the request was spent between two processes, on the wire or in front of a busy event
   loop: the stage `relay`.
4. No stage is negative, and none is longer than the rest of the whole: if measurements contradict each other, the later
   stages are cut, so that the sum stays right.
5. All attempts that failed are one stage, `lost`.
6. What was decoded before a stream was moved for the last time is the node's that had it then. The stage `move` is the
   time until the stream went on, with the relay of the tokens since.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from cachetools import FIFOCache

from baton.messages.node import StageTimings
from baton.messages.operator import Timeline, TimelineStage
from baton.messages.speculation import NO_DRAFTS, DraftCounts
from baton.observe.tracing import Attributes, Span, Tracer
from router.admission.request import ValidRequest
from router.flight.flight_attempt import AttemptTimings

_KEPT = 2048
_NOTHING = StageTimings()


@dataclass(slots=True)
class Moments:
    """The moments of a request at its router, in seconds on the router's clock."""

    received: float
    admitted: float
    placed: float | None = None
    """When nodes were found for the first attempt."""
    placed_last: float | None = None
    """When nodes were found for the last attempt."""
    placed_for_first: float | None = None
    """When nodes were found for the attempt that brought the first token."""
    first_token: float | None = None


@dataclass(slots=True)
class EndedRequest:
    """The facts about a request that are kept when it has ended."""

    request_id: str
    moments: Moments
    ended_at: float
    """Seconds on the router's clock."""
    state: str
    """The final state of its flight."""
    detail: str
    """The finish reason, or the error's message."""
    attempts: int
    is_adopted: bool
    """Whether its first attempt here was begun by another router."""
    at_first_token: AttemptTimings
    """The timings that the nodes had reported when the first token came."""
    at_end: AttemptTimings
    """The timings that the nodes had reported at the end."""
    prompt_tokens: int
    completion_tokens: int
    draft_counts: DraftCounts = NO_DRAFTS
    trace_id: str = ""
    bit_exact: bool | None = None
    """See `Finished.bit_exact`."""


class _Part(NamedTuple):
    """One stage of a node's work on a request, with the duration that the node reported."""

    name: str
    where: str
    duration_ns: int


class TimelineLog:
    """Keeps the latest ended requests of one router, a bounded number. Timelines are made when they are asked for."""

    def __init__(self, kept: int = _KEPT) -> None:
        self._by_request: FIFOCache[str, EndedRequest] = FIFOCache(kept)

    def add(self, request: EndedRequest) -> None:
        """Keep a request; of two with the same id only the later one stays."""
        self._by_request.pop(request.request_id, None)  # so that the latest is the last in the cache's order, too
        self._by_request[request.request_id] = request

    def latest(self) -> Iterator[EndedRequest]:
        """All kept requests, the latest first."""
        return reversed([*self._by_request.values()])

    def find(self, request_id: str) -> EndedRequest | None:
        """The ended request; None if it is unknown, has not ended, or ended too long ago."""
        return self._by_request.get(request_id)


def timeline(request: EndedRequest, router: str, now: float) -> Timeline:
    """The timeline of a request. `router`: the name of the router that served it; `now`: seconds on its clock."""
    moments, last = request.moments, request.at_end
    decode = last.decode or _NOTHING
    first_at = None if moments.first_token is None else _ns(moments.first_token)
    return Timeline(
        request_id=request.request_id,
        state=request.state,
        detail=request.detail,
        age_s=max(0.0, now - request.ended_at),
        attempts=request.attempts,
        prefill_node=last.prompt_node if last.decode_node not in ("", last.prompt_node) else "",
        decode_node=last.decode_node or last.prompt_node,
        prompt_tokens=request.prompt_tokens,
        completion_tokens=request.completion_tokens,
        cached_tokens=last.of_prompt.cached_tokens,
        kv_bytes=decode.kv_bytes,
        kv_read_ns=_of_ms(decode.transfer_ms),
        ttft_ns=None if first_at is None else first_at - _ns(moments.received),
        total_ns=_ns(request.ended_at) - _ns(moments.received),
        stages=_joined(_stages(request, router)),
        trace_id=request.trace_id,
        draft_tokens=request.draft_counts.num_drafted,
        accepted_draft_tokens=request.draft_counts.num_accepted,
        bit_exact=request.bit_exact,
    )


def _stages(request: EndedRequest, router: str) -> Iterator[TimelineStage]:
    moments = request.moments
    ended, admitted = _ns(request.ended_at), _ns(moments.admitted)
    yield TimelineStage("admit", router, admitted - _ns(moments.received))
    if moments.placed is None:
        yield TimelineStage("queue", router, ended - admitted)
        return
    placed = _ns(moments.placed)
    yield TimelineStage("queue", router, placed - admitted)
    if moments.first_token is None:
        last = _ns(moments.placed_last or moments.placed)
        yield TimelineStage("lost", router, last - placed)
        yield TimelineStage("unfinished", _between(router, request.at_end.prompt_node), ended - last)
        return
    first_token, of_first = _ns(moments.first_token), _ns(moments.placed_for_first or moments.placed)
    yield TimelineStage("lost", router, of_first - placed)
    yield from _until_first(request, router, first_token - of_first)
    yield from _until_end(request, router, first_token, ended)


def _until_first(request: EndedRequest, router: str, window_ns: int) -> Iterable[TimelineStage]:
    """The stages from the placement of the attempt that brought the first token until that token."""
    first = request.at_first_token
    if _is_replayed(request):
        return [TimelineStage("adopt", _between(router, first.decode_node or first.prompt_node), window_ns)]
    if first.prompt is None and _is_one_attempt(request):
        # The first token came from the decode node before the prefill node had reported its timings.
        first = first._replace(prompt=request.at_end.prompt)
    parts = _prompt_chain(first)
    if first.decode is not None:
        parts += _beyond(_length(parts), _chain(first.decode_node, first.decode))
    return _cut(window_ns, parts, _Part("relay", _between(router, first.prompt_node), 0))


def _until_end(request: EndedRequest, router: str, first_token: int, ended: int) -> Iterator[TimelineStage]:
    """The stages from the first token to the end."""
    last, begun = request.at_end, first_token
    node = last.decode_node or last.prompt_node
    chain = _chain(node, (last.decode if last.decode_node else last.prompt) or _NOTHING)
    if _is_one_attempt(request):
        parts = _beyond(_work_before_first_token(request, first_token, chain), chain)
    else:
        begun = max(first_token, _ns(request.moments.placed_last or 0.0))
        if last.moved_from:
            yield TimelineStage("decode", last.moved_from, begun - first_token, True)
            decode_ns = min(ended - begun, chain[-1].duration_ns) if last.is_complete else ended - begun
            yield TimelineStage("move", _between(last.moved_from, node), ended - begun - decode_ns, True)
            yield TimelineStage("decode", node, decode_ns, True)
            return
        yield TimelineStage("lost", router, begun - first_token, True)
        parts = _prompt_chain(last) if last.decode_node else []
        parts += _beyond(_length(parts), chain)
    rest = _Part("relay", _between(node, router), 0) if last.is_complete else _Part("decode", node, 0)
    if not node:
        rest = _Part("unfinished", router, 0)
    yield from _cut(ended - begun, parts, rest, after_first_token=True)


def _work_before_first_token(request: EndedRequest, first_token: int, chain: Sequence[_Part]) -> int:
    """How much of the work of the node that decodes lies before the first token, in nanoseconds."""
    first = request.at_first_token
    reported = first.decode if first.decode_node else first.prompt
    if reported is not None:
        return _length(_chain("", reported))
    if _is_replayed(request):
        return _length(chain[:-1])
    return first_token - _ns(request.moments.placed_for_first or 0.0)


def _is_one_attempt(request: EndedRequest) -> bool:
    """Whether the attempt that brought the first token also brought the last one."""
    return request.moments.placed_for_first == request.moments.placed_last


def _is_replayed(request: EndedRequest) -> bool:
    """Whether the first token is of an attempt that began at another router, so that its node replayed it."""
    return request.is_adopted and request.moments.placed_for_first == request.moments.placed


def _chain(node: str, timings: StageTimings) -> list[_Part]:
    """The stages of one node's work on a request, in order, from the moment at which the node received it."""
    return [
        _Part("queue", node, _of_ms(timings.queue_ms)),
        _Part("transfer", node, _of_ms(timings.intake_ms)),
        _Part("prefill", node, _of_ms(timings.prefill_ms)),
        _Part("decode", node, _of_ms(timings.decode_ms)),
    ]


def _prompt_chain(measured: AttemptTimings) -> list[_Part]:
    """The stages of the node that computes the prompt, up to the first token."""
    return _chain(measured.prompt_node, measured.prompt or _NOTHING)[:-1]


def _length(chain: Iterable[_Part]) -> int:
    return sum(part.duration_ns for part in chain)


def _beyond(begin_ns: int, chain: Iterable[_Part]) -> list[_Part]:
    """The parts of a chain that lie after its first `begin_ns` nanoseconds."""
    parts, at = list[_Part](), 0
    for part in chain:
        at += part.duration_ns
        parts.append(part._replace(duration_ns=min(part.duration_ns, max(0, at - begin_ns))))
    return parts


def _cut(
    window_ns: int, parts: Iterable[_Part], rest: _Part, *, after_first_token: bool = False
) -> Iterator[TimelineStage]:
    """The parts in order, cut to the window; `rest` names the stage that gets what is left of the window."""
    left_ns = window_ns
    for part in parts:
        duration_ns = min(left_ns, max(0, part.duration_ns))
        left_ns -= duration_ns
        yield TimelineStage(part.name, part.where, duration_ns, after_first_token)
    yield TimelineStage(rest.name, rest.where, left_ns, after_first_token)


def _joined(stages: Iterable[TimelineStage]) -> Sequence[TimelineStage]:
    """The stages without empty ones; neighbours that differ only in their durations become one."""
    joined: list[TimelineStage] = []
    for stage in stages:
        if joined and replace(joined[-1], duration_ns=stage.duration_ns) == stage:
            stage = replace(stage, duration_ns=joined.pop().duration_ns + stage.duration_ns)
        if stage.duration_ns:
            joined.append(stage)
    return tuple(joined)


def _between(first: str, second: str) -> str:
    return f"{first} > {second}" if first and second else first or second


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _of_ms(milliseconds: float) -> int:
    return round(milliseconds * 1e6)


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
            "baton.bit_exact": ended.bit_exact is not False,
        }
        if moments.first_token is not None:
            attributes["gen_ai.server.time_to_first_token"] = moments.first_token - moments.received
        is_well = ended.state == "finished"
        span.end(ended.ended_at, attributes, "" if is_well else f"{ended.state}: {ended.detail}")
