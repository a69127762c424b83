"""A model on several ranks, in one stage or several, gives the bits of one process, for every supported architecture:
logits, keys and values.

Ranks and stages are threads of this process: the same code as in processes of their own, except that nothing has to
start.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.engine.core import EngineCore
from baton.engine.kv_cache.block_hash import CacheKeyFields
from baton.engine.request import Request
from baton.engine.runner import ELEMENT_BYTES, SCALE_BYTES, LayerGeometry, RunnerLost, StepExecutor
from baton.engine.scheduler import Scheduler, SchedulerConfig
from baton.errors import ConfigError
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams
from baton.messages.speculation import SpeculationConfig
from baton.runner.backends.sharded_operations import ShardedProgram
from baton.runner.execution.step_results import StepResults, StepRows
from baton.runner.execution.step_thread import StepThread
from baton.runner.loading import load_runner
from baton.runner.model.decoder import HiddenAndLogits
from baton.runner.model.random_model import write_random_model
from baton.runner.model.transformer import Transformer
from baton.runner.model_runner import TorchModelRunner
from baton.runner.spec import TorchSpec
from tests.doubles.fake_clock import FakeClock
from tests.doubles.fake_rank_group import FakeRankGroup
from tests.doubles.fake_stages import FakeStages
from tests.oracle.test_token_exact import make_engine, make_prompts, run_all
from tests.support.gguf_models import converted, random_module, write_module
from tests.support.quantized_models import FP8_FORMATS, PACKED_FORMATS, write_quantized_model
from tests.support.tiny_models import TINY_MODELS

DTYPES = ("float32", "bfloat16")
Bytes = npt.NDArray[np.uint8]
Shape = tuple[int, int]
"""Ranks in a stage, and stages."""
ALONE: Shape = (1, 1)
NEW_TOKENS = 8
NAMED = ("llama", "gemma3_text", "mixtral", "gpt_oss", "deepseek_v3")
"""One of each kind: plain, with norms of heads and windows, with experts, with sinks, with latent attention."""
OTHERS = [name for name in TINY_MODELS if name not in NAMED]
DIVIDED: Sequence[tuple[str, str, Sequence[Shape]]] = [
    *((name, "float32", ((2, 1), (1, 3))) for name in NAMED),
    *((name, "bfloat16", ((4, 1),)) for name in NAMED),
    *((name, DTYPES[place % 2], (((2, 1), (1, 2))[place % 2],)) for place, name in enumerate(OTHERS)),
]
"""Models, dtypes and shapes: each kind in several ranks and in several stages, the other models in one of them."""


@dataclass
class Run:
    """What one runner computed."""

    logits: list[npt.NDArray[np.uint32]] = field(default_factory=list)
    """The bits of the logits: of each step, or of each of its micro-batches."""
    tokens: list[dict[str, list[int]]] = field(default_factory=list)
    kv: Sequence[Bytes] = ()
    """See `kv_of`."""
    num_preemptions: Mapping[str, int] = field(default_factory=dict)
    """By what became of their keys and values."""

    def check_equal(self, other: Run) -> None:
        assert self.tokens == other.tokens
        assert np.array_equal(np.concatenate(self.logits), np.concatenate(other.logits))
        self.check_equal_kv(other)

    def check_equal_kv(self, other: Run) -> None:
        """Where there are several groups of layers, each token's place has what one of them wrote, which used it last.

        Read as another group's, the same bytes belong to other layers, of which another stage may have some.
        """
        equal = [np.all(mine == theirs, axis=2) for mine, theirs in zip(self.kv, other.kv, strict=True)]
        assert np.all(np.any(equal, axis=0))


@contextmanager
def loaded(directory: Path, shape: Shape, **settings: Any) -> Iterator[TorchModelRunner]:
    ranks, stages = shape
    settings = {"block_size": 16, "num_blocks": 64} | settings
    spec = TorchSpec(directory, tensor_parallel=ranks, pipeline_parallel=stages, **settings)
    runner = load_runner(spec, start_ranks=FakeRankGroup, start_stages=FakeStages.start)
    try:
        yield runner
    finally:
        runner.close()


def caches_of(runner: TorchModelRunner) -> list[Transformer]:
    """The transformers of all stages."""
    stages = runner._leader
    earlier = [worker._transformer for worker in stages.workers] if isinstance(stages, FakeStages) else []
    return [*earlier, runner._transformer]


def kv_of(runner: TorchModelRunner) -> list[Bytes]:
    """For each group of layers, [blocks, tokens of a block, bytes]: keys and values of its layers in all stages.

    For each stage [blocks, 1, bytes] of a model that keeps states.
    """
    if runner.layout.keeps_states:
        return [
            cache.kv_cache.view(torch.uint8).numpy().reshape(cache.num_blocks, 1, -1) for cache in caches_of(runner)
        ]
    layout, found = runner.layout, []
    for group in layout.groups:
        rows = []
        for cache in caches_of(runner):
            blocks, at = cache.kv_cache.view(torch.uint8).cpu().numpy().reshape(cache.num_blocks, -1), 0
            for geometry in (layout.layers[layer] for layer in group.layers if layer in cache.own_layers):
                assert isinstance(geometry, LayerGeometry)
                sizes = [size * ELEMENT_BYTES[layout.dtype] for size in geometry.widths]
                for size in [*sizes, *([SCALE_BYTES] * len(sizes) if layout.has_scales else [])]:
                    end = at + geometry.num_kv_heads * layout.block_size * size
                    heads = blocks[:, at:end].reshape(len(blocks), geometry.num_kv_heads, layout.block_size, size)
                    rows.append(heads.swapaxes(1, 2).reshape(len(blocks), layout.block_size, -1))
                    at = end
        found.append(np.concatenate(rows, axis=2))
    return found


def record_logits(runner: TorchModelRunner, run: Run) -> None:
    take = runner._take

    def recorded(step: StepResults, rows: StepRows, computed: HiddenAndLogits) -> None:
        run.logits.append(computed.logits.copy().view(np.uint32))
        take(step, rows, computed)

    runner._take = recorded  # type: ignore[method-assign]


def compute(
    runner: TorchModelRunner,
    sampling: SamplingParams,
    executor: StepExecutor | None = None,
    *,
    turns: int = 1,
    adapters: Sequence[str] = ("",),
    **limits: Any,
) -> Run:
    """All prompts at once, in chunks beside decoding requests; in a second turn they come from the prefix cache.

    `adapters`: the digests of the requests' adapters, by turns; "" is none.
    """
    run = Run()
    record_logits(runner, run)
    config = SchedulerConfig(
        num_blocks=runner.memory.num_blocks,
        block_size=runner.layout.block_size,
        windows=runner.layout.windows,
        keeps_states=runner.layout.keeps_states,
        **{"max_num_batched_tokens": 40, "max_num_seqs": 8, "max_model_len": runner.model.max_model_len, **limits},
    )
    fields = CacheKeyFields(runner.model.fingerprint, runner.layout.dtype, "test")
    engine = EngineCore(Scheduler(config, fields, FakeClock()), runner, executor)
    prompts = make_prompts(runner.model.vocab_size)
    for turn in range(turns):
        requests = [
            Request(f"{key}-{turn}", RequestSpec(prompt, sampling, adapter=adapters[place % len(adapters)]))
            for place, (key, prompt) in enumerate(prompts.items())
        ]
        run.tokens.append(run_all(engine, requests))
    assert len({token for tokens in run.tokens[0].values() for token in tokens}) > 20
    engine.close()
    run.num_preemptions = engine.scheduler.make_stats().num_preemptions_by_mode
    run.kv = kv_of(runner)
    return run


@pytest.mark.parametrize(("name", "dtype", "shapes"), DIVIDED, ids=[f"{name}-{dtype}" for name, dtype, _ in DIVIDED])
def test_ranks_give_the_bits_of_one_process(tmp_path: Path, name: str, dtype: str, shapes: Sequence[Shape]) -> None:
    write_random_model(tmp_path, TINY_MODELS[name], seed=5)
    sampling = SamplingParams(temperature=0.7, seed=3, max_tokens=NEW_TOKENS, repetition_penalty=1.1)
    with loaded(tmp_path, ALONE, dtype=dtype) as alone:
        expected = compute(alone, sampling, turns=2)
        info = alone.model
        layout = alone.layout
    for shape in shapes:
        with loaded(tmp_path, shape, dtype=dtype) as divided:
            compute(divided, sampling, turns=2).check_equal(expected)
            # Nodes of other sizes take each other's blocks and streams.
            assert divided.layout == layout
            assert (divided.model.numerics, divided.model.fingerprint) == (info.numerics, info.fingerprint)
            assert divided.model.bit_exact
            caches = caches_of(divided)
            own_layers = [cache.own_layers for cache in caches] if len(caches) > 1 else [None]
            assert [cache.memory.layers for cache in caches] == own_layers


@pytest.mark.parametrize(
    ("name", "how"),
    # What is swapped is blocks, whatever the layers: one group of them or several, and latent attention. Recomputing is
    # a prompt in chunks, as above.
    [("llama", "swap"), ("gemma3_text", "swap"), ("deepseek_v3", "swap"), ("gemma3_text", "recompute")],
)
def test_preempted_and_swapped_requests_have_the_same_bits(tmp_path: Path, name: str, how: str) -> None:
    write_random_model(tmp_path, TINY_MODELS[name], seed=5)
    sampling = SamplingParams(temperature=0.0, max_tokens=28)
    with loaded(tmp_path, ALONE, dtype="float32") as runner:
        undisturbed = compute(runner, sampling)
    assert not any(undisturbed.num_preemptions.values())
    swap = how == "swap"
    runs = []
    for shape in (ALONE, (2, 1), (1, 2)):
        host = 64 << 20 if swap else 0
        groups = 3 if name == "gemma3_text" else 1
        with loaded(tmp_path, shape, dtype="float32", num_blocks=9 * groups, host_cache_bytes=host) as runner:
            num_host_blocks = runner.num_host_blocks if swap else 0
            limits: dict[str, Any] = {"preemption_mode": how, "num_host_blocks": num_host_blocks}
            # With a prefix cache the blocks of a preempted request may still be there, and nothing is copied back.
            runs.append(compute(runner, sampling, enable_prefix_caching=False, **limits))
    assert runs[0].num_preemptions[how] > 0
    assert runs[0].tokens == undisturbed.tokens
    for run in runs[1:]:
        run.check_equal(runs[0])


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama", {"cache_dtype": "int8"}),
        ("mixtral", {"cache_dtype": "fp8", "dtype": "bfloat16"}),
        ("mixtral", {"quantization": "int8"}),
        ("llama", {"quantization": "int4", "dtype": "bfloat16"}),
    ],
    ids=["llama-int8-cache", "mixtral-fp8-cache", "mixtral-int8", "llama-int4"],
)
def test_quantised_weights_and_caches_have_the_same_bits(tmp_path: Path, name: str, settings: dict[str, Any]) -> None:
    write_random_model(tmp_path, TINY_MODELS[name], seed=5)
    sampling = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
    runs = []
    for shape in (ALONE, (2, 2)):
        with loaded(tmp_path, shape, **({"dtype": "float32"} | settings)) as runner:
            runs.append(compute(runner, sampling))
    runs[1].check_equal(runs[0])


def write_half_in_two_files(directory: Path) -> None:
    write_random_model(directory, {**TINY_MODELS["gpt2"], "tie_word_embeddings": True}, seed=5)
    tensors = {name: tensor.half() for name, tensor in load_file(directory / "model.safetensors").items()}
    (directory / "model.safetensors").unlink()
    files = {name: f"model-0000{1 + place % 2}-of-00002.safetensors" for place, name in enumerate(tensors)}
    for file in set(files.values()):
        part = {name: tensor for name, tensor in tensors.items() if files[name] == file}
        save_file(part, directory / file, metadata={"format": "pt"})
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def write_gguf_blocks(directory: Path) -> None:
    module = random_module("llama", hidden_size=256, intermediate_size=256, num_hidden_layers=3, head_dim=64)
    kinds = {"ffn_up": "Q5_0", "attn_v": "Q6_K"}

    def kind_of(name: str) -> str:
        return next((kind for part, kind in kinds.items() if part in name), "Q4_K")

    source = write_module(directory.parent / "tiny.gguf", module, kind_of)
    converted(source, directory)


STORED: Mapping[str, Callable[[Path], object]] = {
    "float16-in-two-files": write_half_in_two_files,
    "gguf": write_gguf_blocks,
    "gptq-int4": lambda directory: write_quantized_model(directory, "mixtral", PACKED_FORMATS["gptq-int4"]),
    "fp8-block": lambda directory: write_quantized_model(directory, "qwen2", FP8_FORMATS["fp8-block"]),
}


@pytest.mark.parametrize(
    ("stored", "dequantize"), [*((stored, False) for stored in STORED), ("gguf", True), ("fp8-block", True)]
)
def test_ranks_read_what_one_process_reads_of_every_kind_of_file(tmp_path: Path, stored: str, dequantize: bool) -> None:
    """Each rank reads its part of the weights, and not as one process does, for which transformers reads plain ones."""
    STORED[stored](tmp_path / "model")
    sampling = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
    runs = []
    models = []
    for shape in (ALONE, (2, 2)):
        with loaded(tmp_path / "model", shape, dtype="float32", dequantize=dequantize) as runner:
            runs.append(compute(runner, sampling))
            models.append((runner.model.fingerprint, runner.model.numerics, runner.model.compute_paths[0]))
    runs[1].check_equal(runs[0])
    assert models[1] == models[0]


def test_drafts_and_the_logprobs_of_prompts_are_those_of_one_process(tmp_path: Path) -> None:
    write_random_model(tmp_path, TINY_MODELS["qwen3"], seed=5)
    sampling = SamplingParams(temperature=0.0, max_tokens=2 * NEW_TOKENS, prompt_logprobs=2, logprobs=2)
    runs = []
    for shape in (ALONE, (2, 1), (1, 2)):
        with loaded(tmp_path, shape, dtype="float32") as runner:
            runs.append(compute(runner, sampling, speculation=SpeculationConfig(prompt_lookup_min=1)))
    # How long drafts are depends on measured times, and so do the steps; the tokens do not.
    assert runs[1].tokens == runs[0].tokens
    assert runs[2].tokens == runs[0].tokens


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("llama", (1, 2)),
        ("gemma3_text", (2, 2)),
        ("gpt_oss", (1, 3)),
        ("deepseek_v3", (2, 3)),
    ],
)
def test_steps_that_are_decided_ahead_have_the_same_bits_in_stages(tmp_path: Path, name: str, shape: Shape) -> None:
    """The first stage begins a step while the last one computes the step before."""
    config = dict(TINY_MODELS[name])
    if name == "gemma3_text":
        # So a group of layers has several in one stage, and none in another.
        config |= {"num_hidden_layers": 6, "layer_types": config["layer_types"] * 2}
    write_random_model(tmp_path, config, seed=5)
    sampling = SamplingParams(temperature=0.7, seed=3, max_tokens=2 * NEW_TOKENS)
    runs = []
    for one in (ALONE, shape):
        with loaded(tmp_path, one, dtype="float32") as runner:
            runs.append(compute(runner, sampling, StepThread()))
    assert runs[1].tokens == runs[0].tokens
    runs[1].check_equal_kv(runs[0])


def test_three_ranks_of_unequal_widths_have_the_same_bits(tmp_path: Path) -> None:
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16, "intermediate_size": 200}
    write_random_model(tmp_path, {**TINY_MODELS["qwen3"], **sizes}, seed=5)
    sampling = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
    runs = []
    for shape in (ALONE, (3, 1)):
        with loaded(tmp_path, shape, dtype="bfloat16") as runner:
            runs.append(compute(runner, sampling))
    runs[1].check_equal(runs[0])


@pytest.mark.parametrize(
    ("name", "threads", "shape"), [("gemma3_text", 3, (2, 1)), ("llama", 6, (4, 1)), ("gemma3_text", 3, (1, 2))]
)
def test_ranks_of_unequal_threads_have_the_same_bits(tmp_path: Path, name: str, threads: int, shape: Shape) -> None:
    """All ranks pad rows alike, however many threads each has: otherwise they would exchange unlike numbers of rows."""
    write_random_model(tmp_path, TINY_MODELS[name], seed=5)
    sampling = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
    before = torch.get_num_threads()
    runs = []
    try:
        for one in (ALONE, shape):
            with loaded(tmp_path, one, dtype="bfloat16", num_threads=threads) as runner:
                runs.append(compute(runner, sampling))
    finally:
        torch.set_num_threads(before)
    assert runs[1].tokens == runs[0].tokens
    runs[1].check_equal_kv(runs[0])


def test_a_step_that_fails_on_one_rank_ends_them_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks are in the middle of that step: the next one's numbers would be taken for its."""
    write_random_model(tmp_path, TINY_MODELS["llama"], seed=5)
    with loaded(tmp_path, (2, 1), dtype="float32") as runner:
        engine = make_engine(runner)
        engine.scheduler.add_request(
            Request("first", RequestSpec([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=1)))
        )
        engine.step()
        run = ShardedProgram.run

        def fails_on_the_first_rank(self: ShardedProgram, *arguments: Any) -> None:
            if self._ranks.shard.rank == 0:
                raise MemoryError("no scratch memory")
            run(self, *arguments)

        monkeypatch.setattr(ShardedProgram, "run", fails_on_the_first_rank)
        for turn in range(2):
            engine.scheduler.add_request(
                Request(f"later-{turn}", RequestSpec([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=1)))
            )
            with pytest.raises(RunnerLost, match="no scratch memory"):
                engine.step()
            monkeypatch.setattr(ShardedProgram, "run", run)


def test_a_number_of_ranks_that_does_not_divide_the_heads_is_refused(tmp_path: Path) -> None:
    write_random_model(tmp_path, TINY_MODELS["llama"], seed=5)
    with pytest.raises(ConfigError, match=r"4 attention heads over 2 key/value heads .* 3 ranks; 1, 2, 4 would do"):
        load_runner(TorchSpec(tmp_path, dtype="float32", num_blocks=16, tensor_parallel=3), start_ranks=FakeRankGroup)
