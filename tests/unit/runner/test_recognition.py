"""Parts of a model are replaced if Baton's fused layers compute the same, and only then."""

from __future__ import annotations

import io
import json
from collections import Counter
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
import torch

from baton.messages.node_report import ComputePath
from baton.node.process import log_slow_paths
from baton.runner.adapters.adaptable import ModuleOutputs
from baton.runner.backends.cpu import kernel_file
from baton.runner.backends.low_rank import LowRank, Outputs
from baton.runner.backends.torch_operations import TorchOperations
from baton.runner.model import attention
from baton.runner.model.fused.attention import CalledAsAttention, FusedAttention
from baton.runner.model.fused.rows import FusedLayerNorm, FusedMlp, FusedNorm, PlainMlp
from baton.runner.model.loop.angles import RotaryTable
from baton.runner.model.recognition import fuse
from baton.runner.model_runner import TorchModelRunner
from tests.support.listed_types import LISTED_TYPES
from tests.support.load_with import load_tiny, load_with
from tests.support.packed_runs import logits
from tests.support.tiny_models import TINY_MODELS
from tests.support.varied_models import write_varied_model

PARTS = (CalledAsAttention, FusedMlp, FusedNorm)


def loaded(tmp_path: Path, name: str = "llama", dtype: str = "float32", **config: Any) -> TorchModelRunner:
    return load_tiny(tmp_path, name, seed=1, config=config, dtype=dtype)


def fused(runner: TorchModelRunner) -> tuple[int, ...]:
    """The numbers of fused attention layers, of fused MLPs, and of fused norms outside of attention."""
    modules = list(runner._transformer._module.modules())
    return tuple(sum(isinstance(module, kind) for module in modules) for kind in PARTS)


RECOGNISED = {
    "llama": ((3, 3, 7), True),
    "qwen2": ((3, 3, 7), True),
    "qwen3": ((3, 3, 7), True),
    "mistral": ((3, 3, 7), True),
    "phi3": ((3, 3, 7), True),
    "gpt_oss": ((3, 0, 7), True),
    "mixtral": ((3, 0, 7), True),
    "qwen3_moe": ((3, 0, 7), True),
    "gemma2": ((3, 3, 13), True),
    "gemma3_text": ((3, 3, 13), True),
    "deepseek_v3": ((3, 3, 7), True),
    "gpt2": ((3, 0, 0), True),
    "opt": ((3, 0, 0), True),
}
"""The expected numbers of fused parts, and whether Baton's loop over the layers is used."""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", TINY_MODELS)
def test_the_expected_parts_are_recognised(tmp_path: Path, name: str, dtype: str) -> None:
    runner = loaded(tmp_path, name, dtype)
    assert runner.model.bit_exact
    assert (fused(runner), runner._transformer.has_own_loop) == RECOGNISED[name]


@pytest.mark.parametrize(
    ("activation", "is_known"), [("relu", True), ("gelu_new", True), ("sigmoid", False), ("gelu_10", False)]
)
def test_another_activation_is_left_to_transformers(tmp_path: Path, activation: str, is_known: bool) -> None:
    """gelu_new is the tanh approximation under another name, and gelu_10 is gelu up to 10."""
    runner = loaded(tmp_path, hidden_act=activation)
    assert runner.model.bit_exact
    assert fused(runner) == (3, 3 if is_known else 0, 7)


def test_mlps_with_limits_that_few_rows_reach_are_left_to_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama.modeling_llama import LlamaMLP

    def limited(mlp: Any, x: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x).clamp(-10, 10))
        return rows

    monkeypatch.setattr(LlamaMLP, "forward", limited)
    runner = loaded(tmp_path)
    assert runner.model.bit_exact
    assert fused(runner) == (3, 0, 7)


def test_an_activation_without_a_gate_that_is_unknown_is_computed_by_torch(tmp_path: Path) -> None:
    runner = loaded(tmp_path, "gpt2", activation_function="tanh")
    assert runner.model.bit_exact
    assert runner._transformer.has_own_loop
    assert "an activation that torch computes" in runner._transformer.why_no_programs


def test_attention_that_does_something_else_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    def rotated_twice(*arguments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        query, key = original(*arguments)
        return query, original(key, key, *arguments[2:])[0]

    original = modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", rotated_twice)
    runner = loaded(tmp_path, dtype="bfloat16")
    assert runner.model.bit_exact
    assert fused(runner) == (0, 3, 7)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_angles_in_float32_are_not_rounded(tmp_path: Path, dtype: str) -> None:
    """Olmo rounds rotated rows alone, in Baton's loop and in a program."""
    runner = loaded(tmp_path, dtype=dtype, model_type="olmo2")
    decoder = runner._transformer._decoder
    assert decoder is not None
    assert decoder._programs
    recorded = logits(runner)
    decoder._programs = {}
    assert np.array_equal(recorded, logits(runner))


def test_attention_with_complex_angles_is_found_and_counts_tokens_where_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its layers without a rotation multiply queries by position, which they find out by counting tokens."""
    from transformers.models.llama4 import modeling_llama4

    write_varied_model(tmp_path, LISTED_TYPES["llama4_text"], seed=1)
    runner = load_with(tmp_path, num_blocks=64)
    assert runner.model.bit_exact
    assert fused(runner)[0] == 4
    assert runner._transformer.why_no_programs == ""

    def doubled(*arguments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        query, key = original(*arguments)
        return query, key + key.roll(1, dims=-1)

    original = modeling_llama4.apply_rotary_emb
    monkeypatch.setattr(modeling_llama4, "apply_rotary_emb", doubled)
    runner = load_with(tmp_path, num_blocks=64)
    assert runner.model.bit_exact
    assert fused(runner)[0] == 1
    assert not runner._transformer.has_own_loop


def test_parts_with_other_names_are_found_and_keep_them(tmp_path: Path) -> None:
    runner = loaded(tmp_path, model_type="lfm2", layer_types=["full_attention"] * 3)
    assert fused(runner) == (3, 3, 7)
    assert runner._transformer.why_no_programs == ""
    parts = {name.rpartition(".")[2] for name in runner._transformer.adapters.modules}
    assert parts == {"q_proj", "k_proj", "v_proj", "out_proj", "w1", "w2", "w3", "lm_head"}


@pytest.mark.parametrize(
    ("name", "up_and_down"),
    [("starcoder2", {"c_fc", "c_proj"}), ("nemotron", {"up_proj", "down_proj"}), ("phi", {"fc1", "fc2"})],
)
def test_norms_around_the_mean_and_mlps_without_a_gate_are_found(
    tmp_path: Path, name: str, up_and_down: set[str]
) -> None:
    write_varied_model(tmp_path, LISTED_TYPES[name], seed=1)
    runner = load_with(tmp_path, dtype="bfloat16", num_blocks=64)
    assert runner.model.bit_exact
    kinds = Counter(type(part) for part in runner._transformer._module.modules())
    num_norms = {"starcoder2": 9, "nemotron": 9, "phi": 5}[name]
    assert (kinds[FusedAttention], kinds[PlainMlp], kinds[FusedLayerNorm]) == (4, 4, num_norms)
    assert runner._transformer.row_quantum == 1, "nothing has to be padded but rows in activations"
    assert up_and_down < {module.rpartition(".")[2] for module in runner._transformer.adapters.modules}


def test_a_bound_that_few_numbers_reach_is_found(tmp_path: Path) -> None:
    """Numbers of ordinary rows don't come near it; the norms have no weights."""
    runner = loaded(tmp_path, model_type="olmo", clip_qkv=20.0)
    assert runner.model.bit_exact
    parts = list(runner._transformer._module.modules())
    assert {part.rotation.bound for part in parts if isinstance(part, FusedAttention)} == {20.0}
    assert sum(isinstance(part, FusedLayerNorm) for part in parts) == 7
    assert runner._transformer.why_no_programs == ""


@pytest.mark.parametrize("name", ["jamba", "nemotron_h"])
def test_attention_without_any_rotation_is_found(tmp_path: Path, name: str) -> None:
    write_varied_model(tmp_path, LISTED_TYPES[name], seed=1)
    runner = load_with(tmp_path, num_blocks=64)
    assert runner.model.bit_exact
    assert fused(runner)[0] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gates_among_the_queries_are_found(dtype: torch.dtype) -> None:
    """Qwen3-Next's attention: each head's gate follows its query, and a quarter of the columns are rotated."""
    from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention, Qwen3NextRotaryEmbedding

    attention.register()
    torch.manual_seed(3)
    config = Qwen3NextConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    config._attn_implementation = attention.ATTENTION_NAME
    module = torch.nn.Module()
    module.rotary = Qwen3NextRotaryEmbedding(config)
    module.mixer = Qwen3NextAttention(config, 0).to(dtype)
    assert fuse(module, TorchOperations(1), row_quantum=8, release=lambda _part: None) == ""
    assert isinstance(module.mixer, FusedAttention)
    product = module.mixer.products[0]
    queries, keys, _ = product.modules
    assert queries.num_outputs == 2 * 4 * 16

    def adapted(part: ModuleOutputs) -> torch.Tensor:
        """Which output of a module is at which column of the product, for adapters."""
        numbers = torch.arange(part.num_outputs, dtype=torch.float32)[:, None]
        term = LowRank(torch.zeros(1, 64), 1.0, (Outputs(part.first, numbers),))
        (outputs,) = product.adapt([term], dtype)[0].outputs
        at_columns: torch.Tensor = outputs.b.flatten()
        return at_columns

    places = adapted(queries).view(2, 4, 16)
    assert torch.equal(places.transpose(0, 1).flatten(), torch.arange(128.0)), "gates are behind all queries"
    assert torch.equal(adapted(keys), torch.arange(32.0))


@pytest.mark.parametrize(("name", "gate"), [("afmoe", "gate_proj"), ("laguna", "g_proj")])
def test_gates_with_a_product_of_their_own_are_found(tmp_path: Path, name: str, gate: str) -> None:
    write_varied_model(tmp_path, LISTED_TYPES[name], seed=1)
    runner = load_with(tmp_path, num_blocks=64)
    assert runner.model.bit_exact
    assert fused(runner)[0] == 4
    assert runner._transformer.has_own_loop
    assert f"model.layers.0.self_attn.{gate}" in runner._transformer.adapters.modules


def test_experts_of_older_releases_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.mixtral import modeling_mixtral

    original = modeling_mixtral.MixtralExperts.__init__

    def older(self: torch.nn.Module, *arguments: Any) -> None:
        original(self, *arguments)
        for name in ("_is_expert_parallel", "has_post_expert_norm"):  # transformers 5.17 sets neither
            self.__dict__.pop(name, None)

    expected = loaded(tmp_path, "mixtral")
    monkeypatch.setattr(modeling_mixtral.MixtralExperts, "__init__", older)
    runner = loaded(tmp_path, "mixtral")
    assert runner.model.bit_exact
    assert fused(runner) == fused(expected)


def test_a_loop_that_computes_something_else_stays_with_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = RotaryTable._stacked
    monkeypatch.setattr(RotaryTable, "_stacked", lambda self, angles, at: -original(self, angles, at))
    runner = loaded(tmp_path)
    assert fused(runner) == (3, 3, 7)
    assert not runner._transformer.has_own_loop
    assert "its logits are not those of transformers' loop" in runner._transformer.why_no_own_loop


def test_mlps_with_biases_are_left_to_transformers(tmp_path: Path) -> None:
    runner = loaded(tmp_path, mlp_bias=True)
    assert fused(runner) == (3, 0, 7)


def paths_of(runner: TorchModelRunner) -> dict[str, ComputePath]:
    return {path.part: path for path in runner.model.compute_paths}


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What is logged, by a logger of its own, since earlier tests may have configured the module's logger."""
    out = io.StringIO()
    log = structlog.wrap_logger(structlog.PrintLogger(out), processors=[structlog.processors.JSONRenderer()])
    monkeypatch.setattr("baton.node.process._log", log)
    return out


def test_a_model_on_the_fastest_path_says_so(tmp_path: Path) -> None:
    paths = paths_of(loaded(tmp_path))
    assert list(paths) == ["weights", "products", "attention", "decoder", "step"]
    assert paths["weights"] == ComputePath("weights", "float32, 0 MiB")
    assert paths["decoder"] == ComputePath("decoder", "Baton's loop over the layers")
    assert paths["step"] == ComputePath("step", "one call for all layers")


@pytest.mark.parametrize(
    ("name", "changed", "why"),
    [
        ("llama", {"hidden_act": "sigmoid"}, ""),
        ("opt", {"word_embed_proj_dim": 32}, "no sum of those before them"),
    ],
)
def test_a_slower_decoder_is_named_with_its_reason(
    tmp_path: Path, logged: io.StringIO, name: str, changed: dict[str, Any], why: str
) -> None:
    runner = loaded(tmp_path, name, **changed)
    paths = paths_of(runner)
    assert why in paths["decoder"].why_not_faster
    assert bool(why) == bool(paths["decoder"].why_not_faster)
    assert paths["step"].why_not_faster
    log_slow_paths(runner.model)
    said = [json.loads(line)["event"] for line in logged.getvalue().splitlines()]
    slow = [path for path in paths.values() if path.why_not_faster]
    assert said == [
        f"a slower path: {one.part} is computed by {one.runs}, because {one.why_not_faster}" for one in slow
    ]


def test_without_kernels_one_line_says_so_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, logged: io.StringIO
) -> None:
    monkeypatch.setattr(kernel_file, "LIBRARY", tmp_path / "none.so")
    info = loaded(tmp_path).model
    reason = "the kernel library is not built: install a C compiler, then run `pip install -e .` again"
    slow = [ComputePath("products", "torch", reason), ComputePath("step", "one call each", "there are no programs")]
    log_slow_paths(replace(info, compute_paths=tuple(slow)))
    (line,) = logged.getvalue().splitlines()
    assert f"{reason}. Until then prompts take about twelve times as long" in line


def test_attention_that_is_not_recognised_is_named_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama import modeling_llama

    original = modeling_llama.LlamaAttention.forward

    @wraps(original)
    def strict(self: Any, *arguments: Any, **named: Any) -> Any:
        if "use_cache" not in named:
            raise TypeError("it wants use_cache")
        return original(self, *arguments, **named)

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", strict)
    why = paths_of(loaded(tmp_path))["decoder"].why_not_faster
    assert "self_attn of LlamaDecoderLayer is a LlamaAttention, no FusedAttention" in why
    assert "it raised TypeError: it wants use_cache" in why


def test_a_bug_in_the_decoder_is_raised_and_no_slower_path_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a model would be served slower without a reason that anyone sees."""
    monkeypatch.setattr(RotaryTable, "__init__", lambda self, *_arguments: self.mispelled)
    with pytest.raises(AttributeError, match="mispelled"):
        loaded(tmp_path)
