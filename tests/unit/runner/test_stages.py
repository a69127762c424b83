"""Stages of a model: their layers, what they exchange, and what the ranks of a stage read of a micro-batch."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from baton.engine.batch import NewRequestData, SchedulerOutput
from baton.engine.runner import STATE_WINDOW, LayerGeometry, LayerState
from baton.errors import ConfigError
from baton.messages.pooling import PoolingParams
from baton.messages.sampling import SamplingParams
from baton.runner.backends.ranks.host_ranks import SharedFiles
from baton.runner.execution.input_batch import FlatBatch
from baton.runner.loading import load_runner
from baton.runner.model.attention import UnsupportedAttention
from baton.runner.model.probe_attention import ProbeAttention
from baton.runner.model.random_model import write_random_model
from baton.runner.model.stage import LayerReport, StageReport, entries_of_stages, layers_found, layers_of_entries
from baton.runner.parts import Stage
from baton.runner.pipelined_runner import divide
from baton.runner.ranks.micro_batch import MicroBatch
from baton.runner.ranks.step_slot import StepSlot
from baton.runner.spec import TorchSpec
from tests.doubles.fake_stages import FakeStages
from tests.support.listed_types import LISTED_TYPES
from tests.support.load_with import load_tiny


@pytest.mark.parametrize("count", range(1, 9))
def test_each_layer_is_in_one_stage_and_the_last_stage_has_no_more_than_others(count: int) -> None:
    for num_layers in range(count, 30):
        ranges = [Stage(index, count).layers(num_layers) for index in range(count)]
        assert [layer for layers in ranges for layer in layers] == list(range(num_layers))
        sizes = [len(layers) for layers in ranges]
        assert max(sizes) - min(sizes) <= 1
        assert sizes[-1] == min(sizes)


def test_more_stages_than_layers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"3 layers can't be divided among 4 stages; at most 3 would do"):
        load_tiny(tmp_path, "llama", pipeline_parallel=4, start_stages=FakeStages.start)


def test_a_head_may_be_narrower_than_the_layers(tmp_path: Path) -> None:
    """OPT-350m projects the rows behind its last layer: embeddings are narrower than what stages hand on."""
    narrow: dict[str, Any] = {"seed": 5, "config": {"word_embed_proj_dim": 32}, "start_stages": FakeStages.start}
    runners = [load_tiny(tmp_path, "opt", pipeline_parallel=stages, **narrow) for stages in (1, 2)]
    prompt = NewRequestData("p", [5, 6, 7, 8, 9], (), SamplingParams(temperature=0.0), range(1, 2), 0)
    embedded = NewRequestData("e", [5, 6, 7, 8, 9], (), SamplingParams(), range(2, 3), 0, pooling=PoolingParams())
    step = SchedulerOutput(0, [prompt, embedded], [], {"p": 5, "e": 5}, 10)
    whole, divided = (runner.execute_model(step) for runner in runners)
    assert divided.sampled_token_ids == whole.sampled_token_ids
    assert divided.embeddings == whole.embeddings
    assert len(whole.embeddings["e"]) == 4 * 32
    assert [runner.model.embedding_size for runner in runners] == [32, 32]
    for runner in runners:
        runner.close()


def test_a_part_of_a_later_stage_that_is_slower_is_in_the_report(tmp_path: Path) -> None:
    """Only the last layer has experts, whose router gives equal logits at random weights: it is not recognised."""
    config = {**LISTED_TYPES["afmoe"], "num_dense_layers": 3}
    reasons = []
    for stages in (1, 3):
        runner = load_tiny(
            tmp_path, "llama", seed=5, config=config, pipeline_parallel=stages, start_stages=FakeStages.start
        )
        step = next(path for path in runner.model.compute_paths if path.part == "step")
        reasons.append((step.runs, step.why_not_faster))
        runner.close()
    reason = "AfmoeSparseMoeBlock is of a kind that Baton's kernels don't fuse"
    assert reasons == [
        ("one call for each operation", reason),
        ("one call for each operation", f"stage 2: {reason}"),
    ]


def test_all_ranks_get_the_reports_of_all_stages() -> None:
    files = SharedFiles.make()
    expected = [
        StageReport(
            layers={
                3 * index + place: LayerReport(entries, 5 if place else None)
                for place, entries in enumerate([(), (keys,), (keys, LayerState(3, 8, 2, 4, 4))])
            },
            missed_products=["mm"] * index,
            why_no_own_loop="" if index == 1 else "other parts",
            why_not_fused="",
            embedding_size=64 * (index == 2),
            num_logits=100,
        )
        for index, keys in enumerate([LayerGeometry(1, 8, 16), LayerGeometry(2, 8, 16), LayerGeometry(3, 8, 16)])
    ]
    first, second = (StepSlot(files.step) for _ in range(2))
    first.write_reports(expected)
    assert second.read_reports() == expected
    files.close()


def reports_of(*stages: list[int]) -> list[StageReport]:
    """The reports of stages whose layers have so many entries in the cache each."""
    kinds = (LayerGeometry(1, 8, 8), LayerState(3, 8))
    reports, index = [], 0
    for counts in stages:
        layers = {index + place: LayerReport(kinds[:count], None) for place, count in enumerate(counts)}
        index += len(counts)
        reports.append(StageReport(layers, [], "", "", 0, 0))
    return reports


def test_layers_of_both_kinds_have_two_entries_and_those_of_neither_none() -> None:
    reports = reports_of([1, 0, 2], [2, 1])
    assert layers_of_entries(reports) == [0, 2, 2, 3, 3, 4]
    assert entries_of_stages(reports) == [range(3), range(3, 6)]
    with pytest.raises(UnsupportedAttention, match=r"none of the layers of stage 1 has attention or a state: .*--pp"):
        entries_of_stages(reports_of([1, 0], [0, 0]))


@pytest.mark.parametrize(
    ("name", "are_states"), [("falcon_h1", [False, True] * 3), ("nemotron_h", [True, False, True, False])]
)
def test_what_layers_have_in_the_cache_is_found_out(tmp_path: Path, name: str, are_states: list[bool]) -> None:
    write_random_model(tmp_path, LISTED_TYPES[name], seed=1)
    layout = load_runner(TorchSpec(tmp_path, dtype="float32", num_blocks=60)).layout
    assert [isinstance(layer, LayerState) for layer in layout.layers] == are_states
    for group in layout.groups:
        assert {are_states[layer] for layer in group.layers} == {group.window == STATE_WINDOW}


@pytest.mark.parametrize("name", ["mamba2", "nemotron_h"])
def test_models_that_ask_their_layers_and_head_for_more_than_rows_are_divided(tmp_path: Path, name: str) -> None:
    """For the kind of a layer, and for the dtype of the head's weight."""
    write_random_model(tmp_path, LISTED_TYPES[name], seed=1)
    answers = []
    for stages in (1, 2):
        spec = TorchSpec(tmp_path, dtype="float32", num_blocks=60, pipeline_parallel=stages)
        with closing(load_runner(spec, start_stages=FakeStages.start)) as runner:
            blocks = range(1, 1 + len(runner.layout.groups))
            prompt = NewRequestData("p", [5, 6, 7, 8, 9], (), SamplingParams(temperature=0.0), blocks, 0)
            answers.append(runner.execute_model(SchedulerOutput(0, [prompt], [], {"p": 5}, 5)).sampled_token_ids)
    assert answers[0] == answers[1]


def test_a_layer_without_attention_or_a_state_must_be_of_a_type_that_has_neither() -> None:
    probe, config = ProbeAttention(), SimpleNamespace(layer_types=["moe", "full_attention"], is_heterogeneous=False)
    with pytest.raises(UnsupportedAttention, match=r"Some has 2 layers, 0 with attention or a state, and the others"):
        layers_found("Some", config, range(2), probe)
    probe.layers[1], probe.windows[1] = LayerGeometry(1, 8, 8), None
    found = layers_found("Some", config, range(2), probe)
    assert found == {0: LayerReport((), None), 1: LayerReport((LayerGeometry(1, 8, 8),), None)}


def a_batch(rng: np.random.Generator) -> FlatBatch:
    rows, seqs, width = (int(n) for n in rng.integers(0, 50, size=3))
    has_given = bool(rng.integers(2))
    return FlatBatch(
        token_ids=rng.integers(0, 99, size=rows),
        positions=rng.integers(0, 99, size=rows),
        slots=rng.integers(-1, 99, size=(2, rows)),
        query_start=rng.integers(0, 9, size=seqs + 1).astype(np.int32),
        sample_start=rng.integers(0, 9, size=seqs + 1).astype(np.int32),
        seq_lens=rng.integers(0, 9, size=seqs).astype(np.int32),
        block_tables=rng.integers(0, 9, size=(2, seqs, width)).astype(np.int32),
        logits_rows=rng.integers(0, 9, size=seqs),
        given_at=rng.integers(0, 9, size=rows) if has_given else None,
        given=rng.integers(0, 255, size=(rows, 6), dtype=np.uint8) if has_given else None,
        adapters=rng.integers(-1, 9, size=rows).astype(np.int32) if has_given else None,
        is_long=rng.integers(0, 2, size=rows, dtype=np.uint8) if has_given else None,
    )


def arrays_of(micro: MicroBatch) -> list[np.ndarray | None]:
    return [*(getattr(micro.batch, name) for name in FlatBatch.__dataclass_fields__), micro.logits_rows]


def test_ranks_read_what_the_first_one_has_written() -> None:
    files = SharedFiles.make()
    rng = np.random.default_rng(5)
    first, second = (StepSlot(files.step) for _ in range(2))
    for turn in range(60):
        expected = MicroBatch(a_batch(rng), rng.integers(0, 9, size=turn) if turn % 3 else None)
        count = expected.batch.token_ids.size
        rows = None if turn % 4 == 0 else torch.full((count, 8), float(turn), dtype=torch.bfloat16)
        first.write(expected, rows)
        got = second.read()
        for one, other in zip(arrays_of(got), arrays_of(expected), strict=True):
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                assert one.dtype == other.dtype
                assert np.array_equal(one, other)
        if rows is not None:
            # A rank's copy is its own.
            second.received(count, 8, torch.bfloat16).fill_(-1)
            assert torch.equal(second.received(count, 8, torch.bfloat16), rows)
    files.close()


@pytest.mark.parametrize("seed", range(20))
def test_a_step_is_divided_in_parts_of_nearly_equal_size(seed: int) -> None:
    rng = np.random.default_rng(seed)
    counts = {f"r{index}": int(rng.choice([1, 1, 1, 3, 50])) for index in range(int(rng.integers(1, 20)))}
    drafted = {name for name, count in counts.items() if count == 3}
    for num_parts in (1, 2, 3, 5):
        parts = divide(counts, drafted, num_parts)
        assert all(parts)
        assert len(parts) <= num_parts
        flat = [one for part in parts for one in part]
        joined: dict[str, int] = {}
        for name, count in flat:
            joined[name] = joined.get(name, 0) + count
        assert joined == counts
        assert list(joined) == list(counts)
        assert len([name for name, _ in flat if name in drafted]) == len(drafted)
        sizes = [sum(count for _, count in part) for part in parts]
        assert max(sizes) <= -(-sum(counts.values()) // num_parts) + 2
