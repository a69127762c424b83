"""The list of requests for operators: those that this router serves now, and the latest that have ended. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from baton.messages.operator import RequestRow
from router.flight.active_request import ActiveRequest
from router.flight.flight_table import FlightState
from router.flight.timeline import EndedRequest

_ENDED = {FlightState.FINISHED: "Finished", FlightState.FAILED: "Failed", FlightState.CANCELLED: "Cancelled"}
_ENDED_WORDS = {state.value: word for state, word in _ENDED.items()}


def running_rows(active_requests: Iterable[ActiveRequest], router: str, now: float) -> Iterator[RequestRow]:
    """The rows of live requests. `now`: seconds on the router's clock."""
    return (_running(active, router, now) for active in active_requests)


def ended_rows(ended: Iterable[EndedRequest], router: str, now: float) -> Iterator[RequestRow]:
    """The rows of ended requests. `now`: seconds on the router's clock."""
    return (_ended(each, router, now) for each in ended)


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
