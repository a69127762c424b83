"""Quantised checkpoints become models whose weights are what their files mean, or are refused in one line."""

from __future__ import annotations

import gc
import json
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from baton.engine.runner import ModelInfo
from baton.errors import ConfigError
from baton.runner.backends.torch_operations import TorchOperations, TorchStack, TorchWeight
from baton.runner.backends.weight_rows import Weight
from baton.runner.model import weights
from baton.runner.model.layers import PackedLinear
from baton.runner.model.random_model import write_random_model
from baton.runner.model.stored.layers import StoredLinear
from kv_transfer.layout import LayoutFingerprint, layout_mismatch
from tests.support.packed_runs import CountingOperations, PlainOnly, Sample, error, load, logits, refuse
from tests.support.quantized_models import (
    FP8_FORMATS,
    PACKED_FORMATS,
    edit_config,
    write_quantized_model,
)
from tests.support.tiny_models import TINY_MODELS

FORMATS = {**PACKED_FORMATS, **FP8_FORMATS}


class CountingReadLayers(TorchOperations):
    """torch's operations, which count the layers whose weight is read and not freed whenever one is packed."""

    def __init__(self) -> None:
        super().__init__(1)
        self.most = 0
        self._others = self._layers()
        """Layers of models that were loaded before, and are kept or not yet collected."""

    def pack(self, *weights: Weight) -> TorchWeight | TorchStack:
        others = set(map(id, self._others))
        own = [layer for layer in self._layers() if id(layer) not in others]
        self.most = max(self.most, sum(layer._held is not None for layer in own))
        return super().pack(*weights)

    @staticmethod
    def _layers() -> list[StoredLinear]:
        return [each for each in gc.get_objects() if type(each) is StoredLinear]


@pytest.fixture(scope="module")
def plain_sample(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Sample]:
    """The plain model of an architecture, which is written and computed once."""

    @cache
    def sample(architecture: str) -> Sample:
        directory = tmp_path_factory.mktemp("plain") / "tiny"
        # Wide enough rows that groups of 32 divide all of them.
        known = {"moe_intermediate_size": 64} if "moe_intermediate_size" in TINY_MODELS[architecture] else {}
        write_random_model(directory, {**TINY_MODELS[architecture], **known, "initializer_range": 0.05}, seed=0)
        return Sample(directory, directory, logits(load(directory)))

    return sample


@pytest.fixture(scope="module")
def quantized_sample(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Sample]:
    """The quantised model of an architecture in a format, which is written and computed once."""

    @cache
    def sample(architecture: str, name: str) -> Sample:
        directory = tmp_path_factory.mktemp("quantised") / "tiny"
        twin = write_quantized_model(directory, architecture, FORMATS[name])
        return Sample(directory, twin, logits(load(twin)))

    return sample


@pytest.mark.parametrize("name", FORMATS)
def test_a_model_computes_with_the_weights_that_its_file_means(
    quantized_sample: Callable[[str, str], Sample], name: str
) -> None:
    sample = quantized_sample("llama", name)
    assert np.array_equal(logits(load(sample.directory, dequantize=True)), sample.expected)
    operations = CountingOperations()
    found = logits(load(sample.directory, operations=operations))
    # Each of 3 layers has q, k, v and o; gate, up and down.
    assert operations.num_packed == 3 * 7
    # Products with integers round their inputs, and those with float8 do not.
    assert error(found, sample.expected) < (1e-5 if name in FP8_FORMATS else 0.15)


@pytest.mark.parametrize("name", ["gptq-int4-asymmetric", "fp8-block"])
def test_a_mixture_computes_with_the_weights_that_its_file_means(
    quantized_sample: Callable[[str, str], Sample], name: str
) -> None:
    sample = quantized_sample("mixtral", name)
    assert np.array_equal(logits(load(sample.directory, dequantize=True)), sample.expected)
    expected = logits(load(sample.twin, operations=TorchOperations(1)))
    assert np.array_equal(logits(load(sample.directory, operations=PlainOnly(1))), expected)
    operations = CountingOperations()
    load(sample.directory, operations=operations)
    # Each of 3 layers has q, k, v and o; gate, up and down of four experts.
    assert operations.num_packed == 3 * (4 + 4 * 3)


@pytest.mark.parametrize(
    ("architecture", "name", "operations", "most"),
    [
        # Each product with integers rounds its input to 8 bits, and a mixture may choose another expert then.
        ("llama", "gptq-int4-asymmetric", None, 0.15),
        ("llama", "ct-int8-rows", None, 0.15),
        ("phi3", "awq-int4", None, 0.15),
        ("mixtral", "ct-int4", None, 0.3),
        ("llama", "gptq-int4-asymmetric", TorchOperations(1), 0.15),
        ("mixtral", "gptq-int4-asymmetric", TorchOperations(1), 0.3),
        # Products with float8 round nothing but their sums.
        ("llama", "fp8-block", None, 1e-5),
        ("qwen3", "fp8-tensor", None, 1e-5),
        ("phi3", "fp8-channel", None, 1e-5),
        ("mixtral", "fp8-block", None, 1e-5),
        ("llama", "fp8-channel", TorchOperations(1), 1e-5),
        ("mixtral", "fp8-block", TorchOperations(1), 1e-5),
    ],
)
def test_packed_products_differ_by_the_rounding_of_their_inputs_and_sums(
    quantized_sample: Callable[[str, str], Sample],
    architecture: str,
    name: str,
    operations: TorchOperations | None,
    most: float,
) -> None:
    sample = quantized_sample(architecture, name)
    runner = load(sample.directory, operations=operations)
    assert 0 < error(logits(runner), sample.expected) < most
    assert runner.model.bit_exact, runner.model.bit_exact_reason
    assert runner._transformer.has_own_loop
    assert (runner._transformer.why_no_programs == "") == (operations is None)


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        *((architecture, "gptq-int4-asymmetric") for architecture in sorted(set(TINY_MODELS) - {"gpt_oss", "gpt2"})),
        # Which weights are packed depends on the architecture, and hardly on the format: llama stands for the plain
        # decoders, deepseek_v3 for latent attention, gemma2 for gates with GELU and norms behind the products, opt
        # for biases and products without a gate, and qwen3_moe for experts.
        *((architecture, "fp8-block") for architecture in ("deepseek_v3", "gemma2", "llama", "opt", "qwen3_moe")),
    ],
)
def test_every_architecture_takes_packed_weights(
    quantized_sample: Callable[[str, str], Sample], architecture: str, name: str
) -> None:
    sample, operations = quantized_sample(architecture, name), CountingOperations()
    runner = load(sample.directory, operations=operations)
    assert operations.num_packed >= 3 * 4
    assert error(logits(runner), sample.expected) < 0.3
    assert runner.model.bit_exact


@pytest.mark.parametrize("name", ["awq-int4", "fp8-block"])
def test_only_the_weights_of_one_part_are_in_memory_before_they_are_packed(
    quantized_sample: Callable[[str, str], Sample], name: str
) -> None:
    operations = CountingReadLayers()
    load(quantized_sample("llama", name).directory, operations=operations)
    # q, k, v and o. The model has 3 layers, each with 7 weights.
    assert operations.most == 4


def test_operators_see_what_the_weights_are(quantized_sample: Callable[[str, str], Sample]) -> None:
    directory = quantized_sample("llama", "awq-int4").directory
    kept, plain = load(directory), load(directory, dequantize=True)
    assert kept.model.compute_paths[0].runs == "int4 (AWQ), groups of 32, 4.75 bits a weight, 0 MiB"
    assert plain.model.compute_paths[0].runs == "int4 (AWQ), groups of 32, dequantised to float32, 0 MiB"
    float8 = load(quantized_sample("llama", "fp8-channel").directory).model.compute_paths[0].runs
    assert float8 == "compressed-tensors: fp8 (e4m3), 8.44 bits a weight, 0 MiB"


def test_nodes_that_treat_weights_differently_refuse_each_other_by_name(
    plain_sample: Callable[[str], Sample],
    quantized_sample: Callable[[str, str], Sample],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fingerprint(**how: Any) -> tuple[ModelInfo, LayoutFingerprint]:
        runner = load(plain_sample("llama").directory, **how)
        return runner.model, LayoutFingerprint.of(runner.model, runner.layout, "nixl")

    quantised = quantized_sample("llama", "awq-int4").directory
    kept = load(quantised).model.fingerprint
    assert kept != load(quantised, dequantize=True).model.fingerprint
    monkeypatch.setattr(weights, "READING", weights.READING + 1)
    assert load(quantised).model.fingerprint != kept, "another version of Baton may read it differently"
    plain, four, eight = fingerprint(), fingerprint(quantization="int4"), fingerprint(quantization="int8")
    assert len({model.fingerprint for model, _ in (plain, four, eight)}) == 3
    told = layout_mismatch(plain[1], four[1], "prefill-0", "decode-0")
    assert told is not None
    assert "differ in model_fingerprint, numerics: prefill-0" in told
    assert re.search(r"decode-0 \[.*numerics=\S+/int4 ", told)
    # A plain model has the same weights with and without dequantize.
    assert layout_mismatch(plain[1], fingerprint(dequantize=True)[1]) is None


@pytest.mark.parametrize(
    ("architecture", "quantization", "share"),
    [
        *((architecture, "int4", 0.6) for architecture in TINY_MODELS),
        *((architecture, "int8", 0.1) for architecture in ("llama", "gpt2", "gpt_oss", "qwen3_moe")),
    ],
)
def test_a_plain_model_that_is_quantised_at_load_computes_nearly_the_same(
    plain_sample: Callable[[str], Sample], architecture: str, quantization: str, share: float
) -> None:
    sample, operations = plain_sample(architecture), CountingOperations()
    runner = load(sample.directory, quantization=quantization, operations=operations)
    assert operations.num_packed >= 9
    assert runner.model.bit_exact
    assert not [name for name, p in runner._transformer._module.named_parameters() if p.dim() > 2]
    assert 0 < error(logits(runner), sample.expected) < share


def test_a_tied_head_has_eight_bits_and_serves_the_embedding(tmp_path: Path) -> None:
    write_random_model(tmp_path / "tiny", TINY_MODELS["qwen2"], seed=0)
    embeddings = load_file(tmp_path / "tiny/model.safetensors")["model.embed_tokens.weight"]
    runner = load(tmp_path / "tiny", quantization="int4")
    module = runner._transformer._module
    rows = module.get_input_embeddings()(torch.arange(256))
    assert isinstance(module.get_output_embeddings(), PackedLinear)
    assert torch.equal(rows, module.get_output_embeddings().take_rows(torch.arange(256)))
    # An error of at most half of a step, 1/127 of the largest number of a group, and of the scale's rounding.
    most = embeddings.view(256, -1, 32).abs().amax(dim=2, keepdim=True) / 127 * 0.6
    assert bool(((rows - embeddings).view(256, -1, 32).abs() <= most).all())
    # The head is an eighth of this model's weights.
    assert runner.model.compute_paths[0].runs.startswith("int4, groups of 32, 5.02 bits a weight")


def test_norms_biases_and_embeddings_stay_plain(tmp_path: Path) -> None:
    write_random_model(tmp_path / "tiny", TINY_MODELS["qwen3"], seed=0)
    plain = load_file(tmp_path / "tiny/model.safetensors")
    module = load(tmp_path / "tiny", quantization="int4")._transformer._module
    assert torch.equal(module.model.embed_tokens.weight, plain["model.embed_tokens.weight"])
    assert torch.equal(module.model.norm.rms_weight, plain["model.norm.weight"])


def test_the_router_of_a_mixture_stays_plain(tmp_path: Path) -> None:
    write_random_model(tmp_path / "tiny", {**TINY_MODELS["mixtral"], "num_local_experts": 32}, seed=0)
    plain = load_file(tmp_path / "tiny/model.safetensors")
    module = load(tmp_path / "tiny", quantization="int4")._transformer._module
    router = next(name for name in plain if name.endswith("layers.1.block_sparse_moe.gate.weight"))
    assert torch.equal(module.model.layers[1].mlp.gate.weight, plain[router])


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    write_quantized_model(directory, "mixtral", PACKED_FORMATS["gptq-int4-asymmetric"])
    return directory


@pytest.fixture
def directory(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "broken-model"))


def name_a_file(name: str) -> Callable[[Path], object]:
    def damage(directory: Path) -> None:
        index = {"weight_map": {"model.norm.weight": name, "lm_head.weight": "model.safetensors"}}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))

    return damage


def change_tensor(suffix: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], object]:
    def damage(directory: Path) -> None:
        tensors = load_file(directory / "model.safetensors")
        name = next(name for name in tensors if name.endswith(suffix))
        tensors[name] = change(tensors[name]).contiguous()
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})

    return damage


def rename_tensor(suffix: str, name: str) -> Callable[[Path], object]:
    def damage(directory: Path) -> None:
        tensors = load_file(directory / "model.safetensors")
        tensors[name] = tensors.pop(next(name for name in tensors if name.endswith(suffix)))
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})

    return damage


def store_a_tensor_twice(directory: Path) -> None:
    name = "model.norm.weight"
    weight = load_file(directory / "model.safetensors")[name]
    save_file({name: weight}, directory / "more.safetensors", metadata={"format": "pt"})
    index = {"weight_map": {name: "more.safetensors", "lm_head.weight": "model.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (store_a_tensor_twice, r"model\.norm\.weight is in model\.safetensors, and in more\.safetensors, too"),
        (name_a_file("../model.safetensors"), r"'../model.safetensors', which is not the name of a safetensors file"),
        (name_a_file("/etc/passwd"), "'/etc/passwd', which is not the name"),
        (name_a_file("sub/model.safetensors"), "which is not the name"),
        (name_a_file("model.bin"), "which is not the name"),
        (name_a_file("\n.safetensors"), "which is not the name"),
        (rename_tensor("norm.weight", "a\nb"), r"'a\\nb', which is no name of a weight"),
        (rename_tensor("norm.weight", "a" * 600), "which is no name of a weight"),
        (rename_tensor("1.w1.scales", "x.w1.scales"), "1.w1 lacks scales"),
        (change_tensor("q_proj.scales", lambda t: t / 0), "q_proj.scales has numbers that are not finite"),
        (change_tensor("q_proj.qweight", lambda t: t[:, :32]), "q_proj.scales has the shape"),
        (change_tensor("embed_tokens.weight", lambda t: t[1:]), "embed_tokens.weight has the shape"),
        (change_tensor("embed_tokens.weight", lambda t: t.to(torch.float8_e4m3fn)), "F8_E4M3 and has no scale"),
        (change_tensor("qzeros", lambda t: t.float()), "qzeros is of type F32"),
        (lambda d: edit_config(d, num_hidden_layers=10**9), "has num_hidden_layers 1000000000 in its config"),
        (lambda d: edit_config(d, num_hidden_layers=1000), "1000 layers can't be made of"),
        (lambda d: edit_config(d, num_hidden_layers=0), "has num_hidden_layers 0 in its config"),
        (lambda d: edit_config(d, num_local_experts=10**6), "config.json asks for"),
        (lambda d: edit_config(d, vocab_size=10**11), "has vocab_size 100000000000 in its config.json"),
        (lambda d: edit_config(d, intermediate_size=256), "expert 0 of"),
        (lambda d: edit_config(d, hidden_size=128), "."),
        (lambda d: edit_config(d, quantization_config=None), "lack"),
        (lambda d: edit_config(d, quantization_config=[]), "not a JSON object"),
        (lambda d: edit_config(d, quantization_config={"quant_method": "hqq"}), "'hqq'; Baton reads gptq"),
    ],
)
def test_a_bad_checkpoint_is_refused_in_one_line(directory: Path, damage: Callable[[Path], object], words: str) -> None:
    damage(directory)
    assert re.search(words, refuse(directory))


def test_float8_that_is_not_a_number_is_refused_when_it_is_packed_or_dequantised(tmp_path: Path) -> None:
    write_quantized_model(tmp_path / "broken-model", "llama", FP8_FORMATS["fp8-block"])

    def damage(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(torch.uint8)[3, 5] = 0xFF
        return tensor

    change_tensor("layers.1.mlp.up_proj.weight", damage)(tmp_path / "broken-model")
    for how in ({}, {"dequantize": True}):
        assert "layers.1.mlp.up_proj.weight has numbers that are not finite" in refuse(tmp_path / "broken-model", **how)


def test_a_quantised_checkpoint_is_not_quantised_again(directory: Path) -> None:
    assert "quantised already (int4 (GPTQ), groups of 32)" in refuse(directory, quantization="int4")


def test_operations_that_take_no_integers_refuse_to_quantise(plain_sample: Callable[[str], Sample]) -> None:
    with pytest.raises(ConfigError, match="int4 weights can't be computed by torch-4-rows"):
        load(plain_sample("llama").directory, quantization="int4", operations=PlainOnly(1))


def test_a_weight_with_a_number_that_is_not_finite_is_not_quantised(tmp_path: Path) -> None:
    write_random_model(tmp_path / "broken-model", TINY_MODELS["llama"], seed=0)
    change_tensor("layers.1.mlp.up_proj.weight", lambda t: t.log())(tmp_path / "broken-model")
    assert "layers.1.mlp.up_proj.weight has numbers that are not finite" in refuse(
        tmp_path / "broken-model", quantization="int8"
    )


def test_code_of_other_quantizers_is_never_called(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.quantizers import auto

    monkeypatch.setattr(auto.AutoHfQuantizer, "from_config", None)
    load(directory)


@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_damage_of_a_header_or_a_configuration_is_refused_or_harmless(
    pristine: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    directory = Path(shutil.copytree(pristine, tmp_path_factory.mktemp("fuzz") / "broken-model"))
    if data.draw(st.booleans()):
        damaged = bytearray((directory / "model.safetensors").read_bytes())
        header = int.from_bytes(damaged[:8], "little")
        for _ in range(data.draw(st.integers(1, 3))):
            place = data.draw(st.integers(0, header + 7))
            damaged[place] = data.draw(st.sampled_from(b'0123456789[]{},:"aFI' + bytes([damaged[place] ^ 1])))
        size = data.draw(st.sampled_from([len(damaged), 5000]))
        (directory / "model.safetensors").write_bytes(damaged[:size])
    else:
        config = json.loads((directory / "config.json").read_text())
        inner = config["quantization_config"]
        number = st.sampled_from([-1, 0, 1, 3, 2**31, 2**63, 10**30])
        key = data.draw(st.sampled_from(sorted({*inner, *config} - {"model_type"})))
        value: Any = data.draw(number | st.none() | st.text(max_size=3) | st.lists(number, max_size=2))
        edit_config(directory, **({"quantization_config": {**inner, key: value}} if key in inner else {key: value}))
    with suppress(ConfigError):
        load(directory)
    shutil.rmtree(directory)
