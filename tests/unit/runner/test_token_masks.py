"""Tokens that a grammar does not allow are never drawn, and other requests are not affected."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from baton.engine.batch import NewRequestData
from baton.errors import BatonError, InvalidRequest
from baton.messages.sampling import SamplingParams
from baton.runner.execution.input_batch import RequestState
from baton.runner.execution.mask_budget import ALONE_S, BURST_S, COSTLY_S, SHARE, MaskBudget
from baton.runner.execution.sampler import SamplingState, sample
from baton.runner.execution.token_masks import Masks, TokenMasks
from tests.doubles.fake_grammar import FakeMatcher

VOCAB = 75
"""The size is not a multiple of 32, so the last word of a mask is not full."""
EOS = frozenset({3})
WITH_GRAMMAR = SamplingParams(json_schema="{}")
SETTINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, logprobs=3),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=2.0, top_k=5),
    SamplingParams(temperature=0.7, top_p=0.3),
    SamplingParams(temperature=1e-45),
    SamplingParams(temperature=1.0, min_p=0.9),
    SamplingParams(repetition_penalty=1.9, frequency_penalty=2.0, presence_penalty=-2.0),
    SamplingParams(logit_bias={0: 100.0, 1: 1e39, 74: -50.0}),
    SamplingParams(temperature=0.0, logit_bias={0: 1e39}),
]


def mask_of(allowed: Collection[int]) -> npt.NDArray[np.int32]:
    mask = np.zeros(-(-VOCAB // 32), dtype=np.int32)
    FakeMatcher([], allowed).fill(mask)
    return mask


def rows(count: int, seed: int = 1) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0.0, 4.0, (count, VOCAB)).astype(np.float32)


@pytest.mark.parametrize("params", SETTINGS, ids=str)
@pytest.mark.parametrize("allowed", [{5}, {74}, {3, 31, 32, 64}, set(range(2, 75))], ids=len)
def test_only_allowed_tokens_are_drawn_and_reported(params: SamplingParams, allowed: set[int]) -> None:
    logits, mask = rows(40), mask_of(allowed)
    states = [SamplingState(replace(params, seed=seed), [6, 0, 5, 74], 1, EOS, mask) for seed in range(40)]
    drawn = sample(logits, states)
    assert all(result.error is None for result in drawn)
    assert {result.token_id for result in drawn} <= allowed
    for row, result in zip(logits, drawn, strict=True):
        if result.logprobs is not None:
            reported = {token for token, _ in result.logprobs.top}
            assert reported <= allowed
            assert len(reported) == min(3, len(allowed))
            among = row[sorted(allowed)].astype(np.float64)
            expected = row[result.token_id] - np.log(np.exp(among - among.max()).sum()) - among.max()
            assert result.logprobs.logprob == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("params", SETTINGS, ids=str)
def test_a_mask_that_allows_everything_changes_nothing(params: SamplingParams) -> None:
    logits, mask = rows(20), mask_of(range(VOCAB))
    tokens = [6, 0, 5, 74]
    masked = sample(logits, [SamplingState(replace(params, seed=seed), tokens, 1, EOS, mask) for seed in range(20)])
    assert masked == sample(logits, [SamplingState(replace(params, seed=seed), tokens, 1, EOS) for seed in range(20)])


def test_a_request_without_an_allowed_token_fails_alone() -> None:
    logits = rows(2)
    barred = replace(WITH_GRAMMAR, logit_bias={5: -1e39})
    states = [SamplingState(barred, [6], 1, EOS, mask_of({5})), SamplingState(WITH_GRAMMAR, [6], 1, EOS, mask_of({5}))]
    failed, drawn = sample(logits, states)
    assert isinstance(failed.error, InvalidRequest)
    assert str(failed.error) == "json_schema: leaves no token that may follow, with logit_bias"
    assert drawn.token_id == 5


def state(request_id: str, matcher: FakeMatcher | None, params: SamplingParams = WITH_GRAMMAR) -> RequestState:
    return RequestState(NewRequestData(request_id, [1, 2], [7], params, [1], 0, matcher))


def test_matchers_get_all_drawn_tokens_including_earlier_attempts() -> None:
    masks = TokenMasks(VOCAB)
    matcher = FakeMatcher([{7}, {8, 9}, {10}], EOS)
    request = state("a", matcher)
    filled, faults = masks.fill([state("plain", None, SamplingParams()), request])
    assert not faults
    assert filled["a"].tolist() == mask_of({8, 9}).tolist()
    # The same position once more, as after a lost step.
    assert masks.fill([request])[0]["a"].tolist() == mask_of({8, 9}).tolist()
    request.append_token(9)
    request.append_token(10)
    assert masks.fill([request])[0]["a"].tolist() == mask_of(EOS).tolist()
    assert matcher.tokens == [7, 9, 10]


def test_each_request_has_a_mask_of_its_own_and_fails_alone() -> None:
    masks = TokenMasks(VOCAB)
    good = state("good", FakeMatcher([{7}, {8}], EOS))
    other = state("other", FakeMatcher([{7}, {70}], EOS))
    complex_ = state("complex", FakeMatcher([{7}, {8}], EOS, too_complex_at=1))
    foreign = state("foreign", FakeMatcher([{6}], EOS))
    missing = state("missing", None)
    filled, faults = masks.fill([complex_, good, foreign, other, missing])
    assert {name: row.tolist() for name, row in filled.items()} == {
        "good": mask_of({8}).tolist(),
        "other": mask_of({70}).tolist(),
    }
    assert set(faults) == {"complex", "foreign", "missing"}
    assert all(str(fault).startswith("json_schema:") for fault in faults.values())
    assert [name for name, fault in faults.items() if isinstance(fault, InvalidRequest)] == ["complex"]


def test_costly_grammars_have_one_budget_and_no_other_request_is_harmed() -> None:
    now = 0.0
    masks = TokenMasks(VOCAB, least_beside=99, budget=MaskBudget(lambda: now))
    costly = [state(f"costly {n}", FakeMatcher([{7}], EOS, mean_seconds=BURST_S / 2)) for n in range(4)]
    cheap = [state(f"cheap {n}", FakeMatcher([{7}], EOS, mean_seconds=COSTLY_S)) for n in range(600)]

    def ended() -> list[str]:
        filled, faults = step(masks, [*costly, *cheap])
        assert filled.keys() | faults.keys() == {one.request_id for one in (*costly, *cheap)}
        assert all(isinstance(fault, InvalidRequest) and fault.field == "json_schema" for fault in faults.values())
        return list(faults)

    # Ordinary grammars take more than the burst, too, and are not counted.
    assert ended() == ["costly 2", "costly 3"]
    now += BURST_S / SHARE / 4
    assert ended() == ["costly 1", "costly 2", "costly 3"]
    now += 1000.0
    assert ended() == ["costly 2", "costly 3"]


def test_a_mask_that_takes_very_long_does_not_use_up_the_budget_for_ever() -> None:
    now = 0.0
    masks = TokenMasks(VOCAB, budget=MaskBudget(lambda: now))
    requests = [state("costly", FakeMatcher([{7}], EOS, mean_seconds=100.0)), state("plain", None, SamplingParams())]
    assert not step(masks, requests)[1]
    assert step(masks, requests)[1]
    now += 1.01 * BURST_S / SHARE
    assert not step(masks, requests)[1]


def test_a_costly_grammar_that_is_computed_alone_uses_up_no_budget() -> None:
    masks = TokenMasks(VOCAB, budget=MaskBudget(lambda: 0.0))
    cost = 2 * BURST_S / 3
    alone = [state(name, FakeMatcher([{7}], EOS, mean_seconds=cost)) for name in ("a#1", "a#1~1", "a#1~2")]
    for _ in range(3):
        assert not step(masks, alone)[1], "sequences of one request are not others"
    beside = [*alone, state("b#1", None, SamplingParams())]
    (fault,) = step(masks, beside)[1].values()
    assert "beside the other requests that this node computes" in str(fault)
    assert not step(masks, alone)[1]
    # A request whose prompt is computed is another one, too, though it samples nothing.
    with masks.filling(alone, ["a#1", "b#1"]):
        pass
    assert masks.fill(alone)[1].keys() == {"a#1", "a#1~1", "a#1~2"}


def test_who_comes_next_waits_for_a_bounded_step_of_a_request_that_is_alone() -> None:
    masks = TokenMasks(VOCAB, least_beside=99, budget=MaskBudget(lambda: 0.0))
    alone = [state(f"a~{n}", FakeMatcher([{7}], EOS, mean_seconds=ALONE_S / 2)) for n in range(1, 5)]
    faults = step(masks, alone)[1]
    assert faults.keys() == {"a~3", "a~4"}
    assert "too much for the sequences of this request" in str(faults["a~3"])


def step(masks: TokenMasks, requests: Sequence[RequestState]) -> tuple[Masks, dict[str, BatonError]]:
    """A step that computes these requests alone, all of which sample."""
    with masks.filling(requests, [one.request_id for one in requests]):
        pass
    return masks.fill(requests)


def test_without_constrained_requests_there_is_nothing_to_fill() -> None:
    assert TokenMasks(VOCAB).fill([state("plain", None, SamplingParams())]) == ({}, {})


def test_masks_are_filled_beside_the_step() -> None:
    """By a thread that has not begun before the block, and is done behind it."""
    masks = TokenMasks(VOCAB, least_beside=2)
    good = state("good", FakeMatcher([{7}, {8}, {9}], EOS))
    complex_ = state("complex", FakeMatcher([{7}, {8}], EOS, too_complex_at=1))
    begun, computed = threading.Event(), threading.Event()
    waiting = state("waiting", WaitingMatcher(begun, computed))
    requests = [good, state("plain", None, SamplingParams()), complex_, waiting]
    with masks.filling(requests, []):
        assert begun.wait(30), "another thread fills"
        computed.set()
    filled, faults = masks.fill(requests)
    assert {name: row.tolist() for name, row in filled.items()} == {
        "good": mask_of({8}).tolist(),
        "waiting": mask_of({8}).tolist(),
    }
    assert set(faults) == {"complex"}
    # Further positions of the same step, as of a draft that is right, are filled where they are asked for.
    good.append_token(8)
    assert masks.fill([good])[0]["good"].tolist() == mask_of({9}).tolist()


def test_a_step_that_fails_leaves_no_matcher_in_use() -> None:
    masks = TokenMasks(VOCAB, least_beside=2)
    begun, computed = threading.Event(), threading.Event()
    matcher = WaitingMatcher(begun, computed)
    requests = [state("waiting", matcher), state("other", FakeMatcher([{7}, {8}], EOS))]

    def fail() -> None:
        with masks.filling(requests, []):
            assert begun.wait(30)
            computed.set()
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fail()
    assert matcher.is_done
    requests[1].append_token(8)
    assert masks.fill(requests[1:])[0]["other"].tolist() == mask_of(EOS).tolist(), "nothing is left of that step"


def test_an_error_of_the_thread_is_that_of_the_step() -> None:
    masks = TokenMasks(VOCAB, least_beside=2)
    requests = [state("broken", BrokenMatcher([{7}], EOS)), state("other", FakeMatcher([{7}], EOS))]
    with pytest.raises(ZeroDivisionError), masks.filling(requests, []):
        pass


class WaitingMatcher(FakeMatcher):
    """Takes until the step has been computed."""

    def __init__(self, begun: threading.Event, computed: threading.Event) -> None:
        super().__init__([{7}, {8}], EOS)
        self._begun, self._computed = begun, computed
        self.is_done = False

    def fill(self, mask: npt.NDArray[np.int32]) -> None:
        self._begun.set()
        assert self._computed.wait(30)
        super().fill(mask)
        self.is_done = True


class BrokenMatcher(FakeMatcher):
    def fill(self, mask: npt.NDArray[np.int32]) -> None:
        raise ZeroDivisionError
