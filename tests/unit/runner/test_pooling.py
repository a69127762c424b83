"""Vectors of hidden states: what is taken of a prompt, the order of sums, cuts, lengths and probabilities."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest

from baton.engine.batch import NewRequestData
from baton.engine.runner import KVLayout
from baton.messages.pooling import Activation, Pooling, PoolingParams
from baton.messages.sampling import SamplingParams
from baton.runner.execution.input_batch import flatten
from baton.runner.execution.pooling import Pooler, activated, add_in_order
from baton.runner.execution.request_table import RequestState
from baton.runner.execution.step_results import StepRows

ROWS = np.random.default_rng(3).standard_normal((40, 24)).astype(np.float32)
ROWS *= (10.0 ** (np.arange(40) * 7 % 24 - 12)).astype(np.float32)[:, np.newaxis]
"""Their sums in float64 depend on the order."""


def vector(params: PoolingParams, cuts: list[int], rows: npt.NDArray[np.float32] = ROWS) -> bytes:
    """The vector of a prompt that is computed in chunks which end at `cuts`."""
    pooler, start = Pooler(params), 0
    for stop in (*cuts, len(rows)):
        wanted = pooler.places(start, stop, len(rows))
        pooler.take(wanted.start, rows[wanted.start : wanted.stop])
        start = stop
    return pooler.vector()


@pytest.mark.parametrize("kind", [Pooling.LAST, Pooling.CLS, Pooling.MEAN, Pooling.CLASSIFY])
def test_chunks_change_no_bit(kind: Pooling) -> None:
    params = PoolingParams(kind, activate=False)
    assert len({vector(params, cuts) for cuts in ([], [1], [39], [7, 8, 30])}) == 1


def test_rows_are_added_in_the_order_of_positions() -> None:
    total = np.zeros(24)
    for row in ROWS:
        total = total + row
    assert add_in_order(np.zeros(24), ROWS).tobytes() == total.tobytes()
    for cut in (1, 7, 30):
        in_chunks = add_in_order(add_in_order(np.zeros(24), ROWS[:cut]), ROWS[cut:])
        assert in_chunks.tobytes() == total.tobytes(), cut
    assert add_in_order(np.zeros(24), ROWS[::-1]).tobytes() != total.tobytes(), "another order gives other bits"


def test_a_prompt_that_begins_again_is_summed_anew_and_a_hole_is_noticed() -> None:
    pooler = Pooler(PoolingParams(Pooling.MEAN))
    pooler.take(0, ROWS[:9])
    pooler.take(0, ROWS[:20])
    pooler.take(20, ROWS[20:])
    assert pooler.vector() == vector(PoolingParams(Pooling.MEAN), [])
    with pytest.raises(ArithmeticError, match="before 9 are missing"):
        pooler.take(9, ROWS[9:])
    with pytest.raises(ArithmeticError, match="are missing"):
        Pooler(PoolingParams(Pooling.CLS)).vector()


def test_a_vector_is_cut_before_it_is_normalised() -> None:
    row = np.array([[3, 4, 12]], dtype=np.float32)
    cut = np.frombuffer(vector(PoolingParams(dimensions=2), [], row), "<f4")
    assert cut.tolist() == pytest.approx([0.6, 0.8])
    whole = np.frombuffer(vector(PoolingParams(normalize=False), [], row), "<f4")
    assert whole.tolist() == [3, 4, 12]


@pytest.mark.parametrize(
    ("activation", "expected"),
    [
        ("softmax", [1 / (1 + math.e**2), 1 / (1 + math.e**-2)]),
        ("sigmoid", [1 / (1 + math.e), 1 / (1 + math.e**-1)]),
        ("identity", [-1, 1]),
    ],
)
def test_probabilities(activation: Activation, expected: list[float]) -> None:
    assert activated(np.array([-1.0, 1.0]), activation).tolist() == pytest.approx(expected)
    huge = activated(np.array([-800.0, 800.0]), activation)
    assert np.isfinite(huge).all()


def test_rows_with_logits_come_before_rows_with_hidden_states_alone() -> None:
    layout = KVLayout.uniform(16, 1, 1, 8, "float32")

    def state(name: str, kind: Pooling | None) -> RequestState:
        pooling = None if kind is None else PoolingParams(kind)
        return RequestState(NewRequestData(name, [1] * 5, (), SamplingParams(), [1], 0, pooling=pooling))

    def rows_of(*kinds: tuple[Pooling | None, int]) -> StepRows:
        shares = [state(str(place), kind).share(count) for place, (kind, count) in enumerate(kinds)]
        return StepRows.of(shares, flatten(shares, layout, 4))

    mixed = rows_of((Pooling.MEAN, 3), (None, 5), (Pooling.CLASSIFY, 5), (Pooling.CLS, 5), (Pooling.LAST, 4), (None, 2))
    assert mixed.logits_rows is not None
    assert (mixed.logits_rows.tolist(), mixed.num_logits) == ([7, 12, 0, 1, 2, 13], 2)
    assert mixed.sampled == slice(1)
    assert [(one.start, one.places) for one in mixed.pooled] == [
        (4, slice(1, 2)),
        (0, slice(2, 5)),
        (0, slice(5, 6)),
    ]
    ends = rows_of((Pooling.LAST, 5), (None, 5), (Pooling.LAST, 3), (Pooling.CLASSIFY, 5))
    assert (ends.logits_rows, ends.num_logits) == (None, 3)
    assert np.asarray(ends.sampled).tolist() == [1]
    assert [one.places for one in ends.pooled] == [slice(0, 1), slice(2, 3)]
    assert rows_of((Pooling.LAST, 5)).num_logits == 0, "an embedding needs no head"
