"""A request with a grammar waits until the grammar is compiled, and is then scheduled like any other."""

from __future__ import annotations

import pytest

from baton.engine.request import RequestStatus
from baton.errors import InvalidRequest
from baton.messages.node import Leg, Outcome
from tests.doubles.fake_grammar import FakeMatcher
from tests.support.engine_rig import EngineRig

SCHEMA = '{"type": "integer"}'


def matcher() -> FakeMatcher:
    return FakeMatcher([], range(1000))


def test_a_request_waits_for_its_grammar_while_others_run(rig: EngineRig) -> None:
    waiting = rig.add("g", 6, json_schema=SCHEMA, max_tokens=4)
    assert waiting.status is RequestStatus.WAITING_FOR_GRAMMAR
    assert not rig.core.has_work()
    rig.complete("other", 6, max_tokens=2)
    assert rig.reason("other") is Outcome.LENGTH
    assert waiting.status is RequestStatus.WAITING_FOR_GRAMMAR
    by_reason = rig.scheduler.make_stats().num_requests_waiting_by_reason
    assert {reason: count for reason, count in by_reason.items() if count} == {"grammar": 1}

    rig.scheduler.grammar_compiled("g", [matcher()])
    rig.run_right("g")
    assert rig.scheduler.make_stats().num_requests_waiting_by_reason["grammar"] == 0


def test_the_runner_is_given_the_matcher_of_each_sequence(rig: EngineRig) -> None:
    rig.add("g", 6, json_schema=SCHEMA, n=3, max_tokens=3)
    rig.add("plain", 6, max_tokens=3)
    matchers = [matcher() for _ in range(3)]
    rig.scheduler.grammar_compiled("g", matchers)
    given = {}
    while rig.core.has_work():
        decided = rig.scheduler.schedule()
        given.update({new.request_id: new.matcher for new in decided.scheduled_new_reqs})
        rig.commit(decided)
    assert given == {"g": matchers[0], "g~1": matchers[1], "g~2": matchers[2], "plain": None}


@pytest.mark.parametrize("outcome", [Outcome.ABORTED, Outcome.ERROR])
def test_a_request_can_end_while_it_waits_for_its_grammar(rig: EngineRig, outcome: Outcome) -> None:
    rig.add("g", 6, json_schema=SCHEMA)
    (end,) = rig.abort("g", outcome=outcome)
    assert end.outcome is outcome
    rig.scheduler.grammar_compiled("g", [matcher()])
    assert not rig.core.has_work()
    assert sum(rig.scheduler.make_stats().num_requests_waiting_by_reason.values()) == 0


def test_a_decode_leg_loads_its_prompt_only_once_its_grammar_is_compiled(rig: EngineRig) -> None:
    rig.complete("d", 9, leg=Leg.DECODE, json_schema=SCHEMA, max_tokens=3)
    assert not rig.connector.loads
    rig.scheduler.grammar_compiled("d", [matcher()])
    rig.step()
    assert set(rig.connector.loads) == {"d"}
    rig.complete_transfer("d")
    rig.run()
    assert rig.tokens["d"][-2:] == rig.expected("d", 3)[1:]


def test_a_request_that_can_never_fit_does_not_wait_for_its_grammar() -> None:
    rig = EngineRig(num_blocks=4)
    rig.add("g", 100, json_schema=SCHEMA)
    assert rig.reason("g") is Outcome.IGNORED


def test_a_beam_search_with_a_grammar_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="json_schema"):
        EngineRig().add("b", 6, json_schema=SCHEMA, beam_width=2)
