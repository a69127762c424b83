"""Whisper in CTranslate2's format: a model directory with its tensors is made of it, and other files are refused."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from baton.errors import ConfigError
from baton.model_formats.encoder_decoders import EncoderDecoder, encoder_decoder
from baton.models.ctranslate2 import convert_whisper
from tests.support.encoder_decoder_models import write_encoder_decoder


def text(name: str) -> bytes:
    data = name.encode() + b"\0"
    return struct.pack("<H", len(data)) + data


def file_of(
    tensors: Mapping[str, torch.Tensor], *, version: int = 6, spec: str = "WhisperSpec", dtype: int = 4
) -> bytes:
    """A model.bin with these tensors and the number of heads."""
    data = struct.pack("<I", version) + text(spec) + struct.pack("<II", 3, len(tensors) + 1)
    data += text("encoder/num_heads") + struct.pack("<BBI", 0, 2, 2) + struct.pack("<h", 4)
    for name, tensor in tensors.items():
        raw = tensor.half().numpy().tobytes()
        shape = struct.pack(f"<B{tensor.dim()}I", tensor.dim(), *tensor.shape)
        data += text(name) + shape + struct.pack("<BI", dtype, len(raw)) + raw
    return data


def stacked(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """transformers' tensors of a Whisper model as CTranslate2 names and stacks them."""
    found: dict[str, torch.Tensor] = {}

    def layer(name: str, *parts: str) -> None:
        found[f"{name}/weight"] = torch.cat([weights[f"{part}.weight"] for part in parts])
        zeros = torch.zeros(weights[f"{parts[0]}.weight"].shape[0])
        found[f"{name}/bias"] = torch.cat([weights.get(f"{part}.bias", zeros) for part in parts])

    def norm(name: str, part: str) -> None:
        found[f"{name}/gamma"], found[f"{name}/beta"] = weights[f"{part}.weight"], weights[f"{part}.bias"]

    for side, layers in (("encoder", 2), ("decoder", 3)):
        found[f"{side}/position_encodings/encodings"] = weights[f"model.{side}.embed_positions.weight"]
        norm(f"{side}/layer_norm", f"model.{side}.layer_norm")
        for index in range(layers):
            own, its = f"model.{side}.layers.{index}", f"{side}/layer_{index}"
            layer(f"{its}/self_attention/linear_0", *(f"{own}.self_attn.{name}_proj" for name in "qkv"))
            layer(f"{its}/self_attention/linear_1", f"{own}.self_attn.out_proj")
            norm(f"{its}/self_attention/layer_norm", f"{own}.self_attn_layer_norm")
            if side == "decoder":
                layer(f"{its}/attention/linear_0", f"{own}.encoder_attn.q_proj")
                layer(f"{its}/attention/linear_1", *(f"{own}.encoder_attn.{name}_proj" for name in "kv"))
                layer(f"{its}/attention/linear_2", f"{own}.encoder_attn.out_proj")
                norm(f"{its}/attention/layer_norm", f"{own}.encoder_attn_layer_norm")
            layer(f"{its}/ffn/linear_0", f"{own}.fc1")
            layer(f"{its}/ffn/linear_1", f"{own}.fc2")
            norm(f"{its}/ffn/layer_norm", f"{own}.final_layer_norm")
    for name in ("conv1", "conv2"):
        layer(f"encoder/{name}", f"model.encoder.{name}")
    found["decoder/embeddings/weight"] = weights["model.decoder.embed_tokens.weight"]
    return found


@pytest.fixture
def weights(tmp_path: Path) -> dict[str, torch.Tensor]:
    """The weights of a tiny Whisper model, none of which is zero."""
    write_encoder_decoder(tmp_path / "tiny", "whisper")
    found = load_file(tmp_path / "tiny" / "model.safetensors")
    return {
        name: tensor + 0.1 * torch.randn_like(tensor) for name, tensor in found.items() if name != "proj_out.weight"
    }


@pytest.fixture
def source(tmp_path: Path, weights: Mapping[str, torch.Tensor]) -> Path:
    directory = tmp_path / "source"
    directory.mkdir()
    (directory / "model.bin").write_bytes(file_of(stacked(weights)))
    (directory / "config.json").write_text(
        json.dumps({"suppress_ids": [1, 2], "suppress_ids_begin": [3], "alignment_heads": [[1, 0]]})
    )
    (directory / "tokenizer.json").write_bytes(b"{}")
    return directory


def test_a_directory_has_the_tensors_of_the_model(
    tmp_path: Path, source: Path, weights: Mapping[str, torch.Tensor]
) -> None:
    made = tmp_path / "made"
    made.mkdir()
    convert_whisper(source, made)
    found = load_file(made / "model.safetensors")
    assert found.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(found[name], tensor.half()), name
    assert encoder_decoder(made) == EncoderDecoder("speech", 50, 60, (50257,))
    generation = json.loads((made / "generation_config.json").read_text())
    assert (generation["suppress_tokens"], generation["is_multilingual"]) == ([1, 2], False)
    assert generation["alignment_heads"] == [[1, 0]]
    config = json.loads((made / "config.json").read_text())
    assert (config["encoder_attention_heads"], config["num_mel_bins"], config["vocab_size"]) == (4, 8, 256)


def test_other_files_are_refused(tmp_path: Path, source: Path, weights: Mapping[str, torch.Tensor]) -> None:
    tensors = stacked(weights)
    whole = file_of(tensors)
    without = {name: tensor for name, tensor in tensors.items() if "decoder/layer_1/attention/linear_1/w" not in name}
    for data, reason in (
        (b"", "cut short"),
        (whole[:40], "cut short"),
        (whole[:-1], "cut short in 'decoder/embeddings/weight'"),
        (file_of(tensors, version=5), "version 5"),
        (file_of(tensors, spec="TransformerSpec"), "'TransformerSpec'"),
        (file_of(tensors, dtype=1), "no usable tensor"),
        (file_of(without), "no usable tensor decoder/layer_1/attention/linear_1/weight"),
    ):
        (source / "model.bin").write_bytes(data)
        made = tmp_path / "made"
        made.mkdir(exist_ok=True)
        with pytest.raises(ConfigError, match=reason):
            convert_whisper(source, made)
