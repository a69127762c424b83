"""Sampled tokens follow their exact probabilities, and depend only on the row, the request and the position."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from baton.errors import InvalidRequest
from baton.messages.sampling import SamplingParams
from baton.runner.execution.philox import philox4x32, uniform
from baton.runner.execution.sampler import SamplingState, distribution, heaviest, process, sample, sample_row

LOGITS = np.array([2.0, 1.0, 0.5, 0.0, -1.0, 1.0, -3.0, 0.25], dtype=np.float32)
DRAWS = 20_000
EOS = frozenset({4})


def state(params: SamplingParams, output: Sequence[int] = (), prompt: Sequence[int] = (6,)) -> SamplingState:
    return SamplingState(params, [*prompt, *output], len(prompt), EOS)


def softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    weights = np.exp(logits.astype(np.float64) - logits.max())
    result: npt.NDArray[np.float64] = weights / weights.sum()
    return result


def frequencies(params: SamplingParams) -> npt.NDArray[np.float64]:
    """The share of each token among DRAWS draws with consecutive seeds, at position 0."""
    counts = Counter(sample_row(LOGITS, state(replace(params, seed=seed))).token_id for seed in range(DRAWS))
    return np.array([counts[token] for token in range(LOGITS.size)]) / DRAWS


def assert_drawn_like(params: SamplingParams, exact: npt.NDArray[np.float64]) -> None:
    """Pearson's chi-squared test; no token without probability may be drawn. Seeds are fixed, so it is not flaky."""
    shares = frequencies(params)
    possible = exact > 0
    assert shares[~possible].sum() == 0
    chi_squared = float((DRAWS * (shares[possible] - exact[possible]) ** 2 / exact[possible]).sum())
    # The 0.999 quantile for up to 7 degrees of freedom is 24.3.
    assert chi_squared < 24.3


# Known answers of the authors' Random123 library, kat_vectors, philox4x32 with 10 rounds.
@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], answer: tuple[int, int, int, int]
) -> None:
    assert philox4x32(counter, key) == answer


def test_uniform_is_a_function_of_seed_and_position() -> None:
    assert uniform(5, 3) == uniform(5, 3)
    assert len({uniform(seed, position) for seed in (-1, 0, 1, 2**40) for position in range(50)}) == 200
    assert uniform(-1, 0) == uniform(2**64 - 1, 0)
    numbers = np.array([uniform(9, position) for position in range(DRAWS)])
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    # Kolmogorov-Smirnov against the uniform distribution, 0.999 quantile.
    steps = np.arange(1, DRAWS + 1) / DRAWS
    assert np.abs(np.sort(numbers) - steps).max() < 1.95 / math.sqrt(DRAWS)


def test_draws_follow_the_softmax() -> None:
    assert_drawn_like(SamplingParams(), softmax(LOGITS))


def test_the_temperature_scales_the_probabilities() -> None:
    assert_drawn_like(SamplingParams(temperature=0.5), softmax(LOGITS / np.float32(0.5)))


def test_a_tiny_temperature_is_greedy_and_finite() -> None:
    assert sample_row(LOGITS, state(SamplingParams(temperature=1e-40))).token_id == 0


def test_top_k_keeps_the_best_and_breaks_ties_by_id() -> None:
    exact = softmax(LOGITS)
    exact[[2, 3, 4, 5, 6, 7]] = 0  # tokens 1 and 5 tie for the second place
    assert_drawn_like(SamplingParams(top_k=2), exact / exact.sum())


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    probabilities = softmax(LOGITS)
    best_three = probabilities[[0, 1, 5]].sum()
    kept, _ = distribution(LOGITS, SamplingParams(top_p=float(best_three) - 1e-4))
    assert kept.tolist() == [0, 1, 5]
    kept, _ = distribution(LOGITS, SamplingParams(top_p=float(best_three) + 1e-4))
    assert kept.tolist() == [0, 1, 5, 2]
    exact = np.zeros_like(probabilities)
    exact[[0, 1, 5]] = probabilities[[0, 1, 5]] / best_three
    assert_drawn_like(SamplingParams(top_p=float(best_three) - 1e-4), exact)
    assert distribution(LOGITS, SamplingParams(top_p=1e-9))[0].tolist() == [0]


def test_top_p_may_reach_beyond_the_first_candidates() -> None:
    flat = np.zeros(5000, dtype=np.float32)
    kept, weights = distribution(flat, SamplingParams(top_p=0.5))
    assert kept.tolist() == list(range(2500))
    assert weights.sum() == 2500


def test_top_p_counts_within_top_k() -> None:
    # Renormalised over the best two, token 0 alone holds 73 %.
    assert distribution(LOGITS, SamplingParams(top_k=2, top_p=0.7))[0].tolist() == [0]
    assert distribution(LOGITS, SamplingParams(top_k=2, top_p=0.75))[0].tolist() == [0, 1]


def test_min_p_is_relative_to_the_best() -> None:
    exact = softmax(LOGITS)
    exact[exact < 0.2 * exact.max()] = 0
    assert (exact > 0).sum() == 4
    assert_drawn_like(SamplingParams(min_p=0.2), exact / exact.sum())


def test_top_n_sigma_counts_from_the_largest_logit() -> None:
    params = SamplingParams(temperature=0.5, top_n_sigma=1.0)
    exact = softmax(LOGITS / 0.5)
    exact[LOGITS.max() - LOGITS > LOGITS.std()] = 0
    assert 1 < (exact > 0).sum() < LOGITS.size
    assert_drawn_like(params, exact / exact.sum())


def test_top_n_sigma_ignores_tokens_that_a_grammar_excludes() -> None:
    row = np.array([3.0, 2.0, 1.0, -np.inf, -np.inf], dtype=np.float32)
    token_ids, weights = distribution(row, SamplingParams(top_n_sigma=1.3))
    assert token_ids[weights > 0].tolist() == [0, 1]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("row", [[1.0] * 5, [5.0, -np.inf, -np.inf]])
def test_top_n_sigma_keeps_all_of_equal_logits(row: list[float]) -> None:
    logits = np.array(row, dtype=np.float32)
    _, weights = distribution(logits, SamplingParams(top_n_sigma=0.1))
    assert (weights > 0).tolist() == (logits > -np.inf).tolist()


def test_penalties_equal_a_calculation_by_hand() -> None:
    params = SamplingParams(repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25)
    row = process(LOGITS, state(params, output=(0, 0, 4), prompt=(1, 6, 6)))
    # Token 0: 2.0 / 2 - 2 * 0.5 - 0.25; 1: prompt only; 4: -1.0 * 2 - 0.5 - 0.25; 6: prompt only, negative.
    assert row.tolist() == [-0.25, 0.5, 0.5, 0.0, -2.75, 1.0, -6.0, 0.25]
    assert LOGITS[0] == 2.0


def test_frequency_and_presence_look_at_the_output_only() -> None:
    params = SamplingParams(frequency_penalty=0.5, presence_penalty=0.25)
    assert process(LOGITS, state(params, prompt=(0, 1, 2))).tolist() == LOGITS.tolist()


def test_a_logit_bias_is_added_to_its_token() -> None:
    params = SamplingParams(temperature=0.0, logit_bias={6: 10.0, 0: -100.0})
    assert process(LOGITS, state(params)).tolist() == [-98.0, 1.0, 0.5, 0.0, -1.0, 1.0, 7.0, 0.25]
    assert sample_row(LOGITS, state(params)).token_id == 6


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("temperature", [0.0, 1e-45, 1.0])
def test_a_bias_beyond_float32_means_always_or_never(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, repetition_penalty=1e-320, seed=3)
    always, never = {6: 1e39, 0: 1e38}, dict.fromkeys((0, 1, 2, 3, 4, 5, 7), -1e300)
    for bias in (always, never):
        assert sample_row(LOGITS, state(replace(params, logit_bias=bias), output=(6, 1))).token_id == 6


@pytest.mark.filterwarnings("error")
def test_a_bias_does_not_allow_a_barred_stop_token() -> None:
    params = SamplingParams(min_tokens=2, stop_token_ids=frozenset({0}), logit_bias={0: 1e39, 4: 1e39, 5: 50.0})
    row = process(LOGITS, state(params, output=(1,)))
    assert np.flatnonzero(row == -np.inf).tolist() == [0, 4]
    assert sample_row(LOGITS, state(params, output=(1,))).token_id == 5


def test_min_tokens_bars_every_stop_until_it_is_reached() -> None:
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=frozenset({0}))
    assert np.flatnonzero(np.isinf(process(LOGITS, state(params, output=(1,))))).tolist() == [0, 4]
    assert sample_row(LOGITS, state(params, output=(1,))).token_id == 1
    assert sample_row(LOGITS, state(params, output=(1, 1))).token_id == 0
    ignoring = replace(params, ignore_eos=True)
    assert np.flatnonzero(np.isinf(process(LOGITS, state(ignoring)))).tolist() == [0]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_allowed_tokens_are_drawn_whatever_their_bias(temperature: float) -> None:
    params = SamplingParams(
        temperature=temperature, seed=3, allowed_token_ids=(2, 6), logit_bias={0: 1e39, 1: 1e38}, repetition_penalty=2.0
    )
    assert np.flatnonzero(process(LOGITS, state(params)) > -np.inf).tolist() == [2, 6]
    drawn = {sample_row(LOGITS, state(replace(params, seed=seed))).token_id for seed in range(2000)}
    assert drawn == ({2} if temperature == 0.0 else {2, 6})


@pytest.mark.parametrize(
    ("output", "excluded"),
    [
        ((), [3]),
        ((5,), [1, 3]),
        ((5, 1), [3]),
        ((5, 2), [0, 3]),
        ((2,), [3]),
        ((0, 5, 2), [0, 3]),
        ((5, 2, 0), [3]),
    ],
)
def test_a_bad_word_is_not_completed(output: tuple[int, ...], excluded: list[int]) -> None:
    params = SamplingParams(bad_words_token_ids=((3,), (5, 1), (5, 2, 0)))
    for prompt in ((6,), (5,), (6, 5)):
        # What is in the prompt is not part of a word.
        row = process(LOGITS, state(params, output, prompt))
        assert np.flatnonzero(row == -np.inf).tolist() == excluded


@pytest.mark.parametrize(
    ("params", "said"),
    [
        (SamplingParams(allowed_token_ids=(4,), min_tokens=1), "min_tokens: .*, with allowed_token_ids"),
        (SamplingParams(allowed_token_ids=(3,), bad_words_token_ids=((3,),)), "allowed_token_ids: .*, with bad_words"),
        (SamplingParams(bad_words_token_ids=tuple((one,) for one in range(8))), "bad_words: leaves no token"),
        (SamplingParams(logit_bias=dict.fromkeys(range(8), -1e39)), "logit_bias: leaves no token"),
    ],
)
def test_a_request_that_excludes_all_tokens_is_invalid(params: SamplingParams, said: str) -> None:
    results = sample(np.stack([LOGITS] * 2), [state(params), state(SamplingParams(seed=1))])
    assert isinstance(results[0].error, InvalidRequest)
    assert re.match(said, str(results[0].error))
    assert results[1].error is None


def test_greedy_takes_the_lowest_id_of_a_tie() -> None:
    tied = np.array([[0.0, 3.0, 1.0, 3.0]], dtype=np.float32)
    assert sample(tied, [state(SamplingParams(temperature=0.0))])[0].token_id == 1


def test_logprobs_are_of_the_raw_logits() -> None:
    params = SamplingParams(
        temperature=0.0,
        logit_bias={6: 10.0},
        allowed_token_ids=(6, 7),
        bad_words_token_ids=((0,),),
        logprobs=3,
    )
    drawn = sample_row(LOGITS, state(params))
    expected = np.log(softmax(LOGITS))
    assert drawn.token_id == 6
    assert drawn.logprobs is not None
    assert drawn.logprobs.logprob == pytest.approx(expected[6], abs=1e-6)
    assert drawn.logprobs.rank == 8
    assert [token for token, _ in drawn.logprobs.top] == [0, 1, 5]
    assert [value for _, value in drawn.logprobs.top] == pytest.approx(expected[[0, 1, 5]], abs=1e-6)


def test_zero_logprobs_ask_for_the_drawn_token_alone() -> None:
    drawn = sample_row(LOGITS, state(SamplingParams(temperature=0.0, logprobs=0)))
    assert drawn.logprobs is not None
    assert (drawn.logprobs.rank, list(drawn.logprobs.top)) == (1, [])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_fails_alone(bad: float) -> None:
    broken = LOGITS.copy()
    broken[3] = bad
    results = sample(np.stack([LOGITS, broken, LOGITS]), [state(SamplingParams(seed=1))] * 3)
    assert str(results[1].error) == "the model produced non-finite logits"
    assert results[0] == results[2] == sample_row(LOGITS, state(SamplingParams(seed=1)))


def test_a_row_does_not_depend_on_other_rows() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(40, 3000)).astype(np.float32)
    kinds = [
        SamplingParams(temperature=0.0),
        SamplingParams(seed=3),
        SamplingParams(seed=4, top_p=0.9, temperature=0.7),
        SamplingParams(seed=5, top_k=50, min_p=0.01, repetition_penalty=1.3, logprobs=5),
        SamplingParams(seed=6, top_n_sigma=1.5),
    ]
    states = [state(kinds[row % 5], output=range(row)) for row in range(40)]
    together = sample(logits, states)
    assert together == [sample(logits[row : row + 1], [states[row]])[0] for row in range(40)]


def test_the_position_moves_the_draw() -> None:
    params = SamplingParams(seed=8)
    drawn = [sample_row(LOGITS, state(params, output=[0] * position)).token_id for position in range(50)]
    assert len(set(drawn)) > 3


def test_top_logprobs_are_ordered_as_by_a_stable_sort() -> None:
    rng = np.random.default_rng(1)
    for trial in range(60):
        size = int(rng.integers(1, 3000))
        row = rng.normal(size=size).astype(np.float32)
        if trial % 3 == 0:
            row = np.round(row, 1)  # many ties
        if trial % 4 == 0:
            row[rng.integers(0, size, size // 3)] = -0.0
            row[rng.integers(0, size, size // 3)] = 0.0
        if trial % 5 == 0:
            row[rng.integers(0, size, size // 4)] = -np.inf
        count = int(rng.integers(1, size + 1))
        assert heaviest(row, count).tolist() == np.argsort(-row, kind="stable")[:count].tolist()
