"""Each format of quantised checkpoints is read as its tools wrote it, or refused in one line."""

from __future__ import annotations

import copy
import hashlib
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.runner.backends.quantized_weight import Float8Weight, QuantizedWeight
from baton.runner.model.stored.formats import format_of
from baton.runner.model.stored.quantize import quantized
from baton.runner.model.stored.weight import StoredWeight, UnusableWeight, WeightFormat, stored_weights
from baton.runner.model.weights import READING
from tests.support.quantized_models import (
    FP8_FORMATS,
    PACKED_FORMATS,
    Tensors,
    WrittenFormat,
    gptq,
    integers_of,
    pack_quantized,
)

FORMATS = {**PACKED_FORMATS, **FP8_FORMATS}
_DTYPES = {
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.int32: "I32",
    torch.int64: "I64",
}


@dataclass(frozen=True)
class TensorInMemory:
    """A tensor of a checkpoint that was never in a file."""

    tensor: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> str:
        return _DTYPES[self.tensor.dtype]

    def read(self) -> torch.Tensor:
        return self.tensor


def format_with(form: WrittenFormat, **changes: object) -> WeightFormat:
    found = format_of({"quantization_config": {**form.config, **changes}})
    assert found is not None
    return found


def read(weight_format: WeightFormat, tensors: Tensors, *, dequantize: bool = False) -> StoredWeight:
    """The only weight among these tensors, all of which must be its own."""
    weights, names = stored_weights(
        weight_format, {name: TensorInMemory(tensor) for name, tensor in tensors.items()}, dequantize
    )
    assert names == set(tensors)
    assert list(weights) == ["model.layer.weight"]
    return weights["model.layer.weight"]


def _strategy(strategy: object) -> dict[str, Any]:
    return {"num_bits": 4, "type": "int", "strategy": strategy}


def written(form: WrittenFormat, n: int = 48, k: int = 160) -> tuple[Tensors, torch.Tensor]:
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(0))
    return form.write("model.layer", weight)


@pytest.mark.parametrize("name", FORMATS)
def test_a_weight_is_read_as_it_was_meant(name: str) -> None:
    tensors, meant = written(FORMATS[name])
    stored = read(format_with(FORMATS[name]), tensors)
    assert stored.shape == (48, 160)
    assert torch.equal(stored.dequantized().double(), meant)
    assert stored.packed_bytes is not None


@pytest.mark.parametrize("name", PACKED_FORMATS)
def test_integers_stay_integers_whose_size_is_known_before_they_are_read(name: str) -> None:
    tensors, meant = written(PACKED_FORMATS[name])
    stored = read(format_with(PACKED_FORMATS[name]), tensors)
    weight = stored.read()
    assert isinstance(weight, QuantizedWeight)
    assert weight.codes.dtype == torch.uint8
    assert int(weight.codes.max()) < 2**weight.bits
    assert torch.equal(weight.dequantized(torch.float64), meant)
    zeros = 0 if isinstance(weight.zeros, int) else weight.zeros.numel()
    assert stored.packed_bytes == weight.codes.numel() * weight.bits // 8 + 2 * weight.scales.numel() + zeros


def test_a_weight_of_fp8_in_blocks_may_end_within_a_block() -> None:
    tensors, meant = written(FP8_FORMATS["fp8-block"], 130, 300)
    assert tensors["model.layer.weight_scale_inv"].shape == (2, 3)
    assert torch.equal(read(format_with(FP8_FORMATS["fp8-block"]), tensors).dequantized().double(), meant)


@pytest.mark.parametrize(("name", "num_scales"), [("fp8-tensor", 1), ("fp8-channel", 1), ("fp8-block", 2)])
def test_float8_stays_float8_whose_size_is_known_before_it_is_read(name: str, num_scales: int) -> None:
    tensors, meant = written(FP8_FORMATS[name])
    stored = read(format_with(FP8_FORMATS[name]), tensors)
    weight = stored.read()
    assert isinstance(weight, Float8Weight)
    assert weight.codes.dtype == torch.float8_e4m3fn
    assert weight.scales.shape == (48, num_scales)
    assert torch.equal(weight.dequantized(torch.float64).float().double(), meant)
    assert stored.packed_bytes == 48 * 160 + 4 * weight.scales.numel()


def test_float8_in_blocks_that_the_kernels_do_not_take_is_dequantised() -> None:
    form = FP8_FORMATS["fp8-block"]
    codes = torch.randn(48, 160, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    for columns, is_packed in ((160, True), (96, True), (80, False), (16, False)):
        scales = torch.rand(2, -(-160 // columns))
        tensors = {"model.layer.weight": codes, "model.layer.weight_scale_inv": scales}
        stored = read(format_with(form, weight_block_size=[32, columns]), tensors)
        assert (stored.packed_bytes is not None) == is_packed
        spread = scales.repeat_interleave(32, 0)[:48].repeat_interleave(columns, 1)[:, :160]
        assert torch.equal(stored.dequantized(), codes.float() * spread)


@pytest.mark.parametrize("name", FP8_FORMATS)
@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_code_that_is_not_a_number_is_refused_by_name(name: str, code: int) -> None:
    tensors, _ = written(FP8_FORMATS[name])
    tensors["model.layer.weight"].view(torch.uint8)[47, 159] = code
    stored = read(format_with(FP8_FORMATS[name]), tensors)
    for read_it in (stored.read, stored.dequantized):
        with pytest.raises(UnusableWeight, match=r"model\.layer\.weight has numbers that are not finite"):
            read_it()


def test_a_packed_row_may_end_within_a_word() -> None:
    form = PACKED_FORMATS["ct-int4"]
    weight = torch.randn(8, 36, generator=torch.Generator().manual_seed(0))
    config = {**form.config["config_groups"]["group_0"]["weights"], "group_size": 12}
    groups = {"group_0": {"targets": ["Linear"], "weights": config}}
    found = integers_of(weight, 4, 12, symmetric=True)
    tensors = pack_quantized("model.layer", found, 4, symmetric=True)
    tensors["model.layer.weight_scale"] = torch.from_numpy(found.scales)
    assert torch.equal(read(format_with(form, config_groups=groups), tensors).dequantized().double(), found.dequantized)


def test_a_zero_of_gptq_wraps_around() -> None:
    """Version 1 stores zeros minus one: a stored 15 means 0, as AutoGPTQ and GPTQModel compute it."""
    form = PACKED_FORMATS["gptq-int4-asymmetric"]
    found = integers_of(torch.rand(16, 64), 4, 32, symmetric=False)
    found = type(found)(found.codes, np.zeros_like(found.zeros), found.scales)
    tensors = gptq("model.layer", found, 4)
    assert int(tensors["model.layer.qzeros"][0, 0]) == -1
    assert torch.equal(read(format_with(form), tensors).dequantized().double(), found.dequantized)


def test_inputs_in_the_order_of_their_activations_need_dequantize() -> None:
    form = PACKED_FORMATS["gptq-int4-asymmetric"]
    tensors, meant = written(form)
    order = torch.randperm(160, generator=torch.Generator().manual_seed(1))
    codes = read(format_with(form), tensors).read()
    assert isinstance(codes, QuantizedWeight)
    shuffled = codes.codes[:, order].T.to(torch.int32).reshape(20, 8, 48)
    tensors["model.layer.qweight"] = sum((shuffled[:, place] << (4 * place) for place in range(8)), shuffled[:, 0] * 0)
    tensors["model.layer.g_idx"] = (order // 32).to(torch.int32)
    with pytest.raises(UnusableWeight, match=r"desc_act.*--dequantize"):
        read(format_with(form), tensors)
    stored = read(format_with(form), tensors, dequantize=True)
    assert stored.packed_bytes is None
    assert torch.equal(stored.dequantized().double(), meant[:, order])


def test_each_layer_of_a_mixed_checkpoint_has_the_scheme_whose_target_names_it() -> None:
    four, eight = PACKED_FORMATS["ct-int4"], PACKED_FORMATS["ct-packed-int8"]
    groups = {
        "a": {**four.config["config_groups"]["group_0"], "targets": ["re:.*mlp.*"]},
        "b": {**eight.config["config_groups"]["group_0"], "targets": ["Linear"]},
    }
    weight = torch.randn(8, 64)
    tensors = {**four.write("a.mlp.up", weight)[0], **eight.write("a.attn.q", weight)[0]}
    found = {name: TensorInMemory(tensor) for name, tensor in tensors.items()}
    weights, _ = stored_weights(format_with(four, format="mixed-precision", config_groups=groups), found, False)
    bits = {name: stored.read().bits for name, stored in weights.items()}  # type: ignore[union-attr]
    assert bits == {"a.mlp.up.weight": 4, "a.attn.q.weight": 8}


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("gptq-int4", {"bits": 3}, "bits 3; Baton reads 4, 8"),
        ("gptq-int4", {"bits": True}, "not an integer"),
        ("gptq-int4", {"group_size": 0}, "must be positive"),
        ("gptq-int4", {"group_size": 10**30}, "don't divide"),
        ("gptq-int4", {"checkpoint_format": "marlin"}, "'marlin'; Baton reads gptq and gptq_v2"),
        ("gptq-int4", {"dynamic": {"-:lm_head": {}}}, "dynamic"),
        ("awq-int4", {"version": "gemv"}, "'gemv'; Baton reads version gemm"),
        ("awq-int4", {"bits": 8}, "bits 8; Baton reads 4"),
        ("ct-int4", {"format": "marlin-24"}, "'marlin-24'.*pack-quantized"),
        ("ct-int4", {"format": ["pack-quantized"]}, "Baton reads"),
        ("ct-int4", {"config_groups": {}}, "needs 1 to 64 config_groups"),
        ("ct-int4", {"config_groups": {"a": {"targets": ["Linear"]}}}, "without weights"),
        ("ct-int4", {"config_groups": {"a": {"targets": [], "weights": _strategy([])}}}, r"the strategy \[\]"),
        ("ct-int4", {"transform_config": {"config_groups": {}}, "sparsity_config": {"format": "x"}}, "sparsity_config"),
        ("fp8-block", {"weight_block_size": [0, 128]}, "must be positive"),
        ("fp8-block", {"weight_block_size": "128"}, "not two sizes"),
        ("gptq-int4", {"quant_method": "bitsandbytes"}, "'bitsandbytes'; Baton reads gptq, .*--quantization"),
        ("gptq-int4", {"quant_method": "hqq"}, "'hqq'; Baton reads gptq, "),
        ("gptq-int4", {"quant_method": "exl2"}, "'exl2'; Baton reads gptq, .*GPTQ or AWQ"),
        ("gptq-int4", {"quant_method": "something_new"}, "'something_new'; Baton reads gptq, awq, compressed-tensors"),
        ("gptq-int4", {"quant_method": None}, "no quant_method; Baton reads gptq, "),
        ("gptq-int4", {"quant_method": None, "load_in_4bit": True}, "'bitsandbytes'"),
    ],
)
def test_a_configuration_that_cant_be_read_is_refused_by_name(name: str, changes: dict[str, Any], words: str) -> None:
    tensors, _ = written(FORMATS[name])
    with pytest.raises(UnusableWeight, match=words) as caught:
        read(format_with(FORMATS[name], **changes), tensors)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("pattern", ["(a+)+$", "a" * 300, "*", ".*.*.*.*"])
def test_a_target_that_could_take_forever_is_refused(pattern: str) -> None:
    form = PACKED_FORMATS["ct-int4"]
    group = form.config["config_groups"]["group_0"]
    groups = {
        "a": {**group, "targets": [f"re:{pattern}"]},
        "b": {**group, "weights": {**group["weights"], "num_bits": 8}},
    }
    with pytest.raises(UnusableWeight, match="pattern"):
        read(format_with(form, config_groups=groups), written(form)[0])


@pytest.mark.parametrize(
    ("name", "part", "change", "words"),
    [
        ("gptq-int4", "scales", lambda t: t[:-1], r"scales has the shape \[4, 48\] instead of \[5, 48\]"),
        ("gptq-int4", "scales", lambda t: t * torch.nan, "scales has numbers that are not finite"),
        ("gptq-int4", "scales", lambda t: t.int(), "scales is of type I32 instead of BF16 or F16 or F32"),
        ("gptq-int4", "qzeros", lambda t: t[:, 1:], "qzeros has the shape"),
        ("gptq-int4", "qweight", lambda t: t[None], "not that of a matrix"),
        ("gptq-int4", "qweight", lambda t: t[:0], "not that of a matrix"),
        ("gptq-int4", "qweight", lambda t: t[:-1], "groups of 32 don't divide"),
        ("gptq-int4", "g_idx", lambda t: t + 5, "g_idx names groups that model.layer.scales lacks"),
        ("gptq-int4", "g_idx", lambda t: t - 1, "g_idx names groups"),
        ("awq-int4", "qzeros", lambda t: t[1:], "qzeros has the shape"),
        ("awq-int4", "qweight", lambda t: t.long(), "qweight is of type I64"),
        ("ct-int4", "weight_shape", lambda t: t * 1000, "weight_shape is 48000 x 160000"),
        ("ct-int4", "weight_shape", lambda t: -t, "weight_shape is -48 x -160"),
        ("ct-int4", "weight_scale", lambda t: t.T.contiguous(), "weight_scale has the shape"),
        ("ct-int4-asymmetric", "weight_zero_point", lambda t: t[1:], "weight_zero_point has the shape"),
        ("ct-int8-groups-asymmetric", "weight_zero_point", lambda t: t[1:], "weight_zero_point has the shape"),
        ("ct-int8-groups-asymmetric", "weight_zero_point", lambda t: t.long() + 300, "not from -128 to 127; copy"),
        ("ct-int4-asymmetric", "weight_zero_point", lambda t: torch.full((48, 5), 8).char(), "not from -8 to 7; copy"),
        ("ct-int8-rows", "weight", lambda t: t.float(), "weight is of type F32 instead of I8"),
        ("ct-int8-rows", "weight_scale", lambda t: t / 0, "not finite"),
        ("fp8-block", "weight_scale_inv", lambda t: torch.ones(3, 3), "which is neither one scale"),
        ("fp8-block", "weight_scale_inv", lambda t: t * torch.inf, "not finite"),
        ("fp8-channel", "weight", lambda t: t.float(), "weight is of type F32 instead of F8_E4M3"),
    ],
)
def test_a_damaged_tensor_is_refused_by_name(name: str, part: str, change: Any, words: str) -> None:
    tensors, _ = written(FORMATS[name])
    tensors[f"model.layer.{part}"] = change(tensors[f"model.layer.{part}"])
    with pytest.raises(UnusableWeight, match=words) as caught:
        read(format_with(FORMATS[name]), tensors)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", FORMATS)
def test_a_missing_tensor_is_refused_by_name(name: str) -> None:
    tensors, _ = written(FORMATS[name])
    weight_format = format_with(FORMATS[name])
    optional = {"g_idx", "weight_zero_point"}
    for lost in tensors:
        part = lost.removeprefix("model.layer.")
        if part in optional or part in weight_format.main_parts:
            continue
        found = {name: TensorInMemory(tensor) for name, tensor in tensors.items() if name != lost}
        with pytest.raises(UnusableWeight, match=f"model.layer lacks {part}"):
            stored_weights(weight_format, found, False)


MEANT = {
    "gptq-int4": "b45fd845",
    "gptq-int4-asymmetric": "1b603fb8",
    "gptq-v2-int4-asymmetric": "1b603fb8",
    "gptq-int8-rows": "6159f3c7",
    "awq-int4": "1b603fb8",
    "ct-int4": "ca2bb8de",
    "ct-int4-asymmetric": "62586fc4",
    "ct-packed-int8": "79619dd1",
    "ct-int8-rows": "6159f3c7",
    "ct-int8-groups-asymmetric": "bba5d3fa",
    "fp8-block": "5de15d88",
    "fp8-tensor": "5de15d88",
    "fp8-channel": "607d17a1",
    "4": "d92ea5ed",
    "8": "8aeea0a4",
}
"""A digest of the numbers that a weight in each format means."""


@pytest.mark.parametrize("name", MEANT)
def test_what_a_weight_means_changes_with_the_number_in_fingerprints_alone(name: str) -> None:
    """Nodes of different versions of Baton must not take each other's KV for that of the same weights."""
    numbers = (torch.arange(16 * 64) * 7919 % 1021 - 510).float().view(16, 64) / 512
    if name in FORMATS:
        tensors, _ = FORMATS[name].write("model.layer", numbers)
        meant = read(format_with(FORMATS[name]), tensors).dequantized()
    else:
        meant = quantized(numbers, int(name)).dequantized()
    found = hashlib.sha256(meant.numpy().tobytes()).hexdigest()[:8]
    assert (READING, found) == (2, MEANT[name]), "raise READING, and write its new number and the digests here"


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
_KEYS = st.sampled_from(
    [
        *("quant_method", "bits", "group_size", "sym", "desc_act", "checkpoint_format", "dynamic", "version", "format"),
        *("config_groups", "weight_block_size", "sparsity_config", "transform_config", "zero_point", "targets"),
    ]
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(FORMATS)), st.dictionaries(_KEYS, _JSON, min_size=1, max_size=3), st.data())
def test_any_configuration_and_any_shapes_are_read_or_refused(name: str, changes: dict[str, Any], data: Any) -> None:
    tensors, _ = written(FORMATS[name], 16, 64)
    damaged = data.draw(st.sampled_from(sorted(tensors)))
    shape = data.draw(st.lists(st.integers(0, 5), max_size=3))
    dtype = data.draw(st.sampled_from(sorted(_DTYPES, key=str)))
    tensors[damaged] = data.draw(st.sampled_from([tensors[damaged], torch.ones(shape).to(dtype)]))
    found = {name: TensorInMemory(tensor) for name, tensor in tensors.items()}
    with suppress(UnusableWeight):
        weight_format = format_with(FORMATS[name], **changes)
        weights, _ = stored_weights(weight_format, found, data.draw(st.booleans()))
        assert all(stored.dequantized().shape == stored.shape for stored in weights.values())


def places_in(value: Any) -> list[tuple[Any, Any]]:
    """Every container in a configuration, with each of its keys."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    return [(value, key) for key in keys] + [place for key in keys for place in places_in(value[key])]


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(FORMATS)), _JSON, st.data())
def test_any_value_anywhere_in_a_configuration_is_read_or_refused(name: str, value: Any, data: Any) -> None:
    tensors, _ = written(FORMATS[name], 16, 64)
    config = copy.deepcopy(dict(FORMATS[name].config))
    container, key = data.draw(st.sampled_from(places_in(config)))
    container[key] = value
    with suppress(UnusableWeight):
        found = format_of({"quantization_config": config})
        assert found is not None
        assert read(found, tensors).dequantized().shape == (16, 64)


@pytest.mark.parametrize(("bits", "most"), [(8, 0.006), (4, 0.09)])
def test_a_weight_quantised_here_is_near_the_plain_one(bits: int, most: float) -> None:
    weight = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))
    weight[3] = 0
    found = quantized(weight, bits)
    assert (found.shape, found.bits, found.group, found.zeros) == ((64, 1024), bits, 32, 1 << (bits - 1))
    assert int(found.codes.max()) < 2**bits
    assert torch.equal(found.dequantized()[3], weight[3])
    error = (found.dequantized() - weight).square().mean().sqrt()
    assert 0 < float(error) < most


def test_the_scale_of_four_bits_is_better_than_the_one_that_keeps_the_largest_number() -> None:
    weight = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))
    groups = weight.view(-1, 32)
    largest = groups.gather(1, groups.abs().argmax(dim=1, keepdim=True)) / -8
    simple = (groups / largest).round().clamp(-8, 7) * largest
    found = quantized(weight, 4).dequantized()
    assert float((found - weight).square().mean()) < 0.97 * float((simple - groups).square().mean())


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -1e30])
def test_numbers_that_no_scale_holds_are_refused(number: float) -> None:
    weight = torch.zeros(2, 64)
    weight[1, 5] = number
    for bits in (4, 8):
        with pytest.raises(UnusableWeight, match="not finite, or too large"):
            quantized(weight, bits)
