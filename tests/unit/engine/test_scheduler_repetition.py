"""Repetition detection: an output that repeats itself ends with an error at the same token on every path."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from baton.engine.batch import ModelRunnerOutput
from baton.engine.constraints import RepetitionDetector
from baton.engine.request import Request
from baton.errors import InvalidRequest
from baton.messages.node import Leg, Outcome
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import MAX_PATTERN_SIZE, RepetitionDetection, SamplingParams
from tests.support.engine_rig import SOURCE, EngineRig, prompt_of

RULE = RepetitionDetection(max_pattern_size=3, min_pattern_size=2, min_count=3)
TOKENS = [9, 9, 5, 1, 2, 3, 1, 2, 3, 1, 2, 3, 4, 4]
"""At token 11, 1 2 3 has come three times in a row; earlier repetitions are too short or too few."""
END = 12


def naive(tokens: Sequence[int], rule: RepetitionDetection) -> int:
    for size in range(rule.min_pattern_size, rule.max_pattern_size + 1):
        tail = tokens[len(tokens) - size * rule.min_count :]
        if len(tokens) >= size * rule.min_count and list(tail) == list(tail[:size]) * rule.min_count:
            return size
    return 0


@pytest.mark.parametrize("seed", range(20))
def test_incremental_detection_equals_a_naive_search(seed: int) -> None:
    rng = Random(seed)
    rule = RepetitionDetection(rng.randint(2, 6), rng.randint(1, 2), rng.randint(2, 4))
    detector = RepetitionDetector(rule)
    tokens: list[int] = []
    found = 0
    while len(tokens) < 2000:
        # Several tokens at once, as for a request with given output; only the last one counts.
        tokens += [rng.randint(0, 1) for _ in range(rng.choice([1, 1, 1, 5]))]
        assert detector.repeated_pattern_size(tokens) == naive(tokens, rule)
        found += bool(naive(tokens, rule))
    assert found


def test_the_detector_keeps_no_more_than_the_longest_pattern() -> None:
    detector = RepetitionDetector(RepetitionDetection(8))
    tokens = list(range(10_000))
    assert detector.repeated_pattern_size(tokens) == 0
    assert len(detector._positions) == 8


def drive(rig: EngineRig) -> None:
    """Run a request to its end; every request draws TOKENS."""
    while rig.core.has_work():
        decided = rig.scheduler.schedule()
        sampled = {}
        for name in decided.num_scheduled_tokens:
            request = rig.scheduler.requests[name]
            if name in rig.scheduler.decoding or request.num_computed_tokens >= request.num_tokens:
                sampled[name] = [TOKENS[request.num_output_tokens]]
        rig.commit(decided, ModelRunnerOutput(sampled))


def check_end(rig: EngineRig, name: str = "r") -> None:
    end = rig.ends[name]
    assert rig.tokens[name] == TOKENS[:END]
    assert end.error == "the output repeats itself: its last 3 tokens came 3 times in a row"
    assert end.outcome is Outcome.REPETITION
    assert not rig.core.has_work()
    assert rig.scheduler.make_stats().free_blocks == rig.scheduler.make_stats().total_blocks


def test_an_output_that_repeats_itself_ends_with_an_error(rig: EngineRig) -> None:
    rig.add("r", 6, max_tokens=14, repetition_detection=RULE)
    rig.add("free", 6, max_tokens=14)
    drive(rig)
    assert rig.tokens["free"] == TOKENS
    assert rig.reason("free") is Outcome.LENGTH
    check_end(rig)


@pytest.mark.parametrize("given", range(1, END))
def test_a_continued_output_ends_at_the_same_token(rig: EngineRig, given: int) -> None:
    request = Request(
        "r",
        RequestSpec(prompt_of(6), SamplingParams(max_tokens=14, repetition_detection=RULE)),
        output_token_ids=TOKENS[:given],
    )
    rig.scheduler.add_request(request)
    rig.tokens["r"] = TOKENS[:given]
    drive(rig)
    check_end(rig)


@pytest.mark.parametrize("given", [1, 5, END - 1])
def test_a_decode_leg_ends_at_the_same_token(rig: EngineRig, given: int) -> None:
    params = SamplingParams(max_tokens=14, repetition_detection=RULE)
    output = TOKENS[: given - 1]
    rig.scheduler.add_request(
        Request("r", RequestSpec(prompt_of(6), params), leg=Leg.DECODE, kv_source=SOURCE, output_token_ids=output)
    )
    rig.tokens["r"] = [*output]
    rig.step()
    rig.transfer(arrived={"r": [TOKENS[given - 1]]})
    drive(rig)
    check_end(rig)


def test_the_first_token_of_a_prefill_leg_may_complete_a_repetition(rig: EngineRig) -> None:
    params = SamplingParams(max_tokens=14, repetition_detection=RULE)
    rig.scheduler.add_request(
        Request("r", RequestSpec(prompt_of(6), params), leg=Leg.PREFILL, output_token_ids=TOKENS[: END - 1])
    )
    rig.tokens["r"] = TOKENS[: END - 1]
    drive(rig)
    assert rig.tokens["r"] == TOKENS[:END]
    assert rig.ends["r"].outcome is Outcome.REPETITION


def test_preemption_does_not_change_where_a_repetition_ends() -> None:
    rig = EngineRig(num_blocks=7)
    rig.add("old", 8, max_tokens=14)
    rig.add("r", 6, max_tokens=14, repetition_detection=RULE)
    drive(rig)
    assert rig.requests["r"].num_preemptions
    assert rig.tokens["old"] == TOKENS
    check_end(rig)


def test_min_tokens_does_not_prevent_it_and_a_stop_token_takes_precedence(rig: EngineRig) -> None:
    rig.add("r", 6, max_tokens=14, min_tokens=12, repetition_detection=RULE)
    rig.add("stops", 6, max_tokens=14, min_tokens=12, stop_token_ids=frozenset({3}), repetition_detection=RULE)
    drive(rig)
    assert rig.reason("stops") is Outcome.STOP
    check_end(rig)


def test_a_repetition_ends_all_sequences_of_the_request(rig: EngineRig) -> None:
    rig.add("r", 6, max_tokens=14, n=2, repetition_detection=RULE)
    drive(rig)
    assert {name: end.outcome for name, end in rig.ends.items()} == dict.fromkeys(("r", "r~1"), Outcome.REPETITION)
    assert rig.scheduler.make_stats().free_blocks == rig.scheduler.make_stats().total_blocks
    assert rig.requests["r"].outcome is Outcome.REPETITION


@pytest.mark.parametrize(
    "rule",
    [
        RepetitionDetection(0),
        RepetitionDetection(2, 3),
        RepetitionDetection(MAX_PATTERN_SIZE + 1),
        RepetitionDetection(3, 0),
        RepetitionDetection(3, 1, 1),
    ],
)
def test_rules_out_of_bounds_are_refused(rule: RepetitionDetection) -> None:
    with pytest.raises(InvalidRequest, match="repetition_detection"):
        EngineRig().add("r", 6, repetition_detection=rule)


def test_repetition_detection_with_beams_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="repetition_detection: does not go with beam_width"):
        EngineRig().add("r", 6, beam_width=3, repetition_detection=RULE)
