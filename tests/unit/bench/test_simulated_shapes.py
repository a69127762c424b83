"""Simulated nodes of several ranks: times of steps, memory, and what `baton simulate` makes of its options."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from baton.bench.arrangement import Arrangement
from baton.bench.simulator.config import NodeSizes, SimulationConfig
from baton.bench.simulator.shapes import RankFigures, ShapedTimes, _micro_batches
from baton.bench.simulator.simulation import Simulation
from baton.bench.simulator.step_times import FormulaTimes, StepTimes, TableTimes
from baton.bench.workloads.spec import WorkloadSpec
from baton.cli.main import main
from baton.errors import InvalidRequest
from baton.messages.node import Role
from baton.messages.node_model import ONE_RANK, NodeShape
from tests.support.outside import assert_result_as_frozen

FORMULA = FormulaTimes()
TABLE = TableTimes([(64, 0.02), (512, 0.1)], [(1, 0.02), (8, 0.03), (32, 0.08)], 512, 1e-7)
FREE = RankFigures(0, 0, 0, 0)
"""Ranks that lose nothing."""
COSTLY = RankFigures(exchange_ms=2.0, exchange_token_ms=0.01, stage_ms=0.5)


@pytest.mark.parametrize("times", [FORMULA, TABLE], ids=["formula", "table"])
def test_ranks_of_one_stage_divide_every_step(times: StepTimes) -> None:
    free, costly = (ShapedTimes(times, NodeShape(tp=4), figures) for figures in (FREE, COSTLY))
    for step in (([(0, 300)], 0, 0), ([(100, 300), (0, 7)], 5, 4000), ([], 5, 4000)):
        chunks, batch, context = step
        rows = sum(end - begin for begin, end in chunks) + batch
        alone_s = times.step_s(*step)
        assert free.step_s(*step) == pytest.approx(alone_s / 4)
        assert costly.step_s(*step) == pytest.approx(alone_s / 4 + 0.002 + 0.00001 * rows)
        if not chunks:
            assert costly.decode_s(batch, context) == pytest.approx(costly.step_s(*step))


def test_one_sequence_passes_through_the_stages_one_after_the_other() -> None:
    node = ShapedTimes(FORMULA, NodeShape(pp=4), COSTLY)
    assert node.decode_s(1, 1000) == pytest.approx(FORMULA.decode_s(1, 1000) + 4 * 0.0005)
    both = ShapedTimes(FORMULA, NodeShape(2, 4), COSTLY)
    # Each stage has a quarter of the layers, and so of the exchanges.
    alone_s = FORMULA.decode_s(1, 1000) / 2
    assert both.decode_s(1, 1000) == pytest.approx(alone_s + 4 * 0.0005 + 0.002 + 0.00001)


def test_a_batch_fills_the_stages() -> None:
    node = ShapedTimes(FORMULA, NodeShape(pp=2), FREE)
    # Two micro-batches of four sequences: three turns, in each of which a stage reads half of the weights.
    assert node.decode_s(8, 8000) == pytest.approx(3 / 2 * FORMULA.decode_s(4, 4000))


@pytest.mark.parametrize("seed", range(20))
def test_a_step_ends_when_the_last_micro_batch_has_passed_the_last_stage(seed: int) -> None:
    rng = Random(seed)
    figures = replace(COSTLY, exchange_ms=rng.choice([0.0, 3.0]))
    shape = NodeShape(rng.randint(1, 4), rng.randint(1, 5))
    times: StepTimes = FORMULA if rng.random() < 0.5 else TABLE
    begins = [rng.randrange(500) for _ in range(rng.randint(0, 3))]
    chunks = [(begin, begin + rng.randint(1, 200)) for begin in begins]
    batch = rng.randint(0 if chunks else 1, 6)
    context = batch * rng.randint(1, 900)
    rows = sum(end - begin for begin, end in chunks) + batch
    parts = _micro_batches(chunks, batch, min(shape.pp, rows))
    sizes = [sum(end - begin for begin, end in part) + decodes for part, decodes in parts]
    assert sum(sizes) == rows
    assert max(sizes) - min(sizes) <= 1
    assert sum(decodes for _, decodes in parts) == batch
    positions = [place for part, _ in parts for begin, end in part for place in range(begin, end)]
    assert positions == [place for begin, end in chunks for place in range(begin, end)]
    # The naive way: a micro-batch enters a stage when it has left the one before, and the other one has left it.
    free_s = [0.0] * shape.pp
    for (part, decodes), size in zip(parts, sizes, strict=True):
        share = context * decodes / batch if batch else 0.0
        turn_s = times.step_s(part, decodes, share) / shape.num_ranks
        if shape.tp > 1:
            turn_s += (figures.exchange_ms + figures.exchange_token_ms * size) / shape.pp / 1e3
        if shape.pp > 1:
            turn_s += figures.stage_ms / 1e3
        left_s = 0.0
        for stage in range(shape.pp):
            free_s[stage] = left_s = max(left_s, free_s[stage]) + turn_s
    assert ShapedTimes(times, shape, figures).step_s(chunks, batch, context) == pytest.approx(free_s[-1])


@pytest.mark.parametrize("batch", [1, 2, 4, 5, 12])
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_stages_that_are_busy_begin_the_next_step_early(batch: int, pp: int) -> None:
    node = ShapedTimes(FORMULA, NodeShape(2, pp), COSTLY)
    count = min(pp, batch)
    turn_s = node.decode_s(batch, 1000) / (count + pp - 1)
    # The naive way: each micro-batch begins anew when it has left the last stage, and waits for those before it.
    free_s, left_s, ends = [0.0] * pp, [0.0] * count, []
    for _ in range(10):
        for number in range(count):
            at_s = left_s[number]
            for stage in range(pp):
                free_s[stage] = at_s = max(at_s, free_s[stage]) + turn_s
            left_s[number] = at_s
        ends.append(left_s[-1])
    assert ends[0] == pytest.approx(node.decode_s(batch, 1000))
    for before, after in pairwise(ends):
        assert after - before == pytest.approx(node.decode_s(batch, 1000, follows=True))
    alone_s = node.step_s([(0, 300)], batch, 1000)
    assert node.step_s([(0, 300)], batch, 1000, follows=True) < alone_s or pp == 1


def test_a_node_with_stages_fills_them_only_after_an_idle_time() -> None:
    sizes = RankFigures().sizes_of(NodeSizes(), NodeShape(1, 2))
    config = SimulationConfig(Arrangement(0, 1), sizes, message_s=0.0)
    spec = WorkloadSpec(num_prompts=2, request_rate=float("inf"), random_input_len=100, random_output_len=3)
    simulation = Simulation(config, lambda ended: None)
    simulation.run(spec.build())
    first_s = sizes.times.step_s([(0, 100)], 0, 0)
    assert simulation.outcomes.ttft_s[0] == pytest.approx(first_s)
    mixed_s = sizes.times.step_s([(0, 100)], 1, 100, follows=True)
    assert simulation.outcomes.ttft_s[1] == pytest.approx(first_s + mixed_s)


def test_the_default_figures_are_near_the_published_profiles() -> None:
    # simdistserve's profiles of OPT-13B: milliseconds of decode steps by number of GPUs, context and batch.
    for gpus, constant, per_context, per_sequence in (
        (2, 13.29, 3.41e-4, 0.0630),
        (4, 10.26, 1.88e-4, 0.0327),
    ):
        node = ShapedTimes(FORMULA, NodeShape(tp=gpus), RankFigures())
        for batch, context in ((1, 500), (32, 16_000), (90, 40_000)):
            published_s = (constant + per_context * context + per_sequence * batch) / 1e3
            assert node.decode_s(batch, context) == pytest.approx(published_s, rel=0.15)


def test_a_node_of_one_rank_stays_as_it_was() -> None:
    sizes = NodeSizes()
    assert RankFigures().sizes_of(sizes, ONE_RANK) == sizes


def test_weights_are_in_memory_once() -> None:
    sizes = NodeSizes(cache_tokens=1000, kv_bytes_per_token=1e6)
    figures = RankFigures(weight_bytes=26e9)
    assert figures.sizes_of(sizes, NodeShape(2, 2)).cache_tokens == 4 * 1000 + 3 * 26_000
    by_memory = replace(figures, rank_bytes=30e9)
    assert [by_memory.sizes_of(sizes, NodeShape(tp)).cache_tokens for tp in (1, 2, 4)] == [4000, 34_000, 94_000]
    with pytest.raises(InvalidRequest, match=r"1 x 26 GB \(tp1\) do not hold 26 GB of weights and a KV block"):
        replace(figures, rank_bytes=26e9).sizes_of(sizes, ONE_RANK)
    with pytest.raises(InvalidRequest, match="kv-bytes-per-token"):
        by_memory.sizes_of(replace(sizes, kv_bytes_per_token=0.0), ONE_RANK)
    assert figures.sizes_of(replace(sizes, kv_bytes_per_token=0.0), NodeShape(2)).cache_tokens == 2000


def _simulated(config: SimulationConfig) -> Simulation:
    simulation = Simulation(config, lambda ended: None)
    simulation.run(WorkloadSpec(num_prompts=120, request_rate=12.0, random_input_len=500, random_output_len=30).build())
    return simulation


def test_nodes_of_different_shapes_compute_one_request_after_the_other() -> None:
    figures = RankFigures()
    prefill, decode = (figures.sizes_of(NodeSizes(), shape) for shape in (NodeShape(1, 2), NodeShape(2, 1)))
    config = SimulationConfig(Arrangement(1, 1), decode, prefill_sizes=prefill, message_s=0.0)
    simulation = Simulation(config, lambda ended: None)
    simulation.run(WorkloadSpec(num_prompts=1, request_rate=1.0, random_input_len=600, random_output_len=5).build())
    outcomes = simulation.outcomes
    assert outcomes.ttft_s[0] == pytest.approx(prefill.times.step_s([(0, 600)], 0, 0))
    handoff_s = 600 * 819_200 / 25e9 + 1e-3
    decode_s = sum(decode.times.decode_s(1, 600 + place) for place in range(4))
    assert outcomes.e2el_s[0] - outcomes.ttft_s[0] == pytest.approx(handoff_s + decode_s)
    shapes = {role: simulation.nodes[f"{role}-0"].description.shape for role in ("prefill", "decode")}
    assert shapes == {"prefill": NodeShape(1, 2), "decode": NodeShape(2, 1)}
    assert (config.num_ranks, config.sizes_of(Role.PREFILL).cache_tokens) == (4, 127_738)


def test_runs_of_steps_take_as_long_as_single_steps() -> None:
    sizes = RankFigures().sizes_of(NodeSizes(), NodeShape(2, 3))
    config = SimulationConfig(Arrangement(1, 2), sizes)
    runs, steps = (_simulated(replace(config, stepwise=stepwise)).outcomes for stepwise in (False, True))
    assert runs.finished_s.tolist() == pytest.approx(steps.finished_s.tolist())


@pytest.mark.outside
def test_shapes_are_in_the_result_and_goodput_counts_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "--arrangement", "1p2d", "--num-prompts", "20", "--random-input-len", "100"]
    words += ["--random-output-len", "5", "--tp", "2", "--prefill-pp", "2", "--decode-tp", "1"]
    assert main([*words, "-o", "json"]) == 0
    (one,) = json.loads(capsys.readouterr().out)["arrangements"]
    assert (one["gpus"], one["shapes"]) == (6, {"prefill": "tp2 pp2", "decode": "tp1"})
    path = tmp_path / "result.json"
    assert main([*words, "--find-goodput", "--goodput", "ttft:500", "--result-filename", str(path)]) == 0
    assert_result_as_frozen(json.loads(path.read_text()), "simulate_find_goodput")
    shown = capsys.readouterr().out
    assert "1p2d: 6 ranks (prefill tp2 pp2, decode tp1)" in shown
    goodput, per_gpu = (float(word) for word in shown.splitlines()[-1].split()[-2:])
    assert per_gpu == pytest.approx(goodput / 6, rel=0.01)
