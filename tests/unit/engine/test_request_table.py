"""A request says once how it ended. That its status changes as its table says is in tests/unit/base."""

from __future__ import annotations

import pytest

from baton.engine.request import Request, RequestEvent, RequestStatus
from baton.machine import IllegalEvent
from baton.messages.node import Outcome
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams


@pytest.mark.parametrize(
    "outcome",
    [
        Outcome.ABORTED,
        Outcome.ERROR,
        Outcome.INVALID,
        Outcome.KV_LOST,
        Outcome.REPETITION,
        Outcome.STOP,
        Outcome.LENGTH,
        Outcome.HANDED_OFF,
    ],
)
def test_how_a_request_ended_is_said_once(outcome: Outcome) -> None:
    request = Request("r", RequestSpec([1, 2, 3], SamplingParams()))
    request.transition(RequestEvent.SEATED)
    with pytest.raises(IllegalEvent, match=r"r: IGNORED is illegal in RUNNING"):
        request.end(Outcome.IGNORED)
    assert (request.status, request.outcome) == (RequestStatus.RUNNING, None)
    request.end(outcome)
    for other in Outcome:
        with pytest.raises(IllegalEvent):
            request.end(other)
    assert (request.status, request.outcome) == (RequestStatus.ENDED, outcome)
