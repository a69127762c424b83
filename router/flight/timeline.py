"""Where requests' time went: stages that sum up exactly to the time to the first token, and to the latency.

The rules:

1. Clocks of different processes are never compared. The router's clock says how long the whole took, in whole
   nanoseconds; a node says how long it had the request, by its own.
2. Both legs of an attempt are sent at the same moment. So of what the decode node did with the request, what lies
   within the time that the first token took has cost nothing, and is no stage: what is beyond it is.
3. What nobody had it for was spent between two processes, on the wire or in front of a busy loop: `relay`.
4. No stage is negative and none exceeds what is left of the whole: should measurements contradict each other, the later
   stages are cut, so that the sum stays true.
5. Attempts that failed are one stage, `lost`: what they did was for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from cachetools import FIFOCache

from baton.messages.node import StageTimings
from baton.messages.timelines import Timeline, TimelineStage
from router.flight.flight_leg import Measured

_KEPT = 2048
_NOTHING = StageTimings()


@dataclass(slots=True)
class Moments:
    """When what happened to a request at its router, in seconds on the router's clock."""

    received: float
    admitted: float
    placed: float | None = None
    """When nodes were found for the first time."""
    placed_last: float | None = None
    """Likewise, for the attempt that ran last..."""
    placed_for_first: float | None = None
    """... and for the one that brought the first token."""
    first_token: float | None = None


@dataclass(slots=True)
class Traced:
    """What is kept of a request that is over."""

    request_id: str
    moments: Moments
    ended: float
    state: str
    detail: str
    attempts: int
    is_adopted: bool
    """Its first attempt here was begun by another router."""
    first: Measured
    """What the nodes had said when the first token came."""
    last: Measured
    """What they had said at the end."""
    prompt_tokens: int
    completion_tokens: int
    trace_id: str = ""


class _Part(NamedTuple):
    """What one process says it had the request for."""

    name: str
    where: str
    duration_ns: int


class TimelineLog:
    """The latest requests of one router that are over. Bounded; timelines are made when somebody asks."""

    def __init__(self, kept: int = _KEPT) -> None:
        self._by_request: FIFOCache[str, Traced] = FIFOCache(kept)

    def record(self, traced: Traced) -> None:
        """One more; of two with one name the later one is kept."""
        self._by_request.pop(traced.request_id, None)  # so that the latest is the last in the cache's order, too
        self._by_request[traced.request_id] = traced

    def latest(self) -> Iterator[Traced]:
        """The latest first."""
        return reversed([*self._by_request.values()])

    def of(self, request_id: str) -> Traced | None:
        """What there is of a request; None if it is unknown, not over or long ago."""
        return self._by_request.get(request_id)


def timeline(traced: Traced, router: str, now: float) -> Timeline:
    """Where its time went; `router` is the name of the one that served it, `now` seconds on its clock."""
    moments, last = traced.moments, traced.last
    prompt, decode = last.prompt or _NOTHING, last.decode or _NOTHING
    first_at = None if moments.first_token is None else _ns(moments.first_token)
    return Timeline(
        request_id=traced.request_id,
        state=traced.state,
        detail=traced.detail,
        age_s=max(0.0, now - traced.ended),
        attempts=traced.attempts,
        prefill_node=last.prompt_node if last.decode_node else "",
        decode_node=last.decode_node or last.prompt_node,
        prompt_tokens=traced.prompt_tokens,
        completion_tokens=traced.completion_tokens,
        cached_tokens=prompt.cached_tokens,
        kv_bytes=decode.kv_bytes,
        kv_read_ns=_of_ms(decode.transfer_ms),
        ttft_ns=None if first_at is None else first_at - _ns(moments.received),
        total_ns=_ns(traced.ended) - _ns(moments.received),
        stages=_joined(_stages(traced, router)),
        trace_id=traced.trace_id,
    )


def _stages(traced: Traced, router: str) -> Iterator[TimelineStage]:
    moments = traced.moments
    ended, admitted = _ns(traced.ended), _ns(moments.admitted)
    yield TimelineStage("admit", router, admitted - _ns(moments.received))
    if moments.placed is None:
        yield TimelineStage("queue", router, ended - admitted)
        return
    placed = _ns(moments.placed)
    yield TimelineStage("queue", router, placed - admitted)
    if moments.first_token is None:
        last = _ns(moments.placed_last or moments.placed)
        yield TimelineStage("lost", router, last - placed)
        yield TimelineStage("unfinished", _between(router, traced.last.prompt_node), ended - last)
        return
    first_token, of_first = _ns(moments.first_token), _ns(moments.placed_for_first or moments.placed)
    yield TimelineStage("lost", router, of_first - placed)
    yield from _until_first(traced, router, first_token - of_first)
    yield from _until_end(traced, router, first_token, ended)


def _until_first(traced: Traced, router: str, window_ns: int) -> Iterable[TimelineStage]:
    """From the placement of the attempt that brought the first token."""
    first = traced.first
    if _is_replayed(traced):
        return [TimelineStage("adopt", _between(router, first.decode_node or first.prompt_node), window_ns)]
    if first.prompt is None and _is_one_attempt(traced):
        # The decode node was quicker to say it.
        first = first._replace(prompt=traced.last.prompt)
    parts = _prompt_chain(first)
    if first.decode is not None:
        parts += _beyond(_length(parts), _chain(first.decode_node, first.decode))
    return _cut(window_ns, parts, _Part("relay", _between(router, first.prompt_node), 0))


def _until_end(traced: Traced, router: str, first_token: int, ended: int) -> Iterator[TimelineStage]:
    """From the first token."""
    last, begun = traced.last, first_token
    node = last.decode_node or last.prompt_node
    chain = _chain(node, (last.decode if last.decode_node else last.prompt) or _NOTHING)
    if _is_one_attempt(traced):
        parts = _beyond(_told_by_then(traced, first_token, chain), chain)
    else:
        begun = max(first_token, _ns(traced.moments.placed_last or 0.0))
        yield TimelineStage("lost", router, begun - first_token, True)
        parts = _prompt_chain(last) if last.decode_node else []
        parts += _beyond(_length(parts), chain)
    rest = _Part("relay", _between(node, router), 0) if last.is_complete else _Part("decode", node, 0)
    if not node:
        rest = _Part("unfinished", router, 0)
    yield from _cut(ended - begun, parts, rest, after_first_token=True)


def _told_by_then(traced: Traced, first_token: int, chain: Sequence[_Part]) -> int:
    """How much of what the node that decodes did lies before the first token."""
    first = traced.first
    told = first.decode if first.decode_node else first.prompt
    if told is not None:
        return _length(_chain("", told))
    if _is_replayed(traced):
        return _length(chain[:-1])
    return first_token - _ns(traced.moments.placed_for_first or 0.0)


def _is_one_attempt(traced: Traced) -> bool:
    """Whether the attempt that brought the first token also brought the last one."""
    return traced.moments.placed_for_first == traced.moments.placed_last


def _is_replayed(traced: Traced) -> bool:
    """Whether the first token is of an attempt that began at another router: its nodes say how long it took there."""
    return traced.is_adopted and traced.moments.placed_for_first == traced.moments.placed


def _chain(node: str, timings: StageTimings) -> list[_Part]:
    """What one node did with a request, one after the other, from the moment at which it came there."""
    return [
        _Part("queue", node, _of_ms(timings.queue_ms)),
        _Part("transfer", node, _of_ms(timings.intake_ms)),
        _Part("prefill", node, _of_ms(timings.prefill_ms)),
        _Part("decode", node, _of_ms(timings.decode_ms)),
    ]


def _prompt_chain(measured: Measured) -> list[_Part]:
    """Up to the first token."""
    return _chain(measured.prompt_node, measured.prompt or _NOTHING)[:-1]


def _length(chain: Iterable[_Part]) -> int:
    return sum(part.duration_ns for part in chain)


def _beyond(begin_ns: int, chain: Iterable[_Part]) -> list[_Part]:
    """What of it lies beyond a moment."""
    parts, at = list[_Part](), 0
    for part in chain:
        at += part.duration_ns
        parts.append(part._replace(duration_ns=min(part.duration_ns, max(0, at - begin_ns))))
    return parts


def _cut(
    window_ns: int, parts: Iterable[_Part], rest: _Part, *, after_first_token: bool = False
) -> Iterator[TimelineStage]:
    """The parts in order as far as the window goes, and what is left of it."""
    left_ns = window_ns
    for part in parts:
        duration_ns = min(left_ns, max(0, part.duration_ns))
        left_ns -= duration_ns
        yield TimelineStage(part.name, part.where, duration_ns, after_first_token)
    yield TimelineStage(rest.name, rest.where, left_ns, after_first_token)


def _joined(stages: Iterable[TimelineStage]) -> Sequence[TimelineStage]:
    """Without empty ones; what a process went on with is one stage."""
    joined: list[TimelineStage] = []
    for stage in stages:
        if joined and replace(joined[-1], duration_ns=stage.duration_ns) == stage:
            stage = replace(stage, duration_ns=joined.pop().duration_ns + stage.duration_ns)
        if stage.duration_ns:
            joined.append(stage)
    return tuple(joined)


def _between(one: str, other: str) -> str:
    return f"{one} > {other}" if one and other else one or other


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _of_ms(milliseconds: float) -> int:
    return round(milliseconds * 1e6)
