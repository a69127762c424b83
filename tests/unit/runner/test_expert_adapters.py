"""Adapters of a mixture's experts and router that don't fit the model are refused by name before memory is taken."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.errors import AdapterRefused
from baton.model_formats.adapters import open_adapter
from baton.runner.model_runner import TorchModelRunner
from tests.support.adapter_files import PREFIX, expert_tensors, lora_tensors, write_adapter
from tests.support.adapter_runs import load_adapter, outputs
from tests.support.load_with import load_tiny

EXPERTS = "model.layers.1.mlp.experts"
GATE_UP, DOWN = (256, 64), (64, 128)
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
Tensors = dict[str, Any]


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> TorchModelRunner:
    """A mixture of 4 experts in 3 layers, of width 64 and 128 inside."""
    return load_tiny(tmp_path_factory.mktemp("base"), "mixtral", seed=5, max_lora_rank=8)


def of_experts(**changed: Any) -> Tensors:
    """Sound tensors of layer 1's experts, with some of A and B replaced: `A`, `B` of down, `inner_A`, `inner_B`."""
    tensors: Tensors = dict(expert_tensors(EXPERTS, [GATE_UP, DOWN], 4))
    for name, tensor in changed.items():
        inner = ".base_layer" if name.startswith("inner") else ""
        tensors[f"{PREFIX}{EXPERTS}{inner}.lora_{name[-1]}.weight"] = tensor
    return tensors


def write(directory: Path, tensors: Tensors, rank: int = 4, **settings: Any) -> Path:
    """Write an adapter that targets the layers of its tensors, and the experts' parameters."""
    layers = {name.split(".lora_")[0].rpartition(".")[2] for name in tensors} - {"experts", "base_layer"}
    settings = {"target_modules": sorted(layers), "target_parameters": BOTH, **settings}
    return write_adapter(directory, tensors, rank, **settings)


def zeros(*shape: int) -> Any:
    return np.zeros(shape, np.float32)


def of_one(expert: str, projection: str = "w1", block: str = "block_sparse_moe") -> Tensors:
    """Tensors of a layer of one expert, as they were named before experts were stacked."""
    shape = (64, 128) if projection == "w2" else (128, 64)
    return dict(lora_tensors({f"model.layers.1.{block}.experts.{expert}.{projection}": shape}))


@pytest.mark.parametrize(
    ("tensors", "settings", "message"),
    [
        (of_experts(A=zeros(12, 128)), {}, r"experts\.lora_A.*\[12, 128\], which is none of the rank 4, 4 times,"),
        (of_experts(B=zeros(64, 20)), {}, r"experts\.lora_B.*\[64, 20\], which is none of the rank 4, 4 times,"),
        (of_experts(A=zeros(16, 64)), {}, r"\[16, 64\], and this model needs \[16, 128\]"),
        (of_experts(B=zeros(128, 16)), {}, r"\[128, 16\], and this model needs \[64, 16\]"),
        (of_experts(inner_A=zeros(16, 256), inner_B=zeros(64, 16)), {}, r"base_layer\.lora_A.*needs \[16, 64\]"),
        (
            of_experts(A=zeros(16, 64), B=zeros(128, 16)),
            {},
            r"base_layer\.lora_A.*\[16, 64\], and this model needs \[16, 256\]",
        ),
        (of_experts(A=zeros(4, 4, 128)), {}, "which is no matrix's"),
        (of_experts(), {"rank_pattern": {"down_proj": 3}}, r"\[16, 128\], which is none of the rank 3, 4 times,"),
        (of_experts(), {"rank_pattern": {"down_proj": 9}}, r"experts has the rank 9, and at most 8 is allowed"),
        (of_experts(), {"target_parameters": []}, "none of its target_modules, and of which it targets no parameter"),
        (of_experts(), {"target_parameters": ["mlp.experts.up_proj"]}, "target_parameters name none of gate_up_proj"),
        (of_experts(), {"target_parameters": ["moe.experts.down_proj"]}, "of which it targets no parameter"),
        (of_experts(), {"target_parameters": BOTH[1:]}, r"base_layer, and its target_parameters name only 1 of"),
        (of_experts(), {"target_parameters": "mlp"}, "target_parameters must be a list"),
        (of_experts(), {"target_parameters": [3]}, "target_parameters must be a list"),
        (
            of_experts() | {f"{PREFIX}{EXPERTS}.lora_B.bias": zeros(64)},
            {"lora_bias": True},
            "has a bias, or tensors of an embedding, for a parameter",
        ),
        (
            of_experts() | {f"{PREFIX}{EXPERTS}.base_layer.down_proj": zeros(4, 64, 128)},
            {},
            "compared for the embedding and the head alone",
        ),
        (dict(expert_tensors("model.layers.7.mlp.experts", [DOWN], 4)), {}, "this model has no such layer"),
        (
            dict(lora_tensors({"model.layers.1.self_attn.q_proj": (64, 64)})),
            {"target_modules": [], "target_parameters": ["q_proj.weight"]},
            "q_proj in target_parameters; name the layer in target_modules",
        ),
        (of_one("4"), {}, r"experts\.4\.w1, and this model has 4 experts"),
        (of_one("999999999"), {}, "this model has 4 experts"),
        (of_one("01"), {}, "which is no product of this model"),
        (of_one("-1"), {}, "which is no product of this model"),
        (of_one("1", "w4"), {}, "which is no product of this model"),
        (of_one("1", "gate_up_proj", "mlp"), {}, "which is no product of this model"),
        (of_one("1") | of_one("1", block="mlp"), {}, r"experts\.1\.w1 twice"),
        (
            of_experts() | of_one("1"),
            {"target_modules": ["w1"]},
            r"experts\.1\.w1 twice, as .*experts\.base_layer, too",
        ),
        (
            of_one("1") | of_experts(),
            {"target_modules": ["w1"]},
            r"experts\.1\.w1 twice, as .*experts\.base_layer, too",
        ),
        (
            dict(lora_tensors({"model.layers.0.mlp.gate": (5, 64)})),
            {},
            r"gate\.lora_B.*\[5, 4\], and this model needs \[4, 4\]",
        ),
    ],
)
def test_adapters_that_do_not_fit_are_refused_before_they_are_read(
    runner: TorchModelRunner, tmp_path: Path, tensors: Tensors, settings: Mapping[str, Any], message: str
) -> None:
    write(tmp_path, tensors, **settings)
    with pytest.raises(AdapterRefused, match=message):
        runner.adapters.load(tmp_path, "not even compared")
    with pytest.raises(AdapterRefused, match=message):
        runner.adapters.check(tmp_path)
    assert not runner._transformer.adapters.slots


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_weights_that_are_no_numbers_are_refused_by_name(runner: TorchModelRunner, tmp_path: Path, bad: float) -> None:
    tensors = of_experts()
    tensors[f"{PREFIX}{EXPERTS}.base_layer.lora_B.weight"][255, 15] = bad
    with pytest.raises(AdapterRefused, match=r"experts\.base_layer\.lora_B\.weight has NaN or infinity"):
        load_adapter(runner, write(tmp_path, tensors))
    assert not runner._transformer.adapters.slots


def test_biases_of_experts_are_refused(tmp_path: Path) -> None:
    tensors = expert_tensors(EXPERTS, [DOWN], 4)
    write(tmp_path / "adapter", tensors, target_parameters=["experts.down_proj", "experts.gate_up_proj_bias"])
    with pytest.raises(AdapterRefused, match=r"experts\.gate_up_proj_bias, which is no weight of a product"):
        load_tiny(tmp_path / "base", "gpt_oss").adapters.check(tmp_path / "adapter")


def test_what_an_adapter_of_experts_is_said_to_be(runner: TorchModelRunner, tmp_path: Path) -> None:
    tensors = expert_tensors(EXPERTS, [GATE_UP], 4, rank=6)
    tensors |= lora_tensors({"model.layers.1.self_attn.q_proj": (64, 64)}, rank=2)
    write(tmp_path, tensors, 2, target_parameters=BOTH[:1], rank_pattern={"gate_up_proj": 6})
    info = runner.adapters.check(tmp_path)
    assert (info.rank, info.num_modules) == (6, 2)
    assert info.num_bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert open_adapter(tmp_path).info() == info, "also without the model"


def test_the_digest_follows_the_parameters_that_are_meant(tmp_path: Path) -> None:
    tensors = of_experts()
    digest = open_adapter(write(tmp_path / "one", tensors)).digest()
    assert open_adapter(write(tmp_path / "same", tensors, target_parameters=BOTH[::-1])).digest() == digest
    assert open_adapter(write(tmp_path / "other", tensors, target_parameters=BOTH[1:])).digest() != digest


def swapped(tensors: Tensors) -> Tensors:
    """The same adapter of experts with A and B as older releases of PEFT wrote them: what they add is transposed."""
    found: Tensors = {}
    for name in [name for name in tensors if name.endswith("lora_A.weight")]:
        other = name.replace("lora_A", "lora_B")
        a = tensors[name].reshape(4, -1, tensors[name].shape[1])
        b = tensors[other].reshape(tensors[other].shape[0], -1, 4)
        found[name] = np.ascontiguousarray(b.transpose(2, 1, 0)).reshape(tensors[name].shape[0], -1)
        found[other] = np.ascontiguousarray(a.transpose(2, 1, 0)).reshape(a.shape[2], -1)
        old_a, old_b = found[name].reshape(4, -1, b.shape[0]), found[other].reshape(a.shape[2], -1, 4)
        # What both kinds of releases add to the weight [experts, outputs, inputs], in PEFT's own sums.
        present, older = "o r e, e r i -> e o i", "o r e, e r i -> e i o"
        assert np.allclose(np.einsum(older, old_b, old_a), np.einsum(present, b, a), atol=1e-4)
    return found


def test_adapters_with_a_and_b_swapped_are_the_same(runner: TorchModelRunner, tmp_path: Path) -> None:
    tensors = dict(expert_tensors(EXPERTS, [GATE_UP, DOWN], 4, scale=0.3))
    digests = [
        load_adapter(runner, write(tmp_path / "present", tensors)),
        load_adapter(runner, write(tmp_path / "older", swapped(tensors))),
    ]
    present, older, without = outputs(runner, *digests, "")
    for digest in digests:
        runner.adapters.unload(digest)
    assert present == older != without


def test_square_tensors_are_as_the_others_in_the_file(tmp_path: Path) -> None:
    square = load_tiny(tmp_path / "base", "qwen3_moe", seed=5)
    tensors = dict(expert_tensors(EXPERTS, [(128, 64), (64, 64)], 4, scale=0.3))
    both, down = swapped(tensors), {name: each for name, each in tensors.items() if "base_layer" not in name}
    found = [
        outputs(square, load_adapter(square, write(tmp_path / f"{number}", each, target_parameters=targets)))
        for number, (each, targets) in enumerate(
            [(tensors, BOTH), (both, BOTH), (down, BOTH[1:]), ({name: both[name] for name in down}, BOTH[1:])]
        )
    ]
    assert found[0] == found[1]
    assert found[2] != found[3], "alone it is as PEFT's present release writes it"


def test_an_adapter_of_experts_comes_and_goes(runner: TorchModelRunner, tmp_path: Path) -> None:
    before = outputs(runner, "")
    digest = load_adapter(runner, write(tmp_path, of_experts()))
    assert outputs(runner, digest) != before
    assert outputs(runner, "") == before
    runner.adapters.unload(digest)
    assert outputs(runner, "") == before
    assert all(one is None for of_product in runner._transformer.adapters.rows.table.experts for one in of_product)
