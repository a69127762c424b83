"""A decoding request moves to another node, whose decode leg takes it over; until then it goes on, whatever fails."""

from __future__ import annotations

from typing import Any

import pytest

from baton.engine.connector import KVTransferOutput
from baton.engine.kv_cache.cache_groups import first_seen_token
from baton.engine.request import Request, RequestStatus
from baton.errors import TransferCause
from baton.messages.ids import AttemptKey
from baton.messages.node import Leg, MoveOut, Outcome
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams
from tests.doubles.fake_runner import prompt_slots
from tests.support.engine_rig import SOURCE, EngineRig, prompt_of

TO = AttemptKey("r", 2)
LIMITS: list[dict[str, Any]] = [{}, {"windows": (None, 6)}, {"windows": (5, 2), "keeps_states": True}]


def move(rig: EngineRig, request_id: str = "r", *, by: int = 60, tokens: int = 0, to: AttemptKey = TO) -> None:
    """Let a request move that has so many tokens at its router; 0: all that it has."""
    request = rig.requests[request_id]
    rig.scheduler.move(request_id, MoveOut(request.attempt, to, tokens or request.num_tokens, by))


@pytest.mark.parametrize("limits", LIMITS)
def test_what_the_other_node_reads_stays_until_it_has_read_it(limits: dict[str, Any]) -> None:
    rig = EngineRig(num_blocks=96, **limits)
    request = rig.begin("r", 13, max_tokens=40)
    rig.steps(5)
    move(rig)
    start = rig.connector.moves["r"]
    assert start == 18, "of the last of its 19 tokens there is no KV"
    rig.steps(12)
    rig.connector.may_be_cut.add("r")
    rig.run()
    assert rig.reason("r") is Outcome.HANDED_OFF
    assert rig.tokens["r"] == rig.expected("r", 19), "the step after which it is cut counts"
    num_computed = request.num_tokens - 1
    blocks, size, groups = rig.connector.finished["r"][0], rig.config.block_size, len(rig.config.windows)
    assert len(blocks) == -(-num_computed // size) * groups
    for group, window in enumerate(rig.config.windows):
        seen = first_seen_token(start, window) // size if window is not None else 0
        assert [block != 0 for block in blocks[group::groups]] == [at >= seen for at in range(len(blocks) // groups)]
        slots = rig.runner.read_slots(blocks, num_computed, group)
        right = prompt_slots(request.token_ids(0, num_computed), group)
        places = [at for at in rig.runner.held_positions(num_computed, group) if at >= seen * size]
        assert [slots[at] for at in places] == [right[at] for at in places]
    rig.begin("other", 9, max_tokens=2)
    assert rig.scheduler.make_stats().leased_blocks == sum(block != 0 for block in blocks)
    rig.transfer(released=["r"])
    assert rig.scheduler.make_stats().leased_blocks == 0
    assert not rig.scheduler._state.moving


@pytest.mark.parametrize("limits", LIMITS)
def test_what_arrives_is_gone_on_with(limits: dict[str, Any]) -> None:
    rig = EngineRig(num_blocks=96, on_transfer_failure="recompute", **limits)
    prompt = prompt_of(13)
    rig.complete("before", prompt[:9], max_tokens=1)
    rig.add("r", prompt, leg=Leg.DECODE, given=3, max_tokens=30, cut_by=30)
    request = rig.requests["r"]
    rig.step()
    load = rig.connector.loads["r"]
    assert (load.num_local_tokens, load.num_external_tokens) == (8, 22)
    tokens = rig.expected("r", 10)[3:]
    for group in range(len(rig.config.windows)):
        slots = prompt_slots([*prompt, *rig.expected("r", 9)], group)
        rig.runner.write_slots(load.block_ids, slots[8:], 8, group)
    rig.tokens["r"] = rig.expected("r", 10)
    rig.transfer(arrived={"r": tokens})
    assert request.num_external_tokens == 14, "those of the tokens that came with it, but the last one, are among them"
    rig.run_right("r")
    assert (request.cut_by, request.seen_from) == (0, 0)


def test_a_stream_that_does_not_arrive_is_not_computed_here() -> None:
    rig = EngineRig(on_transfer_failure="recompute")
    assert rig.scheduler.may_run_ahead()
    rig.begin("r", 13, leg=Leg.DECODE, given=3, max_tokens=30, cut_by=30)
    assert not rig.scheduler.may_run_ahead(), "it is to be in the first step that begins when it is here"
    rig.fail_transfer("r", num_valid_blocks=2, cause=TransferCause.LEASE_LOST)
    assert rig.reason("r") is Outcome.KV_LOST, "it goes on at the other node"
    assert rig.scheduler.may_run_ahead()
    rig.transfer(released=["r"])


def test_a_move_that_can_not_begin_is_refused_with_its_reason() -> None:
    rig = EngineRig()
    rig.begin("several", 9, n=2, max_tokens=4)
    rig.begin("r", 9, max_tokens=20)
    rig.add("waits", 9, max_tokens=4)
    num_tokens = rig.requests["r"].num_tokens
    wrong: list[tuple[str, int, int, str]] = [
        ("several", 10, 60, "several sequences"),
        ("waits", 10, 60, "does not decode now"),
        ("gone", 10, 60, "not here any more"),
        ("r", 9, 60, "is to move with"),
        ("r", num_tokens + 1, 60, "is to move with"),
        ("r", num_tokens, num_tokens, "is to move with"),
    ]
    for number, (request_id, num_known, cut_by, why) in enumerate(wrong):
        to = AttemptKey(request_id, number)
        rig.scheduler.move(request_id, MoveOut(TO, to, num_known, cut_by))
        assert why in rig.connector.moves_ended[to]
    move(rig)
    move(rig, to=AttemptKey("r", 99))
    assert "already" in rig.connector.moves_ended[AttemptKey("r", 99)]
    assert list(rig.connector.moves) == ["r"]
    rig.run_right("r", "several", "several~1", "waits")


def test_a_stream_whose_reader_is_behind_at_the_bound_goes_on() -> None:
    rig = EngineRig()
    rig.begin("r", 9, max_tokens=20)
    move(rig, by=15)
    rig.steps(4)
    assert not rig.connector.moves_ended
    rig.step()
    assert "behind" in rig.connector.moves_ended[TO]
    rig.connector.may_be_cut.add("r")
    rig.run_right("r")
    assert rig.requests["r"].seen_from == 0


def test_a_move_that_its_router_ends_is_over() -> None:
    rig = EngineRig(windows=(5,))
    rig.begin("r", 9, max_tokens=20)
    move(rig)
    rig.steps(6)
    held = rig.scheduler.kv_cache_manager.pool.accounts().owned
    rig.scheduler.update_from_kv_transfer(KVTransferOutput(moves_ended=[TO, AttemptKey("other", 1)]))
    assert "aborted" in rig.connector.moves_ended[TO]
    rig.step()
    assert rig.scheduler.kv_cache_manager.pool.accounts().owned < held, "what no query sees is freed again"
    rig.run_right("r")


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_stream_that_is_preempted_moves_no_more(mode: str) -> None:
    rig = EngineRig(num_blocks=9, num_host_blocks=16, preemption_mode=mode)
    rig.begin("first", 6, max_tokens=14)
    rig.begin("r", 6, max_tokens=14)
    move(rig)
    while rig.requests["r"].status is RequestStatus.RUNNING:
        rig.step()
    assert "preempted" in rig.connector.moves_ended[TO]
    rig.run_right("first", "r")


def test_no_step_is_decided_ahead_while_a_stream_moves() -> None:
    rig = EngineRig()
    rig.begin("r", 9, max_tokens=20)
    assert rig.scheduler.may_run_ahead()
    ahead = [rig.scheduler.schedule(), rig.scheduler.schedule()]
    move(rig)
    assert rig.connector.moves["r"] == 9, "what the steps in flight compute is not there yet"
    assert not rig.scheduler.may_run_ahead()
    rig.connector.may_be_cut.add("r")
    rig.commit(ahead[0])
    assert rig.reason("r") is None, "the next step writes to the block that would be read"
    rig.commit(ahead[1])
    assert rig.reason("r") is Outcome.HANDED_OFF


@pytest.mark.parametrize(
    ("leg", "given", "cut_by"), [(Leg.WHOLE, 3, 20), (Leg.DECODE, 3, 16), (Leg.DECODE, 0, 20), (Leg.DECODE, 3, 99)]
)
def test_only_a_decode_leg_of_a_stream_has_a_bound_that_it_can_reach(leg: Leg, given: int, cut_by: int) -> None:
    source = SOURCE if leg is Leg.DECODE else None
    spec = RequestSpec(prompt_of(13), SamplingParams(max_tokens=30))
    with pytest.raises(ValueError, match="cut_by"):
        Request("r", spec, leg=leg, kv_source=source, output_token_ids=[7] * given, cut_by=cut_by)
