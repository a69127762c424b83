"""The list of requests: those that this router serves now, and the latest that are over. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from baton.messages.request_rows import RequestRow
from router.flight.active_request import ActiveRequest
from router.flight.flight_table import FlightState
from router.flight.timeline import Traced

_ENDED = {FlightState.FINISHED: "Finished", FlightState.FAILED: "Failed", FlightState.CANCELLED: "Cancelled"}
_ENDED_WORDS = {state.value: word for state, word in _ENDED.items()}


def running_rows(runs: Iterable[ActiveRequest], router: str, now: float) -> Iterator[RequestRow]:
    """`now`: seconds on the router's clock."""
    return (_running(run, router, now) for run in runs)


def ended_rows(traced: Iterable[Traced], router: str, now: float) -> Iterator[RequestRow]:
    """Likewise."""
    return (_ended(each, router, now) for each in traced)


def _running(run: ActiveRequest, router: str, now: float) -> RequestRow:
    flight, first = run.flight, run.first_token_at
    measured = flight.measured()
    return RequestRow(
        request_id=run.request.request_id,
        state=_state(run),
        router=router,
        age_s=now - run.started,
        prefill_node=measured.prompt_node if measured.decode_node else "",
        decode_node=measured.decode_node or measured.prompt_node,
        prompt_tokens=run.request.num_prompt_tokens,
        output_tokens=flight.num_output_tokens,
        attempts=flight.key.attempt,
        ttft_ms=None if first is None else (first - run.started) * 1e3,
        total_ms=None,
    )


def _state(run: ActiveRequest) -> str:
    flight = run.flight
    if run.wanted is not None:
        return "Waiting"
    if flight.state is FlightState.STREAMING:
        # The first token comes from where the prompt was computed, and the next one says that its KV has arrived.
        only_first = flight.num_output_tokens <= run.request.sampling_params.n
        return "Transferring" if only_first and flight.measured().decode_node else "Decoding"
    if flight.state is FlightState.RETRYING:
        return "Retrying"
    return _ENDED.get(flight.state, "Prefilling")


def _ended(traced: Traced, router: str, now: float) -> RequestRow:
    moments, last = traced.moments, traced.last
    first = moments.first_token
    return RequestRow(
        request_id=traced.request_id,
        state=_ENDED_WORDS.get(traced.state, traced.state),
        router=router,
        age_s=now - moments.received,
        prefill_node=last.prompt_node if last.decode_node else "",
        decode_node=last.decode_node or last.prompt_node,
        prompt_tokens=traced.prompt_tokens,
        output_tokens=traced.completion_tokens,
        attempts=traced.attempts,
        ttft_ms=None if first is None else (first - moments.received) * 1e3,
        total_ms=(traced.ended - moments.received) * 1e3,
        kv_bytes=last.decode.kv_bytes if last.decode is not None else 0,
        detail=traced.detail,
    )
