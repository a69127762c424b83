"""Whisper models in CTranslate2's format, as model directories of transformers.

A `model.bin` of CTranslate2 (version 6 of the format, see its `model_spec.py`) is a list of named tensors; those of one
attention are stacked: queries, keys and values, or keys and values. Nothing of them is computed here: bytes are copied.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from baton.errors import ConfigError
from baton.model_formats.files import NewTensor, read_object, write_safetensors, written

_VERSION, _SPEC = 6, "WhisperSpec"
_FLOAT16 = 4
"""The number of the only dtype of weights that is taken; settings such as the number of heads have others."""
_SIDES = ("encoder", "decoder")
_MOST_TENSORS, _MOST_AXES = 1 << 14, 4


@dataclass(frozen=True, slots=True)
class _Stored:
    shape: tuple[int, ...]
    dtype: int
    start: int
    """Where its bytes begin in the file."""
    num_bytes: int

    def rows(self, part: int, num_parts: int) -> _Stored:
        """One of several equal parts of its first axis."""
        count, size = self.shape[0] // num_parts, self.num_bytes // num_parts
        return _Stored((count, *self.shape[1:]), self.dtype, self.start + part * size, size)


def convert_whisper(source: Path, target: Path) -> None:
    """Write the model directory of CTranslate2's files in `source` into an empty directory, and flush it.

    Raises ConfigError for files of another kind.
    """
    path = source / "model.bin"
    with path.open("rb") as file:
        stored = _read_header(file, path)
        tensors = _named(stored, path)
        new = (
            NewTensor(name, "F16", tensor.shape, tensor.num_bytes, partial(_read, file, tensor))
            for name, tensor in tensors.items()
        )
        write_safetensors(target / "model.safetensors", new)
        heads = int.from_bytes(_read(file, stored["encoder/num_heads"]), "little", signed=True)
    configurations = _configurations(tensors, heads, own=read_object(source / "config.json"))
    files = {name: json.dumps(content, indent=2).encode() for name, content in configurations.items()}
    for name, content in {**files, "tokenizer.json": (source / "tokenizer.json").read_bytes()}.items():
        with written(target / name) as out:
            out.write(content)


def _read_header(file: IO[bytes], path: Path) -> dict[str, _Stored]:
    size = path.stat().st_size

    def number(fmt: str) -> int:
        data = file.read(struct.calcsize(fmt))
        if len(data) < struct.calcsize(fmt):
            raise ConfigError(f"{path} is cut short; copy it again")
        value: int = struct.unpack("<" + fmt, data)[0]
        return value

    def text() -> str:
        return file.read(number("H")).rstrip(b"\0").decode("utf-8", "replace")

    version, spec = number("I"), text()
    number("I")
    if (version, spec) != (_VERSION, _SPEC):
        raise ConfigError(f"{path} holds {spec[:40]!r} in version {version} of CTranslate2's format, no {_SPEC}")
    tensors: dict[str, _Stored] = {}
    for _ in range(min(number("I"), _MOST_TENSORS)):
        name, axes = text(), number("B")
        shape = tuple(number("I") for _ in range(min(axes, _MOST_AXES)))
        dtype, num_bytes = number("B"), number("I")
        start = file.tell()
        if start + num_bytes > size:
            raise ConfigError(f"{path} is cut short in {name[:80]!r}; copy it again")
        tensors[name] = _Stored(shape, dtype, start, num_bytes)
        file.seek(num_bytes, os.SEEK_CUR)
    return tensors


def _named(stored: Mapping[str, _Stored], path: Path) -> dict[str, _Stored]:
    """The tensors by the names that transformers has for them."""
    tensors: dict[str, _Stored] = {}

    def put(name: str, stored_name: str, part: int = 0, num_parts: int = 1) -> None:
        tensor = stored.get(stored_name)
        if tensor is None or tensor.dtype != _FLOAT16 or not tensor.shape or tensor.shape[0] % num_parts:
            raise ConfigError(f"{path} has no usable tensor {stored_name}; copy it again")
        tensors[f"model.{name}"] = tensor.rows(part, num_parts)

    def put_layer(name: str, stored_name: str, part: int = 0, num_parts: int = 1) -> None:
        put(f"{name}.weight", f"{stored_name}/weight", part, num_parts)
        if not name.endswith("k_proj"):  # which has no bias in Whisper
            put(f"{name}.bias", f"{stored_name}/bias", part, num_parts)

    def put_norm(name: str, stored_name: str) -> None:
        put(f"{name}.weight", f"{stored_name}/gamma")
        put(f"{name}.bias", f"{stored_name}/beta")

    for side in _SIDES:
        put(f"{side}.embed_positions.weight", f"{side}/position_encodings/encodings")
        put_norm(f"{side}.layer_norm", f"{side}/layer_norm")
        for index in _layers(stored, side):
            layer, own = f"{side}.layers.{index}", f"{side}/layer_{index}"
            for part, name in enumerate("qkv"):
                put_layer(f"{layer}.self_attn.{name}_proj", f"{own}/self_attention/linear_0", part, 3)
            put_layer(f"{layer}.self_attn.out_proj", f"{own}/self_attention/linear_1")
            put_norm(f"{layer}.self_attn_layer_norm", f"{own}/self_attention/layer_norm")
            if side == "decoder":
                put_layer(f"{layer}.encoder_attn.q_proj", f"{own}/attention/linear_0")
                for part, name in enumerate("kv"):
                    put_layer(f"{layer}.encoder_attn.{name}_proj", f"{own}/attention/linear_1", part, 2)
                put_layer(f"{layer}.encoder_attn.out_proj", f"{own}/attention/linear_2")
                put_norm(f"{layer}.encoder_attn_layer_norm", f"{own}/attention/layer_norm")
            put_layer(f"{layer}.fc1", f"{own}/ffn/linear_0")
            put_layer(f"{layer}.fc2", f"{own}/ffn/linear_1")
            put_norm(f"{layer}.final_layer_norm", f"{own}/ffn/layer_norm")
    for name in ("conv1", "conv2"):
        put_layer(f"encoder.{name}", f"encoder/{name}")
    put("decoder.embed_tokens.weight", "decoder/embeddings/weight")
    return tensors


def _layers(stored: Mapping[str, _Stored], side: str) -> Iterator[int]:
    index = 0
    while f"{side}/layer_{index}/ffn/linear_0/weight" in stored:
        yield index
        index += 1


def _read(file: IO[bytes], stored: _Stored) -> bytes:
    file.seek(stored.start)
    return file.read(stored.num_bytes)


def _configurations(tensors: Mapping[str, _Stored], heads: int, own: Mapping[str, Any]) -> Mapping[str, Any]:
    """The files that say what the model is. `own`: CTranslate2's config.json."""
    vocab_size, width = tensors["model.decoder.embed_tokens.weight"].shape
    mel_bins = tensors["model.encoder.conv1.weight"].shape[1]
    layers = {
        side: sum(name.startswith(f"model.{side}.layers.") and name.endswith("fc1.weight") for name in tensors)
        for side in _SIDES
    }
    # The vocabulary of models for English alone lacks one token; the special ones lie before that of the start.
    start = 50257 if vocab_size < 51865 else 50258
    special = {
        "decoder_start_token_id": start,
        "bos_token_id": start - 1,
        "eos_token_id": start - 1,
        "pad_token_id": start - 1,
    }
    config = {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "is_encoder_decoder": True,
        "d_model": width,
        "encoder_layers": layers["encoder"],
        "decoder_layers": layers["decoder"],
        "encoder_attention_heads": heads,
        "decoder_attention_heads": heads,
        "encoder_ffn_dim": tensors["model.encoder.layers.0.fc1.weight"].shape[0],
        "decoder_ffn_dim": tensors["model.decoder.layers.0.fc1.weight"].shape[0],
        "num_mel_bins": mel_bins,
        "max_source_positions": tensors["model.encoder.embed_positions.weight"].shape[0],
        "max_target_positions": tensors["model.decoder.embed_positions.weight"].shape[0],
        "vocab_size": vocab_size,
        **special,
        "tie_word_embeddings": True,
        "dtype": "float16",
    }
    generation = {
        **special,
        "is_multilingual": vocab_size >= 51865,
        "suppress_tokens": own.get("suppress_ids", []),
        "begin_suppress_tokens": own.get("suppress_ids_begin", []),
        **({"alignment_heads": own["alignment_heads"]} if own.get("alignment_heads") else {}),
    }
    features = {"feature_size": mel_bins, "feature_extractor_type": "WhisperFeatureExtractor"}
    return {
        "config.json": config,
        "generation_config.json": generation,
        "preprocessor_config.json": features,
    }
