"""GGUF files as models: they compute what the model computes from which llama.cpp's converter would make the file."""

from __future__ import annotations

import json
import math
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from baton.errors import ConfigError
from baton.runner.model.stored.convert_gguf import main
from tests.support.gguf_models import ARCHITECTURES, VOCAB_SIZE, converted, random_module, write_module

TOKENS = torch.arange(3, 43)[None] * 7 % VOCAB_SIZE
LAYERS = 6
"""As many as Gemma 3 needs for a layer that attends to all tokens."""
WINDOWS = ["sliding_attention"] * (LAYERS - 1) + ["full_attention"]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    directory = tmp_path_factory.mktemp("sound")
    return write_module(directory / "model.gguf", random_module("llama"), "Q8_0").read_bytes()


def tiny(name: str) -> Any:
    if not name.startswith("gemma"):
        return random_module(name)
    # Files of these have no output matrix, and the scale of attention follows from the size of the heads.
    more: dict[str, Any] = {"tie_word_embeddings": True, "query_pre_attn_scalar": 16}
    if name == "gemma3_text":
        more |= {"num_hidden_layers": LAYERS, "layer_types": WINDOWS}
    return random_module(name, **more)


def loaded(directory: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@torch.inference_mode()
def logits(module: Any) -> torch.Tensor:
    found: torch.Tensor = module(TOKENS).logits
    return found


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_converted_file_has_the_weights_and_the_logits_of_the_model(tmp_path: Path, name: str) -> None:
    module = tiny(name)
    again = loaded(converted(write_module(tmp_path / "model.gguf", module), tmp_path / "model"))
    for key, weight in module.state_dict().items():
        torch.testing.assert_close(again.state_dict()[key], weight, rtol=0, atol=2e-7)
    torch.testing.assert_close(logits(again), logits(module), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_plain_matrices_keep_their_dtype_and_their_bits(tmp_path: Path, kind: str) -> None:
    module = tiny("llama")
    directory = converted(write_module(tmp_path / "model.gguf", module, kind), tmp_path / "model")
    found = load_file(directory / "model.safetensors")
    dtype = {"F16": torch.float16, "BF16": torch.bfloat16}[kind]
    for name, weight in module.state_dict().items():
        assert found[name].dtype == (dtype if weight.dim() == 2 else torch.float32)
        assert torch.equal(found[name].float(), weight)
    assert "quantization_config" not in json.loads((directory / "config.json").read_text())


def test_a_file_without_an_output_matrix_has_a_tied_head(tmp_path: Path) -> None:
    module = random_module("llama", tie_word_embeddings=True)
    again = loaded(converted(write_module(tmp_path / "model.gguf", module), tmp_path / "model"))
    assert again.config.tie_word_embeddings
    torch.testing.assert_close(logits(again), logits(module), rtol=1e-4, atol=1e-4)


def llama3_module() -> tuple[Any, list[float]]:
    """A model with Llama 3's scaling, and the factors that llama.cpp's converter computes for it."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    module = random_module("llama", rope_parameters=rope, head_dim=32)
    plain = random_module("llama", rope_parameters={"rope_type": "default", "rope_theta": 500_000.0}, head_dim=32)
    factors = plain.model.rotary_emb.inv_freq / module.model.rotary_emb.inv_freq
    return module, factors.tolist()


def test_factors_of_frequencies_become_llama3_scaling(tmp_path: Path) -> None:
    module, factors = llama3_module()
    assert any(1.0 < factor < 31.0 for factor in factors), "no frequency is between both ends"
    source = write_module(tmp_path / "model.gguf", module, more={"rope_freqs.weight": factors})
    again = loaded(converted(source, tmp_path / "model"))
    assert again.config.rope_parameters["rope_type"] == "llama3"
    torch.testing.assert_close(again.model.rotary_emb.inv_freq, module.model.rotary_emb.inv_freq)


def test_factors_of_another_kind_are_refused(tmp_path: Path) -> None:
    module, factors = llama3_module()
    factors[3] += 0.5
    source = write_module(tmp_path / "model.gguf", module, more={"rope_freqs.weight": factors})
    with pytest.raises(ConfigError, match=r"rope_freqs\.weight of an unknown kind"):
        converted(source, tmp_path / "model")


def test_an_enormous_head_is_refused_before_its_frequencies_are_computed(tmp_path: Path) -> None:
    module, factors = llama3_module()
    sizes = {"llama.attention.key_length": 2**31 - 1}
    source = write_module(tmp_path / "model.gguf", module, more={"rope_freqs.weight": factors}, metadata=sizes)
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match=r"rope_freqs\.weight of an unknown kind"):
            converted(source, tmp_path / "model")
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
YARN_KEYS: dict[str, Any] = {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 128}

LLAMA_YARN = {f"llama.rope.{key}": value for key, value in YARN_KEYS.items()}


@pytest.mark.parametrize(
    ("keys", "rope"),
    [
        ({"scaling.type": "linear", "scaling.factor": 4.0}, LINEAR),
        ({"scaling.factor": 4.0}, LINEAR),
        ({"scale_linear": 4.0}, LINEAR),
        ({"scale_linear": 2.0, "scaling.factor": 4.0}, LINEAR),
        ({"scaling.type": "none", "scaling.factor": 4.0}, {"rope_type": "default"}),
        (YARN_KEYS, YARN),
        ({**YARN_KEYS, "scaling.attn_factor": 0.5}, {**YARN, "attention_factor": (0.1 * math.log(4) + 1) / 2}),
        ({**YARN_KEYS, "scaling.yarn_attn_factor": 0.75}, {**YARN, "attention_factor": 0.75}),
        (
            {**YARN_KEYS, "scaling.yarn_beta_fast": 8.0, "scaling.yarn_beta_slow": 4.0},
            {**YARN, "beta_fast": 8.0, "beta_slow": 4.0},
        ),
        ({**YARN_KEYS, "scaling.yarn_ext_factor": 1.0, "scaling.finetuned": True}, YARN),
    ],
)
def test_keys_about_rotation_have_the_effect_that_transformers_gives_them(
    tmp_path: Path, keys: dict[str, Any], rope: dict[str, Any]
) -> None:
    module = random_module("qwen2", rope_parameters={**rope, "rope_theta": 10_000.0})
    metadata = {f"qwen2.rope.{key}": value for key, value in keys.items()}
    again = loaded(converted(write_module(tmp_path / "model.gguf", module, metadata=metadata), tmp_path / "model"))
    ours, theirs = again.model.rotary_emb, module.model.rotary_emb
    torch.testing.assert_close(ours.inv_freq, theirs.inv_freq, rtol=0, atol=0)
    assert ours.attention_scaling == pytest.approx(theirs.attention_scaling)


def test_long_rope_of_phi3_has_both_sets_of_factors(tmp_path: Path) -> None:
    module = random_module("phi3")
    factors = {"rope_factors_short.weight": [1.0] * 8, "rope_factors_long.weight": [2.0] * 8}
    source = write_module(
        tmp_path / "model.gguf",
        module,
        more=factors,
        metadata={"phi3.rope.scaling.original_context_length": 128, "phi3.rope.scaling.attn_factor": 1.5},
    )
    parameters = loaded(converted(source, tmp_path / "model")).config.rope_parameters
    assert (parameters["rope_type"], parameters["attention_factor"]) == ("longrope", 1.5)
    assert (parameters["short_factor"], parameters["long_factor"]) == ([1.0] * 8, [2.0] * 8)


@pytest.mark.parametrize("names", [("llama", "short", "long"), ("phi3", "long")])
def test_factors_of_long_rope_that_have_no_effect_are_refused(tmp_path: Path, names: tuple[str, ...]) -> None:
    factors = {f"rope_factors_{name}.weight": [2.0] * 8 for name in names[1:]}
    source = write_module(tmp_path / "model.gguf", random_module(names[0]), more=factors)
    with pytest.raises(ConfigError, match=r"rope_factors_(short|long)\.weight; LongRoPE is read of phi3 alone"):
        converted(source, tmp_path / "model")


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"general.architecture": "mamba"}, "architecture 'mamba'; GGUF files are read of llama, qwen2, qwen3"),
        ({"llama.expert_count": 8}, "mixture of experts"),
        ({"split.count": 3}, "llama-gguf-split --merge"),
        ({"llama.block_count": 2}, "has no place in a llama model of 2 layers"),
        ({"llama.block_count": 2**31 - 1}, "of which 2147483647 layers can't be made"),
        ({"llama.block_count": "many"}, "llama.block_count is not a positive whole number"),
        ({"llama.context_length": 2**24 + 1}, "has a context of 16777217 tokens, more than 16777216"),
        ({"llama.embedding_length": 0}, "llama.embedding_length is not a positive whole number"),
        ({"llama.rope.dimension_count": 8}, "rotates 8 of the 16 elements of each head"),
        ({"llama.rope.dimension_sections": [4, 4, 4, 4]}, "has llama.rope.dimension_sections = a list, which is not"),
        ({"llama.rope.freq_base_swa": 5e5}, "has llama.rope.freq_base_swa = 500000.0, which is not computed"),
        ({"llama.rope.new_key": "x"}, "has llama.rope.new_key = 'x', which is not computed"),
        ({"llama.rope.scaling.attn_factor": 0.5}, "has llama.rope.scaling.attn_factor = 0.5, which is not computed"),
        ({"llama.rope.scaling.yarn_beta_fast": 8.0}, "has llama.rope.scaling.yarn_beta_fast = 8.0, which is not"),
        ({**LLAMA_YARN, "llama.rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor = 0.5, which is not computed"),
        ({**LLAMA_YARN, "llama.rope.scaling.yarn_log_multiplier": 0.1}, "yarn_log_multiplier = 0.1"),
        ({"llama.rope.scaling.type": "su"}, "scales its rotary embedding by 'su'"),
        ({"llama.rope.freq_base": float("nan")}, "llama.rope.freq_base is not a finite number"),
        ({"llama.rope.freq_base": 0.0}, "llama.rope.freq_base is not a number above 0"),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": -2.0}, "factor is not a number above 0"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer of kind 'bert'; gpt2 and llama are read"),
        ({"tokenizer.ggml.pre": "viking"}, "pre-tokenizer 'viking'; known ones are gpt-2"),
        ({"tokenizer.ggml.tokens": ["a", "a"], "tokenizer.ggml.token_type": [1, 1]}, "has 2 tokens, of which 1 differ"),
        ({"tokenizer.ggml.tokens": ["a"]}, "tokenizer.ggml.token_type is not a list of 1 numbers"),
        (
            {"tokenizer.ggml.tokens": [str(n) for n in range(999)], "tokenizer.ggml.token_type": [1] * 999},
            "has 999 tokens",
        ),
        ({"tokenizer.ggml.merges": ["a b c"]}, "an entry that is not two tokens"),
        ({"tokenizer.ggml.merges": ["nothing known"]}, "a tokenizer that can't be built"),
    ],
)
def test_a_file_that_no_model_can_be_made_of_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], complaint: str
) -> None:
    source = write_module(tmp_path / "model.gguf", random_module("llama"), metadata=changes)
    (tmp_path / "model").mkdir()
    capsys.readouterr()  # the writer of the file may have logged something
    assert main(str(source), str(tmp_path / "model")) == 78
    complaint_line = capsys.readouterr().err
    assert complaint in complaint_line
    assert str(source) in complaint_line
    assert complaint_line.count("\n") == 1


def test_a_layer_has_one_spelling(tmp_path: Path) -> None:
    source = write_module(tmp_path / "model.gguf", random_module("llama"), more={"blk.00.attn_norm.weight": [1.0] * 64})
    with pytest.raises(ConfigError, match=r"tensor blk\.00\.attn_norm\.weight has no place"):
        converted(source, tmp_path / "model")


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2**16), st.binary(min_size=1, max_size=8)), min_size=1, max_size=4))
def test_any_damage_of_a_header_is_refused_in_one_line_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, sound: bytes, damage: list[tuple[int, bytes]]
) -> None:
    content = bytearray(sound)
    header = content.index(b"<|im_end|>")  # the facts of the model are before its tokens
    for share, piece in damage:
        start = share * header >> 16
        content[start : start + len(piece)] = piece
    directory = tmp_path_factory.mktemp("damaged")
    (directory / "model.gguf").write_bytes(content)
    complaint = ""
    try:
        converted(directory / "model.gguf", directory / "model")
    except ConfigError as error:
        complaint = str(error)
    shutil.rmtree(directory)
    assert "\n" not in complaint


def test_an_unknown_tensor_is_refused_by_its_name(tmp_path: Path) -> None:
    source = write_module(tmp_path / "model.gguf", random_module("llama"), more={"blk.0.ssm_a": [1.0]})
    with pytest.raises(ConfigError, match=r"tensor blk\.0\.ssm_a has no place"):
        converted(source, tmp_path / "model")
