"""GGUF files become models that compute with the integers of their blocks, or are refused in one line.

`BATON_FUZZ_EXAMPLES=1000` damages a file that many times.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from baton.errors import ConfigError
from baton.model_formats.gguf.container import open_gguf
from baton.runner.model.layers import PackedEmbedding
from baton.runner.model.stored.gguf import QUANTIZED_FORMATS
from kv_transfer.layout import LayoutFingerprint, layout_mismatch
from tests.support.gguf_files import SCALE_STARTS, random_blocks
from tests.support.gguf_models import ARCHITECTURES, converted, random_module, write_module
from tests.support.packed_runs import CountingOperations, PlainOnly, Sample, error, load, logits, refuse
from tests.support.quantized_models import edit_config

EXAMPLES = int(os.environ.get("BATON_FUZZ_EXAMPLES", "50"))
WIDE: Mapping[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
"""Rows that the blocks of all formats divide."""


Samples = Callable[..., Sample]


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Samples:
    """Directories of files with some formats, beside those with the same numbers in float32."""

    @cache
    def sample(matrices: str | Callable[[str], str], name: str = "llama", **changes: Any) -> Sample:
        module, root = random_module(name, **{**WIDE, **changes}), tmp_path_factory.mktemp("gguf")
        directory = converted(write_module(root / "tiny.gguf", module, matrices), root / "tiny")
        plain = converted(write_module(root / "twin.gguf", module), root / "twin")
        return Sample(directory, plain, logits(load(plain)))

    return sample


@pytest.mark.parametrize("kind", QUANTIZED_FORMATS)
def test_a_model_computes_with_the_integers_of_its_file(samples: Samples, kind: str) -> None:
    sample = samples(kind)
    assert error(logits(load(sample.directory, dequantize=True)), sample.expected) < 1e-6
    runner = load(sample.directory)
    assert 0 < error(logits(runner), sample.expected) < 0.15
    assert runner.model.bit_exact, runner.model.bit_exact_reason
    assert runner._transformer.why_no_programs == ""


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_computes_with_integers(samples: Samples, name: str) -> None:
    small = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    sample = samples("Q8_0", name, tie_word_embeddings=name.startswith("gemma"), **small)
    operations = CountingOperations()
    runner = load(sample.directory, operations=operations)
    assert 0 < error(logits(runner), sample.expected) < 0.15
    # Each of 3 layers has q, k, v and o, and gate, up and down; phi3 has q, k and v in one weight, and gate and up. The
    # head is one more.
    assert operations.num_packed >= (3 * 4 if name == "phi3" else 3 * 7) + 1
    assert runner._transformer.why_no_programs == load(sample.twin)._transformer.why_no_programs


def q4_k_m(name: str) -> str:
    """About what llama.cpp calls Q4_K_M: values, some of the downs and the head have 6 bits."""
    return "Q6_K" if any(part in name for part in ("attn_v", "output.weight", "1.ffn_down")) else "Q4_K"


def test_a_file_may_mix_formats(samples: Samples) -> None:
    sample = samples(q4_k_m)
    runner = load(sample.directory)
    assert error(logits(runner), sample.expected) < 0.15
    assert runner._transformer.why_no_programs == ""
    assert re.fullmatch(r"Q4_K, Q6_K \(GGUF\), 5\.\d+ bits a weight, 1 MiB", runner.model.compute_paths[0].runs)


def test_operators_see_what_the_weights_are(samples: Samples) -> None:
    directory = samples("Q4_0").directory
    assert load(directory).model.compute_paths[0].runs == "Q4_0 (GGUF), 4.5 bits a weight, 1 MiB"
    plain = load(directory, dequantize=True).model.compute_paths[0].runs
    assert plain == "Q4_0 (GGUF), dequantised to float32, 7 MiB"
    assert load(directory, operations=PlainOnly(1)).model.compute_paths[0].runs == plain


@pytest.mark.parametrize(("architecture", "is_tied"), [("llama", True), ("llama", False), ("gemma2", True)])
def test_the_embedding_is_read_from_its_blocks(samples: Samples, architecture: str, is_tied: bool) -> None:
    sample = samples("Q5_1", architecture, tie_word_embeddings=is_tied)
    runner = load(sample.directory)
    module = runner._transformer._module
    embedding = module.get_input_embeddings()
    assert not [name for name, parameter in module.named_parameters() if parameter.dim() > 1]
    expected = load_file(sample.twin / "model.safetensors")["model.embed_tokens.weight"]
    ids = torch.arange(expected.shape[0])
    scale = getattr(embedding, "embed_scale", 1.0)
    torch.testing.assert_close(embedding(ids), expected * scale, rtol=1e-6, atol=1e-7)
    held = embedding.baton_rows if architecture == "gemma2" else embedding
    assert isinstance(held, PackedEmbedding)
    assert (held.shared_weight is module.get_output_embeddings()) == is_tied
    # A block of Q5_1 has 32 numbers in 24 bytes.
    assert runner.model.table_bytes == (0 if is_tied else expected.numel() * 24 // 32)
    assert load(sample.twin).model.table_bytes == (0 if is_tied else expected.nbytes)


def test_nodes_that_keep_and_that_dequantise_blocks_refuse_each_other_by_name(samples: Samples) -> None:
    kept, plain = (load(samples("Q4_1").directory, dequantize=dequantize) for dequantize in (False, True))
    assert kept.model.fingerprint != plain.model.fingerprint
    pair = [LayoutFingerprint.of(runner.model, runner.layout, "nixl") for runner in (kept, plain)]
    told = layout_mismatch(pair[0], pair[1], "prefill-0", "decode-0")
    assert told is not None
    assert "differ in model_fingerprint, numerics: prefill-0" in told
    assert re.search(r"decode-0 \[.*numerics=\S+/dequantized", told)


def test_a_quantised_file_is_not_quantised_again_and_a_plain_one_is(samples: Samples) -> None:
    said = refuse(samples("Q4_0").directory, quantization="int8")
    assert "quantised already (Q4_0 (GGUF)); leave quantization out" in said
    runner = load(samples("F16").directory, quantization="int8")
    assert runner.model.compute_paths[0].runs.startswith("int8, groups of 32, 8.5 bits a weight")


def change_tensor(part: str, change: Callable[[torch.Tensor], torch.Tensor], to: str = "") -> Callable[[Path], None]:
    """Change a tensor of the first layer's queries; with `to` the changed one is added under that part."""

    def damage(directory: Path) -> None:
        tensors = load_file(directory / "model.safetensors")
        layer = "model.layers.0.self_attn.q_proj"
        tensors[f"{layer}.{to or part}"] = change(tensors[f"{layer}.{part}"]).contiguous()
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})

    return damage


def with_formats(found: object) -> Callable[[Path], None]:
    return lambda directory: edit_config(directory, quantization_config={"quant_method": "gguf", "formats": found})


def infinite(blocks: torch.Tensor) -> torch.Tensor:
    blocks[-1, :2] = torch.tensor([0x00, 0x7C], dtype=torch.uint8)
    return blocks


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file in two formats; its directory `broken-model` is beside it."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_module(path, random_module("llama", hidden_size=64), lambda name: "Q8_0" if "attn_v" in name else "Q4_0")
    converted(path, path.parent / "broken-model")
    return path


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (with_formats(None), "has formats None; Baton reads Q4_0, Q4_1"),
        (with_formats([]), r"has formats \[\]; Baton reads"),
        (with_formats("Q4_0"), "has formats 'Q4_0'; Baton reads"),
        (with_formats(["Q4_0", "IQ2_XS"]), r"has formats \['Q4_0', 'IQ2_XS'\]; Baton reads"),
        (with_formats([["Q4_0"]]), "Baton reads"),
        (with_formats(["Q8_0"]), r"lack \d+ tensors"),
        (change_tensor("q4_0", lambda blocks: blocks[:, :-1]), "q_proj.q4_0 has rows of 35 bytes"),
        (change_tensor("q4_0", lambda blocks: blocks[:-1]), r"q_proj.weight is 63 x 64, not 64 x 64"),
        (change_tensor("q4_0", lambda blocks: blocks[:, :18]), r"q_proj.weight is 64 x 32, not 64 x 64"),
        (change_tensor("q4_0", lambda blocks: blocks[:0]), "is not that of a matrix"),
        (change_tensor("q4_0", lambda blocks: blocks[0]), "is not that of a matrix"),
        (change_tensor("q4_0", lambda blocks: blocks.to(torch.int8)), "q4_0 is of type I8 instead of U8"),
        (change_tensor("q4_0", infinite), "q_proj.q4_0 has scales that are not finite; copy the file again"),
        (
            change_tensor("q4_0", lambda blocks: blocks.clone(), to="q8_0"),
            "q_proj is there in several formats: q4_0, q8_0",
        ),
    ],
)
def test_a_bad_directory_is_refused_in_one_line(
    sound: Path, tmp_path: Path, damage: Callable[[Path], None], words: str
) -> None:
    directory = Path(shutil.copytree(sound.parent / "broken-model", tmp_path / "broken-model"))
    damage(directory)
    assert re.search(words, refuse(directory))


@pytest.mark.parametrize(
    ("kind", "start"), [(kind, start) for kind, starts in SCALE_STARTS.items() for start in starts]
)
def test_a_file_with_a_scale_that_is_not_finite_is_not_converted(tmp_path: Path, kind: str, start: int) -> None:
    source = write_module(tmp_path / "tiny.gguf", random_module("llama", **WIDE), kind)
    content = bytearray(source.read_bytes())
    with open_gguf(source) as file:
        place = file.tensors["blk.1.attn_k.weight"]
        last = place.offset + place.num_bytes - place.format.num_bytes
    content[last + start : last + start + 2] = b"\x00\x7e"
    source.write_bytes(content)
    with pytest.raises(ConfigError, match=r"tiny\.gguf: tensor blk\.1\.attn_k\.weight has a scale that is infinite"):
        converted(source, tmp_path / "model")


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("blk.0.attn_norm.weight", (1, 64), "blk.0.attn_norm.weight is quantised, and no norm and no bias is"),
        ("blk.0.attn_q.bias", (1, 64), "blk.0.attn_q.bias is quantised, and no norm and no bias is"),
        ("blk.0.attn_q.weight", (2, 32, 64), "is quantised and has 3 dimensions instead of 2"),
        ("blk.0.attn_q.weight", (62, 64), "has 62 rows, which 4 heads can't share in pairs"),
    ],
)
def test_a_quantised_tensor_that_can_not_be_one_is_refused(
    tmp_path: Path, name: str, shape: tuple[int, ...], words: str
) -> None:
    blocks = random_blocks("Q8_0", 1, math.prod(shape), seed=0).reshape(*shape[:-1], -1)
    source = write_module(tmp_path / "tiny.gguf", random_module("llama"), replaced={name: ("Q8_0", blocks)})
    with pytest.raises(ConfigError, match=words):
        converted(source, tmp_path / "model")


@settings(
    max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_any_damage_of_a_file_is_refused_or_harmless(
    sound: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    directory = tmp_path_factory.mktemp("fuzz")
    damaged = bytearray(sound.read_bytes())
    with open_gguf(sound) as file:
        header_bytes = min(place.offset for place in file.tensors.values())
    if data.draw(st.booleans()):
        places = st.integers(0, header_bytes - 8)
        del damaged[data.draw(st.sampled_from([len(damaged), len(damaged) - 1, header_bytes])) :]
    else:
        places = st.integers(header_bytes, len(damaged) - 8)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(places)
        damaged[place : place + 8] = data.draw(st.binary(min_size=8, max_size=8) | st.sampled_from(ABSURD))
    (directory / "damaged.gguf").write_bytes(damaged)
    with suppress(ConfigError):
        load(converted(directory / "damaged.gguf", directory / "model"))
    shutil.rmtree(directory)


ABSURD = [struct.pack("<Q", number) for number in (0, 1, 2**31, 2**63, 2**64 - 1)]
