"""What a model's own code finds where a linear layer was replaced: it asks for the weight, casts and multiplies it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

from baton.runner.backends.kernel_choice import choose_operations
from baton.runner.model.fused.rows import FusedNorm
from baton.runner.model.layers import PackedLinear
from baton.runner.model.stored.layers import StoredLinear
from baton.runner.model.weights import load_model
from baton.runner.shared_by_loaders import prepare
from baton.runner.spec import WeightSpec
from tests.support.kernel_inputs import randn
from tests.support.listed_types import LISTED_TYPES
from tests.support.load_with import load_tiny
from tests.support.varied_models import write_varied_model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_replaced_layer_answers_for_its_weight_without_holding_it(dtype: torch.dtype) -> None:
    weight = randn(24, 48, dtype=dtype)
    layer = PackedLinear(choose_operations(1), weight, None, dtype)
    found = layer.weight
    assert (found.dtype, found.shape, found.device) == (dtype, weight.shape, weight.device)
    x = randn(5, 48, seed=3, dtype=dtype)
    assert torch.equal(functional.linear(x, found), layer(x))


def test_a_weight_multiplied_with_columns_gives_those_of_the_layer() -> None:
    """Jamba's layer multiplies so, and adds its bias later."""
    bias = randn(24, seed=5)
    layer = PackedLinear(choose_operations(1), randn(24, 48), bias, torch.float32)
    x = randn(2, 5, 48, seed=3)
    plain = PackedLinear(choose_operations(1), randn(24, 48), None, torch.float32)
    for columns in (layer.weight @ x.transpose(1, 2), torch.matmul(layer.weight, x.transpose(1, 2))):
        assert torch.equal(columns, plain(x).transpose(1, 2))
    assert layer.bias is not None
    assert torch.equal(layer.bias, bias)


@pytest.mark.parametrize("cast", [torch.Tensor.float, lambda w: w.to(torch.float32), lambda w: w.type(torch.float32)])
def test_a_cast_weight_is_multiplied_in_the_dtype_it_is_cast_to(cast: object) -> None:
    weight, x, operations = randn(24, 48, dtype=torch.bfloat16), randn(5, 48, seed=3), choose_operations(1)
    assert callable(cast)
    found = cast(PackedLinear(operations, weight, None, torch.bfloat16).weight)
    assert found.dtype == torch.float32
    expected = operations.linear(x, operations.pack(weight.float()))
    assert torch.equal(functional.linear(x, found), expected)


def test_whatever_else_needs_the_numbers_of_a_weight_is_refused() -> None:
    layer = PackedLinear(choose_operations(1), randn(24, 48), None, torch.float32)
    for ask in (torch.Tensor.mean, torch.Tensor.clone, lambda w: randn(2, 24) @ w, lambda w: w[0]):
        with pytest.raises(TypeError, match=r"needs the numbers of a weight|unsupported operand"):
            ask(layer.weight)


@pytest.mark.parametrize("in_parts", [False, True])
def test_a_layer_that_its_class_makes_in_float32_stays_so(tmp_path: Path, in_parts: bool) -> None:
    prepare(num_threads=1)
    write_varied_model(tmp_path, LISTED_TYPES["hunyuan_v1_moe"], seed=1)
    module = load_model(tmp_path, WeightSpec(dtype="bfloat16", in_parts=in_parts)).module
    gate, query = (module.get_submodule(f"model.layers.0.{name}") for name in ("mlp.gate.wg", "self_attn.q_proj"))
    assert gate.weight.dtype == torch.float32
    assert isinstance(query, StoredLinear) == in_parts


def test_linear_layers_that_share_a_weight_both_hold_it(tmp_path: Path) -> None:
    """Zamba2's layers share weights, of which a checkpoint has one copy."""
    prepare(num_threads=1)
    write_varied_model(tmp_path, LISTED_TYPES["zamba2"], seed=1)
    module = load_model(tmp_path, WeightSpec(dtype="float32", in_parts=True)).module
    one, other = (module.get_submodule(f"model.layers.{layer}.shared_transformer.self_attn.q_proj") for layer in (1, 3))
    assert isinstance(one, StoredLinear)
    assert isinstance(other, StoredLinear)
    assert one.stored is other.stored


def test_a_norm_takes_rows_that_are_wider_than_its_weight() -> None:
    """Mamba2's last norm does, behind a residual in float32."""
    weight, x = randn(64, dtype=torch.bfloat16), randn(5, 64, seed=3)
    norm, wide = (FusedNorm(choose_operations(1), of, 1e-5, False) for of in (weight, weight.float()))
    assert norm(x).dtype == torch.float32
    assert torch.equal(norm(x), wide(x))


@pytest.mark.parametrize("architecture", ["gemma3_text", "qwen2"])
def test_an_embedding_that_shares_the_weight_of_the_head_holds_none(tmp_path: Path, architecture: str) -> None:
    module = load_tiny(tmp_path, architecture, config={"tie_word_embeddings": True})._transformer._module
    assert not [name for name, parameter in module.named_parameters() if parameter.dim() > 1]
    ids = torch.tensor([3, 0, 255])
    scale = module.config.hidden_size**0.5 if architecture == "gemma3_text" else 1.0
    table = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(module.get_input_embeddings()(ids), table[ids] * scale)
