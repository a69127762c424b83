"""A model directory is loaded whole or refused with one line that says what is wrong and how to fix it."""

from __future__ import annotations

import ctypes
import gc
import itertools
import json
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.engine.runner import PROBE_BLOCKS
from baton.errors import ConfigError
from baton.model_formats.limits import CONTEXT_WITHOUT_POSITIONS
from baton.runner import TorchSpec, load
from baton.runner.loading import load_runner
from baton.runner.model import attention
from baton.runner.model import weights as weights_module
from baton.runner.model.cached_model import row_quantum
from baton.runner.model.checkpoint import open_checkpoint
from baton.runner.model.mixtures import experts
from baton.runner.model.random_model import write_random_model
from baton.runner.model.weights import load_model, resolve_dtype
from baton.runner.spec import CacheSpec, WeightSpec
from tests.doubles.fake_rank_group import FakeRankGroup
from tests.doubles.fake_stages import FakeStages
from tests.support.gguf_models import converted, random_module, write_module
from tests.support.listed_types import LISTED_TYPES
from tests.support.load_with import load_with
from tests.support.runner_driver import RunnerDriver
from tests.support.tiny_models import TINY_MODELS


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    write_random_model(directory, {**TINY_MODELS["qwen2"], "eos_token_id": [3, 7]}, seed=1)
    return directory


@pytest.fixture
def directory(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "broken-model"))


def refuse(directory: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_runner(TorchSpec(directory, dtype="float32", num_blocks=16))
    message = str(caught.value)
    assert "\n" not in message
    assert directory.name in message
    return message


def edit_config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def remove_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()


def pickle_only(directory: Path) -> None:
    remove_weights(directory)
    (directory / "pytorch_model.bin").write_bytes(b"\x80\x04N.")


def truncate(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def garble_header(directory: Path) -> None:
    path = directory / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[8:12] = b"\xff\xff\xff\xff"
    path.write_bytes(content)


def flip_bits_in_the_header(directory: Path, before: bytes, after: bytes) -> None:
    path = directory / "model.safetensors"
    content = path.read_bytes()
    assert before in content
    path.write_bytes(content.replace(before, after, 1))


def name_an_end_that_is_no_number(directory: Path) -> None:
    header = b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, null]}}'
    (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))


def huge_header(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes((2**63).to_bytes(8, "little") + path.read_bytes()[8:])


def drop_a_tensor(directory: Path) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, path, metadata={"format": "pt"})


def name_a_missing_shard(directory: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_weights_that_give_no_finite_logits_are_refused(directory: Path, number: float) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"][5] = number
    save_file(tensors, path, metadata={"format": "pt"})
    assert "can't be used: they give logits that are not finite" in refuse(directory)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (shutil.rmtree, "does not exist"),
        (lambda d: (d / "config.json").unlink(), "has no config.json"),
        (lambda d: (d / "config.json").write_text("{"), "can't be read as JSON"),
        (lambda d: (d / "config.json").write_text("[]"), "not a JSON object"),
        (lambda d: edit_config(d, x=json.loads("[" * 200 + "]" * 200)), "is nested more than 100 deep"),
        (lambda d: edit_config(d, num_hidden_layers=10**8), "has num_hidden_layers 100000000 in its config.json"),
        (lambda d: edit_config(d, num_labels=10**9), "has num_labels 1000000000 in its config.json"),
        (lambda d: edit_config(d, x={"y": {"num_labels": 10**9}}), "has num_labels 1000000000 in its config.json"),
        (remove_weights, "has no model.safetensors"),
        (pickle_only, "only pickled weights.*convert them"),
        (truncate, "is truncated.*copy it again"),
        (garble_header, "not a sound safetensors file"),
        (huge_header, "not a sound safetensors file"),
        (lambda d: flip_bits_in_the_header(d, b'"shape"', b'"shapg"'), "can't be read.*copy them again"),
        (lambda d: flip_bits_in_the_header(d, b'"F32"', b'"F22"'), "can't be read.*copy them again"),
        (lambda d: flip_bits_in_the_header(d, b'"data_offsets":[0,', b'"data_offsets":[1,'), "can't be read"),
        (name_an_end_that_is_no_number, "not a sound safetensors file"),
        (lambda d: edit_config(d, vocab_size=1 << 26), "config.json asks for"),
        (lambda d: edit_config(d, intermediate_size=1 << 26), "config.json asks for"),
        (lambda d: flip_bits_in_the_header(d, b"k_proj", b"k_prok"), "lack 1 tensors"),
        (drop_a_tensor, "lack 1 tensors.*down_proj"),
        (name_a_missing_shard, "lacks model-00002-of-00002.safetensors"),
        (lambda d: edit_config(d, hidden_size=32), "config.json asks for"),
        (
            lambda d: edit_config(d, model_type="no_such_model"),
            "'no_such_model', which this .* can't load .*choose another model, or upgrade",
        ),
        (lambda d: edit_config(d, model_type="pegasus"), "'pegasus', which is not supported.*decoder-only"),
        (lambda d: edit_config(d, model_type="bloom"), "'bloom', which is not supported.*attention.*another model$"),
        (lambda d: edit_config(d, model_type="qwen4_exp_text"), "of type indexed_attention; choose another model"),
        (lambda d: edit_config(d, is_causal=False), "'qwen2', which is not supported: its tokens attend to those"),
        (lambda d: edit_config(d, use_bidirectional_attention=True), "decoders are computed causally"),
    ],
)
def test_a_bad_directory_is_refused_in_one_line(directory: Path, damage: Callable[[Path], object], words: str) -> None:
    damage(directory)
    assert re.search(words, refuse(directory))


REFUSED_NUMBERS = """
qwen2                                  | hidden_size num_attention_heads num_key_value_heads | 0 -2 1099511627776
qwen2                                  | head_dim                                            | 1099511627776
qwen2                                  | head_dim intermediate_size num_hidden_layers        | 0 -1 16.5 true "64"
llama                                  | hidden_size num_attention_heads num_key_value_heads | 0
gpt2                                   | hidden_size num_attention_heads                     | 0 -2 1099511627776
mixtral qwen3_moe deepseek_v3 gpt_oss  | num_experts_per_tok                                 | 0 -1 99
mixtral gpt_oss                        | num_local_experts                                   | 0 -4
qwen3_moe                              | num_experts decoder_sparse_step                     | 0
qwen3_moe                              | moe_intermediate_size                               | 0
deepseek_v3                            | n_group topk_group                                  | 0 3
deepseek_v3                            | n_routed_experts q_lora_rank kv_lora_rank           | 0
deepseek_v3                            | qk_rope_head_dim                                    | 0
deepseek_v3                            | n_shared_experts v_head_dim                         | -1
mistral                                | sliding_window                                      | 0 -16
gemma3_text                            | sliding_window sliding_window_pattern               | 0
gemma2                                 | query_pre_attn_scalar                               | 0
gemma2                                 | final_logit_softcapping                             | 0.0
gpt2                                   | n_inner                                             | 0
opt                                    | ffn_dim word_embed_proj_dim                         | 0
"""
"""Architectures, fields of their configuration, and numbers with which no such model can be made."""


@pytest.mark.parametrize(
    ("model", "field", "number"),
    [
        (model, field, json.loads(number))
        for models, fields, numbers in (line.split("|") for line in REFUSED_NUMBERS.split("\n")[1:-1])
        for model, field, number in itertools.product(models.split(), fields.split(), numbers.split())
    ],
)
def test_a_number_with_which_no_model_can_be_made_is_refused_before_anything_is_made_of_it(
    directory: Path, model: str, field: str, number: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_module, "_skeleton", None)
    # Not what transformers writes, which has other names for some numbers.
    (directory / "config.json").write_text(json.dumps({**TINY_MODELS[model], field: number}))
    assert refuse(directory).endswith(f"has {field} {number!r} in its config.json; copy it again")


@pytest.mark.parametrize("number", [0, -1.0, float("nan"), float("inf"), "10000", True])
@pytest.mark.parametrize("rope", [None, {"rope_type": "default", "rope_theta": 10000.0}])
def test_a_wrong_base_of_positions_is_refused(directory: Path, number: object, rope: object) -> None:
    edit_config(directory, rope_theta=number, rope_parameters=rope)
    assert refuse(directory).endswith(f"has rope_theta {number!r} in its config.json; copy it again")


@pytest.mark.parametrize(
    ("field", "rope", "number"),
    [
        ("rope_theta", {"rope_type": "default", "rope_theta": "10000"}, "'10000'"),
        ("rope_theta", {"full_attention": {"rope_type": "default", "rope_theta": 0}}, "0"),
        ("factor", {"rope_type": "linear", "factor": 0.0, "rope_theta": 10000.0}, "0.0"),
        ("original_max_position_embeddings", {"original_max_position_embeddings": -1}, "-1"),
    ],
)
@pytest.mark.parametrize("outer", ["rope_parameters", "rope_scaling"])
def test_a_wrong_number_of_positions_is_refused(
    directory: Path, outer: str, field: str, rope: object, number: str
) -> None:
    edit_config(directory, **{"rope_parameters": None, outer: rope})
    assert refuse(directory).endswith(f"has {outer}.{field} {number} in its config.json; copy it again")


def test_a_number_that_nothing_uses_may_be_any(directory: Path) -> None:
    edit_config(directory, num_local_experts=0, num_experts_per_tok=0, use_sliding_window=False, sliding_window=0)
    assert load_model(directory, WeightSpec("float32")).architecture == "Qwen2ForCausalLM"


@pytest.mark.parametrize(("count", "is_refused"), [(0, False), (-1, True)])
def test_layers_with_an_mlp_beside_their_experts_may_have_none(tmp_path: Path, count: int, is_refused: bool) -> None:
    """Most models of type granitemoehybrid have such a configuration."""
    dense = {**LISTED_TYPES["granitemoehybrid"], "num_local_experts": 0, "num_experts_per_tok": 0}
    write_random_model(tmp_path / "broken-model", dense, seed=1)
    edit_config(tmp_path / "broken-model", num_local_experts=count)
    if is_refused:
        assert "has num_local_experts -1 in its config.json" in refuse(tmp_path / "broken-model")
    else:
        assert load_model(tmp_path / "broken-model", WeightSpec("float32")).weights.num_bytes > 0


def test_a_model_without_positions_has_a_context_nevertheless(tmp_path: Path) -> None:
    write_random_model(tmp_path, LISTED_TYPES["mamba2"], seed=1)
    assert load_model(tmp_path, WeightSpec("float32")).max_model_len == CONTEXT_WITHOUT_POSITIONS
    assert load_runner(TorchSpec(tmp_path, dtype="float32", num_blocks=9)).model.bit_exact


def test_windows_that_only_a_mask_tells_of_are_refused_and_none_are_no_obstacle(tmp_path: Path) -> None:
    moe = {name: value for name, value in TINY_MODELS["qwen3_moe"].items() if name != "head_dim"}
    # transformers makes the window 0 of a model without windows.
    without = {**moe, "model_type": "qwen2_moe", "shared_expert_intermediate_size": 64}
    write_random_model(tmp_path / "without", without, 1)
    assert load_runner(TorchSpec(tmp_path / "without", dtype="float32", num_blocks=8)).layout.windows == (None,)
    kinds = ["full_attention", "sliding_attention", "sliding_attention"]
    write_random_model(
        tmp_path / "with", {**without, "use_sliding_window": True, "sliding_window": 16, "layer_types": kinds}, 1
    )
    with pytest.raises(
        ConfigError, match="tells the windows of its layers 1, 2 to their masks alone, which is not supported"
    ):
        load_runner(TorchSpec(tmp_path / "with", dtype="float32", num_blocks=8))


def test_what_transformers_says_of_a_field_is_said_whole(directory: Path) -> None:
    edit_config(directory, rms_norm_eps="small")
    assert re.search(
        r"config.json that can't be read \(.*'rms_norm_eps'.*'small'\)\); copy it again", refuse(directory)
    )


def test_a_size_under_another_name_is_refused(directory: Path) -> None:
    (directory / "config.json").write_text('{"model_type": "gpt2", "n_head": 0}')
    assert "has num_attention_heads 0 in its config.json" in refuse(directory)


def test_what_a_checkpoint_lacks_is_not_allocated_before_it_is_refused(tmp_path: Path) -> None:
    """Experts are stacked from several tensors, so no single one of them shows that the model would be larger."""
    write_random_model(tmp_path / "broken-model", TINY_MODELS["mixtral"], seed=1)
    edit_config(tmp_path / "broken-model", intermediate_size=1 << 20)
    assert "asks for 2415989952 numbers, and there are" in refuse(tmp_path / "broken-model")


def test_remote_code_is_never_run(directory: Path) -> None:
    marker = directory / "ran"
    (directory / "modeling_evil.py").write_text(f"open({str(marker)!r}, 'w')\n")
    auto_map = {"AutoConfig": "modeling_evil.Config", "AutoModelForCausalLM": "modeling_evil.Model"}
    edit_config(directory, auto_map=auto_map, model_type="evil")
    refuse(directory)
    assert not marker.exists()


def test_a_head_width_that_the_kernels_lack_is_refused(tmp_path: Path) -> None:
    write_random_model(tmp_path / "broken-model", {**TINY_MODELS["llama"], "head_dim": 12}, seed=0)
    assert "kernels can't compute" in refuse(tmp_path / "broken-model")


def test_a_loaded_model_has_its_info_layout_and_memory(pristine: Path) -> None:
    runner = load(TorchSpec(pristine, dtype="bfloat16", num_blocks=9, name="served"))
    assert (runner.model.name, runner.model.model_type) == ("served", "qwen2")
    assert (runner.model.vocab_size, runner.model.max_model_len) == (256, 512)
    assert runner.model.eos_token_ids == {3, 7}
    layout = runner.layout
    assert (layout.geometry, layout.num_layers, layout.dtype) == ("3*2x(16+16)", 3, "bfloat16")
    memory: torch.Tensor = runner.memory.owner
    assert memory.shape == ((9 + PROBE_BLOCKS) * 3 * 2 * 2 * 16 * 16,)
    assert runner.memory.base_address == memory.data_ptr()
    assert runner.memory.num_bytes == memory.numel() * 2
    assert (runner.memory.num_blocks, runner.memory.num_probe_blocks) == (9, PROBE_BLOCKS)
    assert load_runner(TorchSpec(pristine, dtype="bfloat16", num_blocks=9)).model.name == "tiny"


def test_the_fingerprint_names_the_model(pristine: Path, directory: Path) -> None:
    original = open_checkpoint(pristine).fingerprint
    assert open_checkpoint(directory).fingerprint == original
    path = directory / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    changed = {open_checkpoint(directory).fingerprint}
    edit_config(directory, rms_norm_eps=1e-4)
    changed.add(open_checkpoint(directory).fingerprint)
    (directory / "tokenizer.json").write_text("{}")
    changed.add(open_checkpoint(directory).fingerprint)
    assert len(changed | {original}) == 4


def test_a_yarn_beyond_all_bounds_is_refused(directory: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 1e9, "original_max_position_embeddings": 64, "rope_theta": 1e4}
    edit_config(directory, rope_parameters=yarn)
    assert "makes a context of 64000000000 tokens, more than 16777216" in refuse(directory)


def test_auto_dtype_follows_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_module, "_cpu_flags", lambda: frozenset({"avx2", "avx512_bf16"}))
    assert resolve_dtype("auto") == "bfloat16"
    monkeypatch.setattr(weights_module, "_cpu_flags", lambda: frozenset({"avx2"}))
    assert resolve_dtype("auto") == "float32"
    with pytest.raises(ConfigError, match="float16"):
        resolve_dtype("float16")


def test_the_size_of_the_cache_follows_from_the_settings() -> None:
    assert CacheSpec(num_blocks=5).blocks(100) == 5
    assert CacheSpec(cache_bytes=599).blocks(100) == 5
    for wrong in (CacheSpec(), CacheSpec(5, 500), CacheSpec(num_blocks=1), CacheSpec(cache_bytes=199)):
        with pytest.raises(ConfigError):
            wrong.blocks(100)


def test_blocks_of_more_tokens_need_fewer_blocks_for_drafts_beyond_their_ends() -> None:
    beside = CacheSpec(cache_bytes=1 << 20, block_bytes_beside=100, num_blocks_beside=64)
    assert beside.of_larger_blocks(1) == beside
    assert beside.of_larger_blocks(4) == replace(beside, block_bytes_beside=400, num_blocks_beside=16)
    assert beside.of_larger_blocks(32) == replace(beside, block_bytes_beside=3200, num_blocks_beside=4)


def test_rows_fill_vectors_on_each_thread() -> None:
    assert row_quantum([896, 4864, 64], num_threads=1) == 1
    assert row_quantum([896, 4864, 64], num_threads=2) == 2
    assert row_quantum([256, 704, 32], num_threads=1) == 2
    assert row_quantum([24, 120], num_threads=16) == 16


def test_the_same_seed_writes_the_same_model(tmp_path: Path, pristine: Path) -> None:
    config = {**TINY_MODELS["qwen2"], "eos_token_id": [3, 7]}
    write_random_model(tmp_path / "same", config, seed=1)
    write_random_model(tmp_path / "other", config, seed=2)
    original = open_checkpoint(pristine).fingerprint
    assert open_checkpoint(tmp_path / "same").fingerprint == original
    assert open_checkpoint(tmp_path / "other").fingerprint != original


def test_every_token_of_a_random_model_has_a_text(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    write_random_model(tmp_path, {**TINY_MODELS["llama"], "vocab_size": 300}, seed=0)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "def f(x): # größe\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert len({tokenizer.decode([token_id]) for token_id in range(256, 300)}) == 44


def test_no_second_copy_and_no_product_of_torch_is_left(pristine: Path) -> None:
    attention.register()
    experts.register()
    loaded = load_model(pristine, WeightSpec("float32"))
    runner = load_runner(TorchSpec(pristine, dtype="float32", num_blocks=16))
    assert runner.model.bit_exact
    kinds = [torch.nn.Linear]
    module = runner._transformer._module
    assert not [part for part in module.modules() if isinstance(part, tuple(kinds))]
    # Even the embedding is packed, since it is also the head's weight.
    assert not [name for name, parameter in module.named_parameters() if parameter.dim() >= 2]
    assert sum(p.numel() for p in loaded.module.parameters()) > 2 * sum(p.numel() for p in module.parameters())


def _status(key: str) -> int:
    """The process's memory in bytes: present (VmRSS), or the peak since the last reset (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:")) << 10


class Growth:
    """How far the memory of this process has been, at most, above what it was at first."""

    def __init__(self) -> None:
        gc.collect()
        # Memory that the allocator kept from earlier tests would be used again and hide a copy.
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        self._before = _status("VmRSS")

    def peak(self) -> int:
        return _status("VmHWM") - self._before


@dataclass(frozen=True)
class LargeModel:
    """A model whose weights are many times what one layer needs on its way, and one like it that is tiny."""

    tiny: Path
    large: Path
    stored: str

    @property
    def weights(self) -> int:
        """Bytes of the weights in float32."""
        size = (self.large / "model.safetensors").stat().st_size * (2 if self.stored == "bfloat16" else 1)
        assert size > 100 << 20
        return size


_MMAP_THRESHOLD = -3
NUM_LAYERS = {"qwen2": 24, "qwen3_moe": 9, "gpt_oss": 8}


@pytest.fixture(scope="module")
def large_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], LargeModel]:
    """The large model of an architecture that is stored in a dtype, which is written once."""

    @cache
    def written(architecture: str, stored: str) -> LargeModel:
        directory = tmp_path_factory.mktemp(architecture)
        shape = {"hidden_size": 512, "intermediate_size": 1024, "moe_intermediate_size": 512}
        write_random_model(directory / "tiny", TINY_MODELS[architecture], 0)
        large = {**TINY_MODELS[architecture], **shape, "num_hidden_layers": NUM_LAYERS[architecture]}
        write_random_model(directory / "large", large, 0, stored)
        return LargeModel(directory / "tiny", directory / "large", stored)

    return written


@pytest.fixture
def steady_allocator() -> Iterator[None]:
    """glibc keeps freed pieces up to the size of the largest that was freed before, in earlier tests for instance; here
    it gives them back at once (M_MMAP_THRESHOLD of mallopt(3))."""
    libc = ctypes.CDLL(None)
    libc.mallopt(_MMAP_THRESHOLD, 128 << 10)
    yield
    libc.mallopt(_MMAP_THRESHOLD, 32 << 20)


@pytest.mark.usefixtures("steady_allocator")
@pytest.mark.parametrize(
    ("architecture", "stored"), [("qwen2", "bfloat16"), ("qwen3_moe", "float32"), ("gpt_oss", "float32")]
)
def test_weights_are_in_memory_once_while_they_are_loaded(
    large_model: Callable[[str, str], LargeModel], architecture: str, stored: str
) -> None:
    """Weights that are cast (qwen2), merged (the experts of qwen3_moe) or transposed (the experts of gpt_oss)."""
    model = large_model(architecture, stored)
    load_runner(TorchSpec(model.tiny, dtype="float32", num_blocks=16))
    growth = Growth()
    runner = load_runner(TorchSpec(model.large, dtype="float32", num_blocks=16))
    # 1.08 to 1.18 with memory to convert one layer and what earlier tests left in the allocator; a copy gives 2.
    assert growth.peak() < 1.3 * (model.weights + runner.memory.num_bytes)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3_moe"])
def test_ranks_have_their_parts_of_the_weights_while_they_are_loaded(
    large_model: Callable[[str, str], LargeModel], architecture: str
) -> None:
    """The first rank has none before the others start, and then all together have each weight once.

    The weights are cast: the experts of qwen3_moe are both cast and merged here.
    """
    model = large_model(architecture, "bfloat16")
    divided: dict[str, Any] = {"num_threads": 4, "tensor_parallel": 2, "pipeline_parallel": 2}
    divided |= {"start_stages": FakeStages.start}
    load_with(model.tiny, dtype="float32", num_blocks=16, start_ranks=FakeRankGroup, **divided).close()
    growth, of_first = Growth(), []

    def start(*arguments: Any) -> FakeRankGroup:
        of_first.append(growth.peak())
        return FakeRankGroup(*arguments)

    runner = load_with(model.large, dtype="float32", num_blocks=16, start_ranks=start, **divided)
    of_all = growth.peak()
    runner.close()
    # A tensor of each rank, and the pages of the file around it, are a constant. The first rank had 9 to 22 MiB here,
    # with what earlier tests had left in the allocator, and all of the weights if it read the others' parts, too.
    assert of_first[0] < model.weights // 4
    # Ranks that read all columns or all layers give 2.
    assert of_all < 1.1 * (model.weights + runner.memory.num_bytes) + 4 * (16 << 20)


def test_quantised_weights_are_in_memory_once_while_they_are_loaded(
    large_model: Callable[[str, str], LargeModel],
) -> None:
    model, how = large_model("qwen2", "bfloat16"), {"dtype": "bfloat16", "num_blocks": 16, "quantization": "int4"}
    load_with(model.tiny, **how)
    growth = Growth()
    runner = load_with(model.large, **how)
    # Reading ahead, a region of the kernels' memory and one layer's tensors are a constant; a plain copy is half of the
    # weights in float32.
    assert growth.peak() < model.weights * 4.5 / 32 + runner.memory.num_bytes + (64 << 20)


def test_blocks_of_a_gguf_file_are_in_memory_once_while_they_are_loaded(tmp_path: Path) -> None:
    shape = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 32, "head_dim": 128}
    numbers = 0
    for name, changes in (("tiny", {**shape, "num_hidden_layers": 1}), ("large", shape)):
        module = random_module("llama", **changes)
        numbers = sum(weight.numel() for weight in module.parameters())
        source = write_module(tmp_path / f"{name}.gguf", module, "Q4_K")
        converted(source, tmp_path / name)
    del module
    load_runner(TorchSpec(tmp_path / "tiny", dtype="bfloat16", num_blocks=16))
    growth = Growth()
    runner = load_runner(TorchSpec(tmp_path / "large", dtype="bfloat16", num_blocks=16))
    assert numbers > 65 << 20
    # 41 MiB. A region of the kernels' memory and one layer's tensors are a constant; integers of all layers are 72 MiB.
    assert growth.peak() < numbers * 4.625 / 8 + runner.memory.num_bytes + (40 << 20)


def test_a_product_that_was_missed_makes_the_model_inexact(pristine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.qwen2 import modeling_qwen2

    def forward(self: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.nn.Module.get_submodule(self, "down_proj")(x.matmul(torch.ones(64, 128)))
        return out

    monkeypatch.setattr(modeling_qwen2.Qwen2MLP, "forward", forward)
    model = load_runner(TorchSpec(pristine, dtype="float32", num_blocks=16)).model
    assert not model.bit_exact
    assert "outside of Baton's kernels" in model.bit_exact_reason


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [("qwen2", "float32"), ("qwen2", "bfloat16"), ("qwen3_moe", "float32"), ("qwen3_moe", "bfloat16")],
)
def test_non_finite_logits_fail_that_request_alone(tmp_path: Path, architecture: str, dtype: str) -> None:
    directory = tmp_path / "broken-model"
    write_random_model(directory, {**TINY_MODELS[architecture], "tie_word_embeddings": True}, 1)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"][9, 0] = float("nan")
    # Untied, so that the broken row affects only requests that have token 9 in their history.
    tensors["lm_head.weight"] = torch.randn_like(tensors["model.embed_tokens.weight"])
    save_file(tensors, path, metadata={"format": "pt"})
    edit_config(directory, tie_word_embeddings=False)
    runner = load_runner(TorchSpec(directory, dtype=dtype, num_blocks=32))
    alone = (driver := RunnerDriver(runner)).add("alone", [1, 2, 4])
    driver.step({"alone": 3})
    driver.step({"alone": 1})
    driver.step({}, finished=["alone"])
    driver = RunnerDriver(runner)
    good, bad = driver.add("good", [1, 2, 4]), driver.add("bad", [1, 9, 4])
    driver.step({"bad": 3, "good": 3})
    assert bad.failed == "the model produced non-finite logits"
    assert good.failed is None
    assert len(good.output) == 1
    driver.step({"good": 1}, finished=["bad"])
    assert good.output == alone.output


def test_a_float16_checkpoint_is_served_in_both_dtypes_and_bfloat16_is_logged(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights = {name: tensor.half() for name, tensor in load_file(directory / "model.safetensors").items()}
    tokens = {}
    for stored in (torch.float16, torch.float32):
        save_file({name: tensor.to(stored) for name, tensor in weights.items()}, directory / "model.safetensors")
        edit_config(directory, dtype=str(stored).removeprefix("torch."))
        for dtype in ("float32", "bfloat16"):
            driver = RunnerDriver(load_runner(TorchSpec(directory, dtype=dtype, num_blocks=16)))
            request = driver.add("one", [5, 9, 200, 31])
            driver.finish()
            tokens[stored, dtype] = request.output
    for dtype in ("float32", "bfloat16"):
        assert tokens[torch.float16, dtype] == tokens[torch.float32, dtype]
    logged = [record.getMessage() for record in caplog.records if "float16, with 11" in record.getMessage()]
    assert len(logged) == 1, "only where bits are lost"
    assert "--dtype float32" in logged[0]


def test_two_threads_may_load_at_once(tmp_path: Path) -> None:
    """transformers would leave its classes without the function that ties weights."""
    from transformers import PreTrainedModel

    write_random_model(tmp_path, {**TINY_MODELS["qwen2"], "tie_word_embeddings": True}, seed=5)
    attention.register()
    experts.register()
    ties = PreTrainedModel.tie_weights
    try:
        with ThreadPoolExecutor(2) as pool:
            loaded = list(pool.map(lambda _: load_model(tmp_path, WeightSpec("float32")), range(16)))
        assert PreTrainedModel.tie_weights is ties
    finally:
        PreTrainedModel.tie_weights = ties
    for one in loaded:
        module: Any = one.module
        assert module.lm_head.weight is module.model.embed_tokens.weight
