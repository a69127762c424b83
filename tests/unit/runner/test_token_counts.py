"""Token counts that are kept between steps equal, bit for bit, counts of the whole request in each step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.batch import ForkedRequestData, NewRequestData
from baton.messages.sampling import SamplingParams
from baton.messages.spans import Span
from baton.runner.execution.request_table import RequestState
from baton.runner.execution.sampler import SamplingState, process

VOCAB = 40
TOKENS = st.integers(0, VOCAB - 1)
PENALTIES = st.builds(
    SamplingParams,
    temperature=st.just(0.0),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.37, -1.1]),
    presence_penalty=st.sampled_from([0.0, 0.21, -0.5]),
)


def counted_anew(logits: npt.NDArray[np.float32], state: RequestState) -> npt.NDArray[np.float32]:
    """The penalties, computed from the whole history."""
    params, row = state.sampling_params, logits.copy()
    if params.repetition_penalty != 1.0:
        seen = np.unique(state.token_ids)
        penalty = np.float32(params.repetition_penalty)
        row[seen] = np.where(row[seen] > 0, row[seen] / penalty, row[seen] * penalty)
    seen, counts = np.unique(state.token_ids[state.num_prompt_tokens :], return_counts=True)
    row[seen] -= np.float32(params.frequency_penalty) * counts.astype(np.float32)
    row[seen] -= np.float32(params.presence_penalty)
    return row


def assert_as_counted_anew(state: RequestState) -> None:
    logits = np.random.default_rng(state.num_tokens).normal(size=VOCAB).astype(np.float32)
    kept = SamplingState(
        state.sampling_params, state.token_ids, state.num_prompt_tokens, frozenset(), None, None, state.counts
    )
    expected = counted_anew(logits, state).tobytes()
    assert process(logits, kept).tobytes() == expected
    assert process(logits, replace(kept, counts=None)).tobytes() == expected


@settings(max_examples=60)
@given(
    params=PENALTIES,
    prompt=st.lists(TOKENS, min_size=1, max_size=20),
    output=st.lists(TOKENS, max_size=10),
    steps=st.lists(st.tuples(st.sampled_from(["append", "replace", "fork"]), TOKENS), max_size=40),
)
def test_kept_counts_equal_counts_of_the_whole_history(
    params: SamplingParams, prompt: list[int], output: list[int], steps: list[tuple[str, int]]
) -> None:
    state = RequestState(NewRequestData("one", prompt, output, params, [1], 0))
    assert_as_counted_anew(state)
    for kind, token_id in steps:
        if kind == "fork":
            parent, shared = state, state.num_prompt_tokens + state.num_output_tokens // 2
            state = parent.fork(ForkedRequestData("two", "one", shared, token_id, [1], 0))
            # Tokens that the fork draws must not count for the other request.
            state.append_token(token_id)
            assert_as_counted_anew(parent)
        elif kind == "replace" and state.num_output_tokens:
            state.replace_last_token(token_id)
        else:
            state.append_token(token_id)
        assert_as_counted_anew(state)


def test_no_counts_are_kept_without_penalties() -> None:
    state = RequestState(NewRequestData("one", [1, 2], [3], SamplingParams(), [1], 0))
    assert state.counts is None


def test_placeholders_in_spans_are_not_counted() -> None:
    spans = [Span(0, 3, "a" * 64), Span(5, 2, "b" * 64)]
    params = SamplingParams(repetition_penalty=1.5)
    state = RequestState(NewRequestData("r", [0, 0, 0, 7, 8, 0, 0, 9], [7, 3], params, [1, 2], 0, spans=spans))
    assert state.counts is not None
    assert state.counts.seen().tolist() == [3, 7, 8, 9]
    assert [found.tolist() for found in state.counts.in_output()] == [[3, 7], [1, 1]]
    state.append_token(0)
    assert state.counts.in_output()[0].tolist() == [3, 7, 0]
