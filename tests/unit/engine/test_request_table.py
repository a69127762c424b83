"""A request's status changes as its table says, and in no other way."""

from __future__ import annotations

import pytest

from baton.engine.request import Request, RequestEvent, RequestStatus
from baton.machine import IllegalEvent
from baton.messages.sampling import SamplingParams
from tests.support.transitions import check_pair, every_pair

S, E = RequestStatus, RequestEvent

ENDS_ANYWHERE = {status.name: status for status in (S.ABORTED, S.ERROR, S.INVALID, S.KV_LOST, S.REPETITION)}
EXPECTED: dict[RequestStatus, dict[str, RequestStatus]] = {
    S.WAITING: {
        **ENDS_ANYWHERE,
        "GRAMMAR_MISSING": S.WAITING_FOR_GRAMMAR,
        "ADAPTER_MISSING": S.WAITING_FOR_ADAPTER,
        "LOAD_BEGUN": S.WAITING_FOR_REMOTE_KVS,
        "LOAD_LOST": S.WAITING,
        "SEATED": S.RUNNING,
        "BEAM_COMPUTED": S.WAITING,
        "STOPPED": S.STOPPED,
        "LENGTH_CAPPED": S.LENGTH_CAPPED,
        "IGNORED": S.IGNORED,
    },
    S.WAITING_FOR_GRAMMAR: {**ENDS_ANYWHERE, "GRAMMAR_COMPILED": S.WAITING, "LOAD_LOST": S.WAITING_FOR_GRAMMAR},
    S.WAITING_FOR_ADAPTER: {
        **ENDS_ANYWHERE,
        "ADAPTER_LOADED": S.WAITING,
        "ADAPTER_UNAVAILABLE": S.ADAPTER_UNAVAILABLE,
        "LOAD_LOST": S.WAITING_FOR_ADAPTER,
    },
    S.WAITING_FOR_REMOTE_KVS: {**ENDS_ANYWHERE, "LOADED": S.WAITING, "LOAD_LOST": S.WAITING},
    S.RUNNING: {
        **ENDS_ANYWHERE,
        "PREEMPTED": S.PREEMPTED,
        "SWAPPED_OUT": S.SWAPPED,
        "BEAM_COMPUTED": S.WAITING,
        "STOPPED": S.STOPPED,
        "LENGTH_CAPPED": S.LENGTH_CAPPED,
        "HANDED_OFF": S.HANDED_OFF,
    },
    S.PREEMPTED: {**ENDS_ANYWHERE, "SEATED": S.RUNNING, "IGNORED": S.IGNORED},
    S.SWAPPED: {**ENDS_ANYWHERE, "SEATED": S.RUNNING, "SWAP_LOST": S.PREEMPTED},
}
ROADS = {
    S.WAITING: [],
    S.WAITING_FOR_GRAMMAR: [E.GRAMMAR_MISSING],
    S.WAITING_FOR_ADAPTER: [E.ADAPTER_MISSING],
    S.WAITING_FOR_REMOTE_KVS: [E.LOAD_BEGUN],
    S.RUNNING: [E.SEATED],
    S.PREEMPTED: [E.SEATED, E.PREEMPTED],
    S.SWAPPED: [E.SEATED, E.SWAPPED_OUT],
    S.STOPPED: [E.SEATED, E.STOPPED],
    S.LENGTH_CAPPED: [E.SEATED, E.LENGTH_CAPPED],
    S.ABORTED: [E.ABORTED],
    S.IGNORED: [E.IGNORED],
    S.ERROR: [E.ERROR],
    S.INVALID: [E.INVALID],
    S.KV_LOST: [E.KV_LOST],
    S.REPETITION: [E.SEATED, E.REPETITION],
    S.ADAPTER_UNAVAILABLE: [E.ADAPTER_MISSING, E.ADAPTER_UNAVAILABLE],
    S.HANDED_OFF: [E.SEATED, E.HANDED_OFF],
}


def request_in(state: RequestStatus) -> Request:
    request = Request("r", [1, 2, 3], SamplingParams())
    for event in ROADS[state]:
        request.transition(event)
    assert request.status is state
    return request


@every_pair(S, E)
def test_every_pair_of_status_and_event_moves_as_listed_or_changes_nothing(
    state: RequestStatus, event: RequestEvent
) -> None:
    request = request_in(state)

    def transition(event: RequestEvent) -> RequestStatus:
        request.transition(event)
        return request.status

    illegal = rf"r: {event.name} is illegal in {state.name}"
    check_pair(transition, lambda: request.status, event, EXPECTED.get(state, {}), illegal)


@pytest.mark.parametrize("status", [status for status in S if status.is_finished], ids=lambda status: status.name)
def test_a_final_status_is_reached_by_the_event_of_its_name_and_never_left(status: RequestStatus) -> None:
    before = {S.IGNORED: S.WAITING, S.ADAPTER_UNAVAILABLE: S.WAITING_FOR_ADAPTER}
    request = request_in(before.get(status, S.RUNNING))
    request.end(status)
    assert request.status is status
    for another in S:
        if another.is_finished:
            with pytest.raises(IllegalEvent):
                request.end(another)
    assert request.status is status


@pytest.mark.parametrize("status", [status for status in S if not status.is_finished], ids=lambda status: status.name)
def test_a_request_can_not_end_with_a_status_that_is_not_final(status: RequestStatus) -> None:
    request = request_in(S.RUNNING)
    with pytest.raises(ValueError, match=f"r can't end with {status.name}: use a final status"):
        request.end(status)
    assert request.status is S.RUNNING
