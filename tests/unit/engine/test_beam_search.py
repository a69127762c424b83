"""Beam search: the pure decision, and the engine that computes its beams with shared blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from baton.engine.sequences.beams import BeamSearch
from baton.errors import DuplicateRequest, InvalidRequest
from baton.messages.node import Leg, Outcome
from tests.doubles.fake_runner import expected_beams
from tests.support.engine_rig import EngineRig, prompt_of

VOCAB = 1000


def expected(
    prompt: Sequence[int], width: int, max_tokens: int, stop_ids: frozenset[int] = frozenset()
) -> list[list[int]]:
    return expected_beams(prompt, BeamSearch(width, stop_ids, max_tokens), vocab_size=VOCAB)


def found(rig: EngineRig, count: int, request_id: str = "r") -> list[list[int]]:
    names = [request_id, *(f"{request_id}~{index}" for index in range(1, count))]
    assert all(rig.reason(name) in (Outcome.STOP, Outcome.LENGTH) for name in names)
    return [rig.tokens[name] for name in names]


def assert_nothing_left(rig: EngineRig) -> None:
    assert not rig.scheduler.has_requests()
    assert not rig.core.has_work()
    assert rig.scheduler.make_stats().free_blocks == rig.config.num_blocks - 1


def test_the_best_continuations_of_all_beams_are_continued() -> None:
    search = BeamSearch(2, frozenset({9}), 3)
    assert search.num_candidates == 4
    search.advance([[(1, -0.1), (2, -0.2), (3, -0.3), (4, -4.0)]])
    assert [beam.token_ids for beam in search.running] == [(1,), (2,)]
    search.advance([[(5, -1.0), (6, -1.5), (7, -3.0), (8, -3.0)], [(9, -0.1), (5, -0.5), (6, -3.0), (7, -9.0)]])
    assert [beam.token_ids for beam in search.finished] == [(2, 9)]
    assert search.finished[0].score == pytest.approx(-0.3 / 2)
    assert [(beam.token_ids, beam.parent) for beam in search.running] == [((2, 5), 1), ((1, 5), 0)]
    assert not search.is_over
    search.advance([[(1, -1.0), (2, -2.0)], [(3, -0.1), (4, -0.2)]])
    assert search.is_over
    assert [beam.token_ids for beam in search.finished] == [(2, 9), (1, 5, 3)]


def test_beams_share_their_common_history() -> None:
    search = BeamSearch(2, frozenset(), 9)
    search.advance([[(1, -0.1), (2, -9.0), (3, -10.0), (4, -11.0)]])
    (one, _) = search.running
    search.advance([[(5, -0.1), (6, -0.2)], [(7, -0.3), (8, -0.4)]])
    assert [beam.token_ids for beam in search.running] == [(1, 5), (1, 6)]
    assert all(beam.before is one for beam in search.running)


def test_an_ended_beam_outside_the_best_is_no_result() -> None:
    search = BeamSearch(2, frozenset({9}), 5)
    search.advance([[(1, -0.1), (2, -0.2), (9, -0.3), (4, -4.0)]])
    assert search.finished == []
    assert [beam.token_ids for beam in search.running] == [(1,), (2,)]


def test_early_stopping_is_over_when_enough_is_finished() -> None:
    for early in (True, False):
        search = BeamSearch(2, frozenset({8, 9}), 5, length_penalty=2.0, early_stopping=early)
        search.advance([[(1, -0.1), (9, -0.3), (2, -0.35), (3, -4.0), (4, -5.0), (5, -6.0)]])
        assert not search.is_over
        search.advance([[(8, -0.1), (5, -0.5), (4, -9.0)], [(3, -1.0), (7, -8.0)]])
        assert [beam.token_ids for beam in search.finished] == [(1, 8), (9,)]
        assert search.is_over is early, "-0.6 over 2 squared may still beat -0.3"


@pytest.mark.parametrize("num_prompt_tokens", [1, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("width", [2, 5, 8])
def test_the_engines_beam_search_equals_a_naive_one(num_prompt_tokens: int, caching: bool, width: int) -> None:
    rig = EngineRig(enable_prefix_caching=caching)
    prompt = prompt_of(num_prompt_tokens, 3)
    rig.complete("r", prompt, beam_width=width, n=width, max_tokens=11)
    assert found(rig, width) == expected(prompt, width, 11)
    assert_nothing_left(rig)


def test_stop_tokens_end_beams() -> None:
    stops = frozenset(range(120))
    for seed in range(6):
        rig = EngineRig()
        prompt = prompt_of(6, seed)
        rig.complete("r", prompt, beam_width=3, n=3, max_tokens=12, eos=stops)
        assert found(rig, 3) == expected(prompt, 3, 12, stops)
        for name in ("r", "r~1", "r~2"):
            is_stop = rig.tokens[name][-1] in stops
            assert rig.reason(name) is (Outcome.STOP if is_stop else Outcome.LENGTH)


def test_only_the_best_beams_are_returned(rig: EngineRig) -> None:
    prompt = prompt_of(6, 1)
    rig.complete("r", prompt, beam_width=4, n=1, max_tokens=5)
    assert found(rig, 1) == expected(prompt, 4, 5)[:1]
    assert set(rig.ends) == {"r"}


def test_beams_share_their_history_and_copy_what_they_write_to() -> None:
    rig = EngineRig(enable_prefix_caching=False)
    rig.begin("r", 10, beam_width=4, max_tokens=9)
    output = rig.scheduler.schedule()
    assert len(output.num_scheduled_tokens) == 4
    assert set(output.num_scheduled_tokens.values()) == {1}, "nothing of the history is computed again"
    assert len(output.blocks_to_copy) == 4
    assert len({copy.source for copy in output.blocks_to_copy}) == 1
    manager = rig.scheduler.kv_cache_manager
    tables = [manager.block_ids(name) for name in output.num_scheduled_tokens]
    assert len({tuple(table[:2]) for table in tables}) == 1
    assert len({table[2] for table in tables}) == 4
    assert manager.pool.accounts().owned == 2 + 4, "the beam that they continue has let go"
    rig.commit(output)
    rig.run()
    assert_nothing_left(rig)


@pytest.mark.parametrize(
    "limits",
    [
        {"num_blocks": 10},
        {"max_num_seqs": 2},
        {"max_num_batched_tokens": 8},
        {"max_num_seqs": 2, "long_prefill_token_threshold": 3},
    ],
)
@pytest.mark.parametrize("caching", [True, False])
def test_few_blocks_or_seats_change_no_result(limits: dict[str, Any], caching: bool) -> None:
    rig = EngineRig(enable_prefix_caching=caching, **limits)
    prompt = prompt_of(9, 2)
    rig.add("r", prompt, beam_width=6, n=6, max_tokens=14)
    rig.add("other", 5, max_tokens=14)
    rig.run(3000)
    assert found(rig, 6) == expected(prompt, 6, 14)
    assert rig.tokens["other"] == rig.expected("other", 14)
    assert_nothing_left(rig)


def test_a_beam_search_does_not_recompute_a_transferred_prompt() -> None:
    rig = EngineRig(enable_prefix_caching=False)
    prompt = prompt_of(10, 4)
    rig.complete("p", prompt, leg=Leg.PREFILL, beam_width=3, max_tokens=6)
    assert rig.reason("p") is Outcome.HANDED_OFF
    assert rig.tokens["p"] == [], "a search has no first token yet"
    rig.begin("r", prompt, leg=Leg.DECODE, beam_width=3, n=2, max_tokens=6)
    rig.complete_transfer("r")
    output = rig.scheduler.schedule()
    assert list(output.num_scheduled_tokens.values()) == [1]
    rig.commit(output)
    rig.connector.leased.clear()
    rig.transfer(released=["p"])
    rig.run()
    assert found(rig, 2) == expected(prompt, 3, 6)[:2]
    assert_nothing_left(rig)


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_an_abort_ends_all_beams_with_one_output(rig: EngineRig, steps: int) -> None:
    rig.add("r", 6, beam_width=4, n=3, max_tokens=50)
    rig.steps(steps)
    with pytest.raises(DuplicateRequest):
        rig.scheduler.add_request(rig.requests["r"])
    (ended,) = rig.abort("r")
    assert (ended.attempt.request_id, ended.outcome) == ("r", Outcome.ABORTED)
    assert rig.abort("r") == []
    rig.run()
    assert_nothing_left(rig)


def test_one_failed_beam_fails_the_request(rig: EngineRig) -> None:
    rig.add("r", 6, beam_width=4, n=3, max_tokens=50)
    rig.add("bystander", 5, max_tokens=9)
    rig.steps(3)
    beams = [name for name, request in rig.scheduler.requests.items() if request.beams is not None]
    rig.runner.failures[beams[1]] = "non-finite logits"
    rig.run()
    assert (rig.reason("r"), rig.ends["r"].error) == (Outcome.ERROR, "non-finite logits")
    assert set(rig.ends) == {"r", "bystander"}
    assert rig.tokens["bystander"] == rig.expected("bystander", 9)
    assert_nothing_left(rig)


def test_a_runner_that_raises_fails_the_beam_search(rig: EngineRig) -> None:
    rig.add("r", 6, beam_width=4, n=3, max_tokens=50)
    rig.steps(3)
    rig.runner.raise_next = RuntimeError("broken")
    rig.run()
    assert rig.reason("r") is Outcome.ERROR
    assert_nothing_left(rig)


def test_a_transfer_that_fails_ends_the_search(rig: EngineRig) -> None:
    rig.begin("r", 10, leg=Leg.DECODE, beam_width=4, max_tokens=7)
    (ended,) = rig.transfer(failed={"r": "peer gone"})
    assert ended.outcome is Outcome.KV_LOST
    rig.run()
    assert not rig.scheduler.has_requests()


def test_the_models_maximum_length_ends_a_beam_search() -> None:
    rig = EngineRig(max_model_len=12)
    prompt = prompt_of(8, 5)
    rig.complete("r", prompt, beam_width=3, n=3, max_tokens=50)
    assert found(rig, 3) == expected(prompt, 3, 4)


@pytest.mark.parametrize(
    ("field", "params"),
    [("beam_width", {"beam_width": 1}), ("beam_width", {"beam_width": 9}), ("n", {"beam_width": 3, "n": 4})],
)
def test_beam_parameters_out_of_bounds_are_refused(rig: EngineRig, field: str, params: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=field):
        rig.add("r", 4, **params)
    assert not rig.scheduler.has_requests()
