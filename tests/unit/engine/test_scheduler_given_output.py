"""Requests that come with output tokens of an earlier attempt, in one engine."""

from __future__ import annotations

import pytest

from baton.engine.request import Request
from baton.messages.node import Leg, Outcome
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams
from tests.support.engine_rig import EngineRig


@pytest.mark.parametrize("num_prompt_tokens", [3, 4, 9])
@pytest.mark.parametrize("given", [1, 4, 7])
def test_a_whole_request_continues_behind_its_given_output(num_prompt_tokens: int, given: int) -> None:
    rig = EngineRig(max_num_batched_tokens=4, max_num_seqs=2)
    request = rig.add("r", num_prompt_tokens, max_tokens=10, given=given)
    rig.run_right("r")
    assert rig.reason("r") is Outcome.LENGTH
    events = [(kind, value) for kind, _, value in rig.events() if kind != "chunk_computed"]
    assert events == [("queued", num_prompt_tokens + given), ("scheduled", 0), ("first_token", 0), ("finished", 10)]
    assert request.num_preemptions == 0


def test_the_first_outputs_say_how_much_of_the_prompt_was_cached(rig: EngineRig) -> None:
    rig.complete("before", 6, max_tokens=9)
    rig.add("r", rig.requests["before"].prompt_token_ids, max_tokens=12, given=7)
    first = rig.step()[0]
    assert rig.requests["r"].num_cached_tokens == 12
    assert first.num_cached_tokens == 6, "what was generated is not the prompt's"


def test_a_prefill_leg_computes_given_output_and_hands_off_with_the_next_token() -> None:
    rig = EngineRig(max_num_batched_tokens=8)
    rig.complete("p", 10, leg=Leg.PREFILL, given=7, max_tokens=20)
    block_ids, num_tokens = rig.connector.leased["p"]
    assert (len(block_ids), num_tokens) == (5, 17)
    rig.check_offered("p", block_ids, num_tokens)
    assert rig.tokens["p"] == rig.expected("p", 8)
    assert rig.reason("p") is Outcome.HANDED_OFF


def test_a_prefill_leg_whose_next_token_is_the_last_one_ends(rig: EngineRig) -> None:
    rig.complete("p", 10, leg=Leg.PREFILL, given=7, max_tokens=8)
    assert rig.reason("p") is Outcome.LENGTH


def test_a_decode_leg_loads_given_output_and_reports_only_later_tokens(rig: EngineRig) -> None:
    rig.begin("d", 10, leg=Leg.DECODE, given=7, max_tokens=12)
    load = rig.connector.loads["d"]
    assert (len(load.block_ids), load.num_external_tokens) == (5, 17)
    rig.complete_transfer("d")
    (first,) = rig.step()
    assert (first.first_index, len(first.new_token_ids)) == (7, 2)
    rig.run_right("d")


def test_a_decode_leg_whose_kv_does_not_arrive_may_compute_prompt_and_given_output() -> None:
    rig = EngineRig(on_transfer_failure="recompute")
    rig.begin("d", 10, leg=Leg.DECODE, given=7, max_tokens=12)
    rig.transfer(failed={"d": "peer gone"})
    rig.run_right("d")


def test_given_output_that_leaves_no_room_is_refused() -> None:
    rig = EngineRig(max_model_len=16)
    rig.add("r", 10, given=6, max_tokens=20)
    assert rig.reason("r") is Outcome.IGNORED


@pytest.mark.parametrize("params", [SamplingParams(n=2), SamplingParams(beam_width=2)])
def test_requests_of_several_sequences_refuse_given_output(params: SamplingParams) -> None:
    with pytest.raises(ValueError, match="one sequence"):
        Request("r", RequestSpec([1, 2], params), output_token_ids=[3])
