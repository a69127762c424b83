"""A request's status changes as its table says, and in no other way."""

from __future__ import annotations

import pytest

from baton.engine.request import Request, RequestEvent, RequestStatus
from baton.messages.node import Outcome
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams
from tests.support.transitions import check_pair

S, E = RequestStatus, RequestEvent

ENDS_ANYWHERE = {
    outcome.name: S.ENDED
    for outcome in (Outcome.ABORTED, Outcome.ERROR, Outcome.INVALID, Outcome.KV_LOST, Outcome.REPETITION)
}
EXPECTED: dict[RequestStatus, dict[str, RequestStatus]] = {
    S.WAITING: {
        **ENDS_ANYWHERE,
        "GRAMMAR_MISSING": S.WAITING_FOR_GRAMMAR,
        "ADAPTER_MISSING": S.WAITING_FOR_ADAPTER,
        "LOAD_BEGUN": S.WAITING_FOR_REMOTE_KVS,
        "LOAD_LOST": S.WAITING,
        "SEATED": S.RUNNING,
        "BEAM_COMPUTED": S.WAITING,
        "STOP": S.ENDED,
        "LENGTH": S.ENDED,
        "IGNORED": S.ENDED,
    },
    S.WAITING_FOR_GRAMMAR: {**ENDS_ANYWHERE, "GRAMMAR_COMPILED": S.WAITING, "LOAD_LOST": S.WAITING_FOR_GRAMMAR},
    S.WAITING_FOR_ADAPTER: {
        **ENDS_ANYWHERE,
        "ADAPTER_LOADED": S.WAITING,
        "ADAPTER_UNAVAILABLE": S.ENDED,
        "LOAD_LOST": S.WAITING_FOR_ADAPTER,
    },
    S.WAITING_FOR_REMOTE_KVS: {**ENDS_ANYWHERE, "LOADED": S.WAITING, "LOAD_LOST": S.WAITING},
    S.RUNNING: {
        **ENDS_ANYWHERE,
        "PREEMPTED": S.PREEMPTED,
        "SWAPPED_OUT": S.SWAPPED,
        "BEAM_COMPUTED": S.WAITING,
        "STOP": S.ENDED,
        "LENGTH": S.ENDED,
        "HANDED_OFF": S.ENDED,
    },
    S.PREEMPTED: {**ENDS_ANYWHERE, "SEATED": S.RUNNING, "IGNORED": S.ENDED},
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
    S.ENDED: [E.SEATED],
}


def request_in(state: RequestStatus) -> Request:
    request = Request("r", RequestSpec([1, 2, 3], SamplingParams()))
    for event in ROADS[state]:
        request.transition(event)
    if state is S.ENDED:
        request.end(Outcome.STOP)
    assert request.status is state
    return request


@pytest.mark.parametrize("state", S, ids=lambda state: state.name)
@pytest.mark.parametrize("event", [*E, *Outcome], ids=lambda event: event.name)
def test_every_pair_of_status_and_event_moves_as_listed_or_changes_nothing(
    state: RequestStatus, event: RequestEvent | Outcome
) -> None:
    request = request_in(state)
    before = request.outcome

    def feed(event: RequestEvent | Outcome) -> RequestStatus:
        if isinstance(event, Outcome):
            request.end(event)
        else:
            request.transition(event)
        return request.status

    illegal = rf"r: {event.name} is illegal in {state.name}"
    expected = EXPECTED.get(state, {})
    check_pair(feed, lambda: request.status, event, expected, illegal)
    ends = event if event.name in expected and isinstance(event, Outcome) else None
    assert request.outcome is (ends or before), "how it ended is said once"
