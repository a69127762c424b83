"""What operators see of a router: its cluster, its requests, why those were placed as they were, and their times."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

from baton.clock import Clock
from baton.errors import RequestNotFound
from baton.messages.node import Role
from baton.messages.operator import (
    ClusterStatus,
    NodeStatus,
    PlacementDecision,
    PlacementOutcome,
    PlanReport,
    RequestExplanation,
    RequestRow,
    TenantRows,
    Timeline,
)
from baton.registry import Membership, NodeRecord
from router.dispatcher import Dispatcher
from router.flight.active_request import ActiveRequest
from router.flight.flight_table import FlightState
from router.flight.timeline import EndedRequest, timeline
from router.placement.decisions import Explanation
from router.placement.placement import may_serve, note_of_left_out
from router.placement.view import ClusterView

_ENDED = {FlightState.FINISHED: "Finished", FlightState.FAILED: "Failed", FlightState.CANCELLED: "Cancelled"}
_ENDED_WORDS = {state.value: word for state, word in _ENDED.items()}


def running_rows(active_requests: Iterable[ActiveRequest], router: str, now: float) -> Iterator[RequestRow]:
    """The rows of live requests. `now`: seconds on the router's clock."""
    return (_running(active, router, now) for active in active_requests)


def ended_rows(ended: Iterable[EndedRequest], router: str, now: float) -> Iterator[RequestRow]:
    """The rows of ended requests. `now`: seconds on the router's clock."""
    return (_ended(request, router, now) for request in ended)


def _running(active: ActiveRequest, router: str, now: float) -> RequestRow:
    flight, first = active.flight, active.first_token_at
    timings = flight.attempt_timings()
    return RequestRow(
        request_id=active.request.request_id,
        state=_state(active),
        router=router,
        age_s=now - active.started,
        prefill_node=timings.prompt_node if timings.decode_node else "",
        decode_node=timings.decode_node or timings.prompt_node,
        prompt_tokens=active.request.num_prompt_tokens,
        output_tokens=flight.num_output_tokens,
        attempts=flight.key.attempt,
        ttft_ms=None if first is None else (first - active.started) * 1e3,
        total_ms=None,
    )


def _state(active: ActiveRequest) -> str:
    flight = active.flight
    if active.wanted is not None:
        return "Waiting"
    if flight.state is FlightState.STREAMING:
        # The first token comes from the prefill node; the second one shows that the KV has arrived at the decode node.
        only_first = flight.num_output_tokens <= active.request.sampling_params.n
        return "Transferring" if only_first and flight.attempt_timings().decode_node else "Decoding"
    if flight.state is FlightState.RETRYING:
        return "Retrying"
    return _ENDED.get(flight.state, "Prefilling")


def _ended(ended: EndedRequest, router: str, now: float) -> RequestRow:
    moments, last = ended.moments, ended.at_end
    first = moments.first_token
    return RequestRow(
        request_id=ended.request_id,
        state=_ENDED_WORDS.get(ended.state, ended.state),
        router=router,
        age_s=now - moments.received,
        prefill_node=last.prompt_node if last.decode_node else "",
        decode_node=last.decode_node or last.prompt_node,
        prompt_tokens=ended.prompt_tokens,
        output_tokens=ended.completion_tokens,
        attempts=ended.attempts,
        ttft_ms=None if first is None else (first - moments.received) * 1e3,
        total_ms=(ended.ended_at - moments.received) * 1e3,
        kv_bytes=last.decode.kv_bytes if last.decode is not None else 0,
        detail=ended.detail,
    )


def explained(explanation: Explanation, now: float) -> PlacementDecision:
    """The message about a decision. `now`: seconds on the router's clock."""
    decision = explanation.decision
    return PlacementDecision(
        attempt=decision.attempt,
        age_s=max(0.0, now - decision.at),
        policy=decision.policy,
        decision=decision.decision,
        reason=decision.reason.text,
        prompt_tokens=decision.prompt_tokens,
        prefill_node=decision.prefill,
        decode_node=decision.decode,
        ways=tuple(explanation.ways),
        outcome=_outcome(explanation),
        bits=decision.bits,
        continues_only_at=decision.continues_only_at,
        tenant_counter=None if decision.standing is None else decision.standing.counter,
        virtual_time=None if decision.standing is None else decision.standing.virtual_time,
    )


def _outcome(explanation: Explanation) -> PlacementOutcome | None:
    measured = explanation.decision.measured
    if measured is None:
        return None
    return PlacementOutcome(
        queue_ms=measured.timings.queue_ms,
        prefill_ms=measured.timings.prefill_ms,
        transfer_ms=measured.timings.transfer_ms,
        cached_tokens=measured.timings.cached_tokens,
        kv_bytes=measured.timings.kv_bytes,
        first_token_ms=measured.first_token_ms,
        best=explanation.best,
        regret_ms=explanation.regret_ms,
    )


_STATUS_WORDS = {"starting": "Starting", "ready": "Ready", "draining": "Draining"}


class OperatorHandler:
    """Serves operators; see `baton.wire.services.operator_service.OperatorHandler`."""

    def __init__(
        self,
        view: ClusterView,
        dispatcher: Dispatcher,
        membership: Membership,
        clock: Clock,
        own: Callable[[], NodeRecord],
        plan: Callable[[], PlanReport],
    ) -> None:
        """`own` returns this router's record as it is now, `plan` what its planner has decided last."""
        self._view = view
        self._dispatcher = dispatcher
        self._membership = membership
        self._clock = clock
        self._own = own
        self._plan = plan
        self._routers: tuple[NodeRecord, ...] = ()

    def registered_routers(self, records: Sequence[NodeRecord]) -> None:
        """Take the routers that are in the registry now."""
        self._routers = tuple(records)

    def status(self) -> ClusterStatus:
        """The cluster as this router sees it, this router included."""
        wall = self._clock.wall()
        own = replace(
            _router_status(self._own(), wall),
            running=self._dispatcher.requests.num_live - self._dispatcher.requests.num_waiting,
            waiting=self._dispatcher.requests.num_waiting,
        )
        others = [_router_status(r, wall) for r in self._routers if r.incarnation != self._own().incarnation]
        nodes = self._view.statuses(self._clock.monotonic(), wall)
        health, detail = self._health()
        return ClusterStatus(self._membership.cluster, health, detail, [own, *others, *nodes])

    def requests(self, limit: int, request_id: str = "") -> Sequence[RequestRow]:
        """Live and ended requests; see `baton.wire.services.operator_service.OperatorHandler`."""
        if not request_id:
            return [*self.running(limit or None), *self.ended(limit)]
        name, now = self._own().name, self._clock.monotonic()
        active, traced = (
            self._dispatcher.requests.find(request_id),
            self._dispatcher.requests.timelines.find(request_id),
        )
        if active is not None:
            return list(running_rows([active], name, now))
        return list(ended_rows([traced], name, now)) if traced is not None else []

    def running(self, limit: int | None) -> list[RequestRow]:
        """The requests that this router serves, the latest first."""
        active_requests = islice(self._dispatcher.requests.active_requests(), limit)
        return list(running_rows(active_requests, self._own().name, self._clock.monotonic()))

    def ended(self, limit: int) -> list[RequestRow]:
        """The ended requests that are still kept, the latest first."""
        latest = islice(self._dispatcher.requests.timelines.latest(), limit)
        return list(ended_rows(latest, self._own().name, self._clock.monotonic()))

    def tenants(self, limit: int) -> TenantRows:
        """What this router has done for each tenant."""
        return self._dispatcher.requests.tenant_rows(limit)

    def plan(self) -> PlanReport:
        """What this router's planner has decided last."""
        return self._plan()

    def explain(self, request_id: str) -> RequestExplanation:
        """Why a request was placed as it was, or waits; raises RequestNotFound if it is unknown or too long ago."""
        now = self._clock.monotonic()
        explanations = self._dispatcher.requests.placer.explain(request_id, now)
        waiting = self._dispatcher.requests.queue_place(request_id)
        if not explanations and waiting is None:
            raise RequestNotFound(f"this router remembers no request {request_id[:80]!r}")
        return RequestExplanation([explained(explanation, now) for explanation in explanations], waiting)

    def timeline(self, request_id: str) -> Timeline:
        """Where a request's time went; raises RequestNotFound if it is unknown, live, or too long ago."""
        traced = self._dispatcher.requests.timelines.find(request_id)
        if traced is None and self._dispatcher.requests.find(request_id) is not None:
            raise RequestNotFound(f"request {request_id[:80]!r} has not ended yet: its timeline is known when it has")
        if traced is None:
            raise RequestNotFound(f"this router remembers no request {request_id[:80]!r}")
        return timeline(traced, self._own().name, self._clock.monotonic())

    def _health(self) -> tuple[str, str]:
        candidates = self._view.candidates()
        why = self._dispatcher.requests.placer.why_not_ready(candidates, self._own().model)
        if why:
            return "unavailable", why
        roles = {candidate.node.role for candidate in may_serve(candidates, None)}
        notes = [
            f"no {role.value} node is up{note_of_left_out(candidates, role)}"
            for role in (Role.PREFILL, Role.DECODE)
            if role not in roles
        ]
        if cordoned := self._view.cordoned:
            notes.append(f"cordoned: {', '.join(cordoned)}")
        if not self._membership.healthy:
            notes.insert(0, "the registry does not answer; serving goes on with the last view")
            return "degraded", "; ".join(notes)
        return "ok", "; ".join(notes)


def _router_status(record: NodeRecord, wall: float) -> NodeStatus:
    return NodeStatus(
        name=record.name,
        role=record.role,
        status=_STATUS_WORDS[record.state],
        incarnation=record.incarnation,
        address=record.address,
        pid=record.pid,
        model=record.model,
        running=0,
        waiting=0,
        kv_usage=0.0,
        version=record.version,
        age_s=max(0.0, wall - record.started_at),
        detail=f"HTTP on {record.http_address}" if record.http_address else "",
    )
