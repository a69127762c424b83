"""Workloads: iterations give the same requests, arrivals are vLLM's, and prompts share the pieces of the trace."""

from __future__ import annotations

import itertools
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.bench.workloads.spec import DATASETS, WorkloadSpec
from baton.bench.workloads.synthetic import MultiTurn, RandomLengths, SharedPrefixes, sharegpt_like
from baton.bench.workloads.trace import AZURE, MOONCAKE, BrokenTraceLine, Trace, TraceFormat, TraceScale
from baton.bench.workloads.workload import (
    Arrivals,
    GammaArrivals,
    Piece,
    RampArrivals,
    SteadyArrivals,
    Synthetic,
    UnpacedArrivals,
    WorkloadRequest,
    piece_tokens,
    unique_piece,
)
from baton.errors import InvalidRequest

VOCAB = 997
UNSCALED = TraceScale()
AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


@given(st.integers(0, 2**64 - 1), st.integers(1, 700), st.integers(1, 700), st.integers(1, 1 << 20))
def test_a_name_always_stands_for_the_same_tokens(hash_id: int, some: int, more: int, vocab_size: int) -> None:
    short, long = sorted((some, more))
    tokens = piece_tokens(Piece(hash_id, long), vocab_size)
    assert tokens[:short].tolist() == piece_tokens(Piece(hash_id, short), vocab_size).tolist()
    assert tokens.min() >= 0
    assert tokens.max() < vocab_size


def test_tokens_are_uniformly_distributed_and_differ_between_names() -> None:
    pieces = [piece_tokens(Piece(hash_id, 512), VOCAB) for hash_id in range(400)]
    counts = np.bincount(np.concatenate(pieces), minlength=VOCAB)
    expected = 512 * 400 / VOCAB
    chi_squared = float(np.square(counts - expected).sum() / expected)
    assert abs(chi_squared - VOCAB) < 5 * np.sqrt(2 * VOCAB)
    assert len({tuple(piece[:16]) for piece in pieces}) == 400


def test_unique_names_differ_from_all_names_of_traces() -> None:
    names = {unique_piece(1, seed, index).hash_id for seed in range(3) for index in range(1000)}
    assert len(names) == 3000
    assert min(names) >= 1 << 63


@given(st.floats(0.01, 1e4), st.floats(0.05, 20), st.integers(1, 500), st.integers(0, 99))
def test_the_last_arrival_is_at_count_over_rate(rate: float, burstiness: float, count: int, seed: int) -> None:
    times = GammaArrivals(rate, burstiness).times(count, np.random.default_rng(seed))
    assert (np.diff(times) >= 0).all()
    assert times[-1] == pytest.approx(count / rate)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_standard_deviation_of_their_burstiness(burstiness: float) -> None:
    gaps = np.diff(GammaArrivals(10.0, burstiness).times(40_000, np.random.default_rng(0)))
    assert gaps.mean() == pytest.approx(0.1, rel=0.02)
    assert gaps.std() == pytest.approx(0.1 / np.sqrt(burstiness), rel=0.05)


@pytest.mark.parametrize("is_exponential", [False, True])
def test_a_ramp_starts_and_ends_at_its_rates(is_exponential: bool) -> None:
    ramp = RampArrivals(10.0, 100.0, is_exponential, burstiness=1e6)
    gaps = np.diff(ramp.times(1000, np.random.default_rng(0)))
    assert 1 / gaps[0] == pytest.approx(10.0, rel=0.05)
    assert 1 / gaps[-1] == pytest.approx(100.0, rel=0.05)
    assert 1 / gaps[499] == pytest.approx(10 * np.sqrt(10) if is_exponential else 55, rel=0.05)


def test_an_even_ramp_has_the_gaps_of_its_rates() -> None:
    times = RampArrivals(2.0, 8.0, burstiness=float("inf")).times(3, np.random.default_rng(0))
    assert times.tolist() == pytest.approx([1 / 2, 1 / 2 + 1 / 5, 1 / 2 + 1 / 5 + 1 / 8])


@pytest.mark.parametrize("arrivals", [GammaArrivals(5.0), SteadyArrivals(5.0), UnpacedArrivals()])
def test_a_workload_is_the_same_in_every_iteration_and_differs_with_the_seed(arrivals: Arrivals) -> None:
    lengths = RandomLengths(100, 20, 0.5)
    workload = Synthetic(lengths, arrivals, 50, seed=3)
    assert list(workload) == list(workload)
    assert len(list(workload)) == len(workload) == 50
    prompts = {tuple(request.token_ids(VOCAB)) for seed in (3, 4) for request in Synthetic(lengths, arrivals, 50, seed)}
    assert len(prompts) == 100


def test_random_lengths_fill_their_range() -> None:
    requests = list(Synthetic(RandomLengths(100, 20, 0.5), SteadyArrivals(1.0), 4000))
    assert {request.input_length for request in requests} == set(range(50, 151))
    assert {request.output_length for request in requests} == set(range(10, 31))


def test_sharegpt_like_lengths_have_the_cited_means() -> None:
    requests = list(Synthetic(sharegpt_like(), SteadyArrivals(1.0), 20_000))
    assert np.mean([request.input_length for request in requests]) == pytest.approx(755.5, rel=0.02)
    assert np.mean([request.output_length for request in requests]) == pytest.approx(200.3, rel=0.02)
    assert max(request.input_length + request.output_length for request in requests) <= 2048


def test_prompts_share_only_their_prefixes() -> None:
    lengths = SharedPrefixes(3, prefix_length=40, suffix_length=24, output_length=8)
    prompts = [request.token_ids(VOCAB) for request in Synthetic(lengths, SteadyArrivals(1.0), 60)]
    assert len({tuple(prompt[:40]) for prompt in prompts}) == 3
    assert len({tuple(prompt[40:]) for prompt in prompts}) == 60


def test_a_turn_starts_with_the_prompt_of_the_turn_before() -> None:
    workload = MultiTurn(SteadyArrivals(2.0), 3, 4, first_length=30, turn_length=10, output_length=5, think_s=1.0)
    requests = list(workload)
    assert len(requests) == len(workload) == 12
    assert [request.index for request in requests] == list(range(12))
    for before, after in itertools.pairwise(requests):
        if after.turn:
            prompt = before.token_ids(VOCAB)
            assert after.token_ids(VOCAB)[: len(prompt)] == prompt
            assert after.input_length == before.input_length + 15
            assert after.session == before.session
            assert after.think_s > 0


@pytest.mark.parametrize("dataset", [name for name in DATASETS if name not in ("mooncake", "azure", "azure_day")])
def test_a_spec_makes_the_same_workload_after_serialization(dataset: str) -> None:
    spec = WorkloadSpec(dataset=dataset, num_prompts=12, random_input_len=30, random_output_len=4, seed=5)
    again = WorkloadSpec.from_json(json.loads(json.dumps(spec.to_json(), allow_nan=False)))
    assert again == spec
    assert list(again.build()) == list(spec.build())
    assert len(list(spec.build())) == 12


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"request_rate": -1.0}, "--request-rate"),
        ({"request_rate": float("nan")}, "--request-rate"),
        ({"burstiness": 0.0}, "--burstiness"),
        ({"length_scale": 0.0}, "--length-scale"),
        ({"dataset": "azure", "dataset_path": "x", "request_rate": 5.0}, "--time-scale"),
        ({"dataset": "mooncake", "dataset_path": "x", "ramp_up_strategy": "linear"}, "--time-scale"),
    ],
)
def test_an_invalid_load_is_refused_with_the_flags_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        replace(WorkloadSpec(), **changes).build()


def mooncake_line(timestamp: float, tokens: int, hash_ids: Any, output_length: Any = 9) -> str:
    fields = {"timestamp": timestamp, "input_length": tokens, "output_length": output_length, "hash_ids": hash_ids}
    return json.dumps(fields) + "\n"


def read(trace_format: TraceFormat, text: str, scale: TraceScale = UNSCALED, **options: Any) -> list[WorkloadRequest]:
    with tempfile.NamedTemporaryFile("w", suffix=".trace") as file:
        file.write(text)
        file.flush()
        return list(Trace(Path(file.name), trace_format, scale, **options))


@settings(max_examples=40)
@given(st.floats(0.01, 2), st.floats(0.1, 50), st.integers(1, 3000))
def test_prompts_of_a_scaled_trace_share_the_same_blocks(length: float, time: float, tokens: int) -> None:
    whole = tokens // 512
    ids = list(range(100, 100 + whole))
    mine, others = [*ids, 1], [*ids, 2]
    text = mooncake_line(1000, tokens, mine) + mooncake_line(3000, tokens, others)
    first, second = read(MOONCAKE, text, TraceScale(time, length))
    assert first.arrival_s == 0
    assert second.arrival_s == pytest.approx(2 / time)
    prompts = first.token_ids(VOCAB), second.token_ids(VOCAB)
    for request, prompt in zip((first, second), prompts, strict=True):
        assert request.input_length == max(1, round(tokens * length)) == len(prompt)
    shared = min(first.input_length, max(1, round(512 * length)) * whole)
    assert prompts[0][:shared] == prompts[1][:shared]


def test_prompts_without_hash_ids_share_nothing() -> None:
    text = AZURE_HEADER + "2023-11-16 18:15:59.9805900,374,44\n2023-11-16 18:16:00.9951690,396,109\n"
    first, second = read(AZURE, text)
    assert second.arrival_s == pytest.approx(1.014579)
    assert (first.input_length, first.output_length, second.input_length) == (374, 44, 396)
    assert first.token_ids(VOCAB)[:8] != second.token_ids(VOCAB)[:8]


def test_lengths_and_the_number_of_requests_can_be_limited() -> None:
    text = "".join(mooncake_line(at, 2000, [1, 2, 3, at]) for at in range(5, 9))
    requests = read(MOONCAKE, text, TraceScale(max_input=700, max_output=2), limit=3)
    assert [(request.input_length, request.output_length) for request in requests] == [(700, 2)] * 3
    assert requests[0].pieces == (Piece(1, 512), Piece(2, 188))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("7", "not a JSON object"),
        ('{"timestamp": 1, "input_length": 3}', "output_length is missing"),
        (mooncake_line(1, 0, []), "input_length is 0"),
        (mooncake_line(1, 5, [-1]), "a hash id is -1"),
        (mooncake_line(1, 5, ["x"]), "a hash id is not a whole number"),
        (mooncake_line(1, 5, 3), "hash_ids is not a list"),
        (mooncake_line(1, 5, [], True), "output_length is not a whole number"),
        (mooncake_line(float("nan"), 5, []), "timestamp is nan"),
        (mooncake_line(0.5, 5, []), "its timestamp is earlier than that of the line before"),
    ],
)
def test_an_error_names_the_broken_mooncake_line(line: str, message: str) -> None:
    text = mooncake_line(1, 5, []) + line.strip() + "\n" + mooncake_line(2, 5, [])
    with pytest.raises(BrokenTraceLine, match=rf"\.trace:2: .*{message}"):
        read(MOONCAKE, text)
    assert len(read(MOONCAKE, text, skip_broken=True)) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("2023-11-16 18:15:46.6,374", "there are 2 fields"),
        ("yesterday,374,44", "TIMESTAMP is 'yesterday'"),
        ("2023-11-16 18:15:99.0,374,44", "TIMESTAMP is"),
        ("2023-11-16 18:15:nan,374,44", "TIMESTAMP is"),
        ("2023-11-16 18:15:46.6,0,44", "ContextTokens is 0"),
        ("2023-11-16 18:15:46.6,3.5,44", "ContextTokens is '3.5'"),
        ("2023-11-16 18:15:46.6,3,-4", "GeneratedTokens is '-4'"),
    ],
)
def test_an_error_names_the_broken_azure_line(line: str, message: str) -> None:
    with pytest.raises(BrokenTraceLine, match=rf"\.trace:2: .*{message}"):
        read(AZURE, AZURE_HEADER + line + "\n")


def test_a_trace_of_another_format_is_refused() -> None:
    with pytest.raises(BrokenTraceLine, match=r"\.trace:1: the header"):
        read(AZURE, mooncake_line(1, 5, []))


@given(st.text(max_size=200))
def test_any_text_is_read_or_skipped_as_broken(text: str) -> None:
    for trace_format, head in ((MOONCAKE, ""), (AZURE, AZURE_HEADER)):
        assert all(request.input_length > 0 for request in read(trace_format, head + text, skip_broken=True))
