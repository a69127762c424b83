"""A model directory on disk: what must be in it, which numbers its configuration may have, and which model it is.

Needs no torch, so a check is cheap. Only safetensors are read, since opening a pickle can run code. Numbers are checked
before anything is made of them, so that a wrong one is refused by its name: transformers would divide by them, make
tensors of them, or compute with them whatever they are.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from baton.errors import ConfigError
from baton.model_formats.files import SafetensorsHeader, UnsoundSafetensors, read_header, read_object
from baton.model_formats.images import IMAGE_FAMILIES, read_processor
from baton.model_formats.limits import LARGEST_VOCABULARY, LONGEST_CONTEXT, longest_context
from baton.model_formats.special_tokens import read_end_tokens
from baton.runner.model.pooling_files import pooling_fields

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_READ_BYTES = 1 << 22
_PLAIN_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Bytes of a number of plain weights, which are loaded in the model's dtype, by its name in safetensors files."""
_MOST_FILES = 10_000
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,250}\.safetensors")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checked model directory: every file named here exists and every safetensors header is sound."""

    directory: Path
    config: Mapping[str, Any]
    weight_files: tuple[Path, ...]
    fingerprint: str
    """SHA-256 over configuration, tokenizer and every weight byte: equal fingerprints mean equal models."""
    eos_token_ids: frozenset[int]

    @property
    def model_type(self) -> str:
        """The `model_type` of config.json; empty if it has none."""
        return str(self.config.get("model_type", ""))


def open_checkpoint(directory: Path) -> Checkpoint:
    """Check a model directory and compute its fingerprint; raises ConfigError that says what is wrong, and the fix."""
    config = _checked_config(directory)
    weight_files = weight_files_of(directory)
    headers = [_safetensors_header(path) for path in weight_files]
    return Checkpoint(
        directory=directory,
        config=config,
        weight_files=weight_files,
        fingerprint=_fingerprint(directory, config, weight_files, headers),
        eos_token_ids=read_end_tokens(directory, config),
    )


def check_model_dir(directory: Path) -> Mapping[str, Any]:
    """The directory's config.json, after those checks of `open_checkpoint` that read no weights; raises ConfigError."""
    config = _checked_config(directory)
    for path in weight_files_of(directory):
        _safetensors_header(path)
    return config


def _checked_config(directory: Path) -> Mapping[str, Any]:
    if not directory.is_dir():
        raise ConfigError(
            f"model directory {directory} {'is a file' if directory.exists() else 'does not exist'}; "
            "name a directory with config.json and *.safetensors"
        )
    config = _read_json(directory / "config.json")
    if "auto_map" in config and "model_type" not in config:
        raise ConfigError(
            f"{directory} can be loaded only with its own code (auto_map), and Baton runs no code from model "
            "directories; use a model of an architecture that transformers has"
        )
    return config


def _read_json(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        raise ConfigError(f"{path.parent} has no {path.name}; is it a transformers model directory?")
    return read_object(path)


def weight_files_of(directory: Path) -> tuple[Path, ...]:
    """The safetensors files of a model directory. Raises ConfigError for one without."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        names = _files_of_index(index)
        missing = [name for name in names if not (directory / name).is_file()]
        if missing or not names:
            lacking = ", ".join(missing) or "the files"
            raise ConfigError(f"{directory} lacks {lacking} that {index.name} names; copy them there")
        return tuple(directory / name for name in names)
    single = directory / "model.safetensors"
    if single.is_file():
        return (single,)
    pickled = sorted(path.name for pattern in _PICKLES for path in directory.glob(pattern))
    if pickled:
        raise ConfigError(
            f"{directory} has only pickled weights ({pickled[0]}), which could run code; "
            "convert them with save_pretrained(safe_serialization=True)"
        )
    raise ConfigError(f"{directory} has no model.safetensors; copy the weights there")


def least_weight_bytes(weight_files: Sequence[Path], itemsize: int) -> int:
    """The bytes that the tensors of these files take at least, with `itemsize` bytes for each number of the plain ones.

    Raises ConfigError for an unsound file.
    """
    total = 0
    for path in weight_files:
        for entry in _read_header(path).entries.values():
            start, end = entry["data_offsets"]
            plain = _PLAIN_BYTES.get(entry.get("dtype", ""))
            total += (end - start) // plain * itemsize if plain else end - start
    return total


def _files_of_index(index: Path) -> list[str]:
    """The files that an index names; raises ConfigError for names that lead out of its directory, or too many."""
    files = _read_json(index).get("weight_map")
    if not isinstance(files, dict):
        raise ConfigError(f"{index} has no weight_map; copy it again")
    names = sorted({str(name) for name in files.values()})
    if len(names) > _MOST_FILES:
        raise ConfigError(f"{index} names {len(names)} files; at most {_MOST_FILES} are read")
    for name in names:
        if not _FILE_NAME.fullmatch(name):
            raise ConfigError(f"{index} names {name!r:.80}, which is not the name of a safetensors file beside it")
    return names


def _safetensors_header(path: Path) -> bytes:
    """The bytes of a file's header; raises ConfigError unless its tensors fill the rest of the file exactly."""
    return _read_header(path).content


def _read_header(path: Path) -> SafetensorsHeader:
    try:
        return read_header(path)
    except UnsoundSafetensors as error:
        raise ConfigError(str(error)) from error


def _fingerprint(
    directory: Path, config: Mapping[str, Any], weight_files: tuple[Path, ...], headers: list[bytes]
) -> str:
    digest = hashlib.sha256(b"baton model 1")
    fields = [json.dumps(config, sort_keys=True).encode()]
    tokenizer = directory / "tokenizer.json"
    fields.append(tokenizer.read_bytes() if tokenizer.is_file() else b"")
    if config.get("model_type") in IMAGE_FAMILIES:
        # How an image becomes pixels decides the rows that stand for it.
        fields.append(json.dumps(read_processor(directory), sort_keys=True).encode())
    fields += pooling_fields(directory)
    for path, header in zip(weight_files, headers, strict=True):
        fields += [path.name.encode(), header, str(path.stat().st_size).encode(), _content_hash(path)]
    for field in fields:
        digest.update(len(field).to_bytes(8, "little"))
        digest.update(field)
    return digest.hexdigest()


def _content_hash(path: Path) -> bytes:
    state = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while piece := file.read(_READ_BYTES):
            state.update(piece)
    return bytes(state.digest())


_MOST = {"vocab_size": LARGEST_VOCABULARY, "max_position_embeddings": LONGEST_CONTEXT}
"""The largest vocabulary and the longest context that a config.json may ask for."""
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_global_key_value_heads",
    "global_head_dim",
    "vocab_size_per_layer_input",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "n_inner",
    "ffn_dim",
    "word_embed_proj_dim",
    "n_group",
    "topk_group",
    "decoder_sparse_step",
    "sliding_window_pattern",
    "attention_chunk_size",
    "floor_scale",
    "global_attn_every_n_layers",
    "no_rope_layer_interval",
    "d_model",
    "d_kv",
    "d_ff",
    "num_layers",
    "num_decoder_layers",
    "num_heads",
    "encoder_layers",
    "decoder_layers",
    "encoder_attention_heads",
    "decoder_attention_heads",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
    "num_mel_bins",
    "max_source_positions",
    "max_target_positions",
    "relative_attention_num_buckets",
    "relative_attention_max_distance",
)
"""Sizes, counts and steps of at least 1, which some models lack, or name differently."""
_LARGEST_SIZE = 1 << 27
_MOST_STAGES = 64
"""Entries of a list that has the number of layers of each stage of an encoder."""
_MOST_ENTRIES = {
    **dict.fromkeys(
        (
            "num_hidden_layers",
            "num_layers",
            "num_decoder_layers",
            "encoder_layers",
            "decoder_layers",
            "depth",
            "depths",
            "n_layer",
            "n_layers",
            "num_blocks",
            "num_stages",
            "num_adapter_layers",
        ),
        1 << 14,
    ),
    "num_labels": 1 << 20,
}
"""Numbers of entries of lists that transformers makes of a configuration, or of a part of it, before it is checked."""
_DIVISORS = ("query_pre_attn_scalar", "final_logit_softcapping", "logits_scaling", "rope_theta", "rope_local_base_freq")
"""Numbers that need not be whole, and that something is divided by."""
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""The number of experts, by its names."""
_WITHOUT_EXPERTS = frozenset({"granitemoehybrid"})
"""The types whose number of experts may be 0: their layers have an MLP beside them."""
_PARTS = ("text_config", "vision_config")
"""The configurations of a model's parts, where it has several."""
_IMAGE_SIZES = (
    "image_size",
    "patch_size",
    "num_channels",
    "in_channels",
    "depth",
    "embed_dim",
    "num_heads",
    "out_hidden_size",
    "spatial_merge_size",
    "spatial_patch_size",
    "temporal_patch_size",
    "window_size",
)
"""Sizes and counts of an encoder of images, of at least 1."""
_ROPE_DICTIONARIES = ("rope_parameters", "rope_scaling")
_ROPE_NUMBERS = (
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "partial_rotary_factor",
)
"""Numbers in these dictionaries, or in those for each kind of layer inside of them."""


def check_file_numbers(checkpoint: Checkpoint) -> None:
    """Check the numbers as the file has them, before transformers computes others from them. Raises ConfigError."""
    parts = [part for part in map(checkpoint.config.get, _PARTS) if isinstance(part, Mapping)]
    for part in (checkpoint.config, *parts):
        _check_part(checkpoint, part)
    for part in _all_parts(checkpoint.config):
        for name, most in _MOST_ENTRIES.items():
            counts = part.get(name)
            for count in counts[:_MOST_STAGES] if isinstance(counts, list) else (counts,):
                if type(count) is int and count > most:
                    raise _wrong_number(checkpoint, name, count)
            if isinstance(counts, list) and len(counts) > _MOST_STAGES:
                raise _wrong_number(checkpoint, name, counts)
    longest_context(checkpoint.directory, checkpoint.config, 1)
    for part in parts:
        for name in _IMAGE_SIZES:
            value = part.get(name)
            # Some encoders have a list, height and width.
            for number in value if isinstance(value, list) else (value,):
                _check_count(checkpoint, name, number)


def _all_parts(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """A configuration and those inside of it, of which a reader bounds how deep they are."""
    yield config
    for value in config.values():
        if isinstance(value, Mapping):
            yield from _all_parts(value)


def _check_part(checkpoint: Checkpoint, part: Mapping[str, Any]) -> None:
    _check_sizes(checkpoint, part.get)
    for name, value in _real_numbers(part):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (is_number and 0 < value < math.inf):
            raise _wrong_number(checkpoint, name, value)


def configs_of_layers(config: Any) -> Sequence[Any]:
    """The configuration of each layer, or one alone: that of all layers, if they have the same numbers.

    Where layers have numbers of their own, transformers raises for these in the model's configuration.
    """
    return list(config.per_layer_config) if config.is_heterogeneous else [config]


def check_numbers(checkpoint: Checkpoint, config: Any) -> None:
    """Check the numbers of a model that is supported, as transformers understands them. Raises ConfigError."""
    for layer in configs_of_layers(config):
        _check_numbers_of_layer(checkpoint, layer)


def _check_numbers_of_layer(checkpoint: Checkpoint, config: Any) -> None:
    for name, most in _MOST.items():
        if (value := getattr(config, name, 1)) is None:
            raise _wrong_number(checkpoint, name, value)
        _check_count(checkpoint, name, value, most)
    # Once more, for numbers with another name in the file, such as n_head.
    _check_sizes(checkpoint, lambda name: getattr(config, name, None))
    # Not as the file has it: there it may be any number beside `use_sliding_window: false`, where transformers makes it
    # None, or 0.
    if getattr(config, "use_sliding_window", True):
        _check_count(checkpoint, "sliding_window", getattr(config, "sliding_window", None))
    _check_experts(checkpoint, config)


def _real_numbers(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Names and values of the numbers of a file that must be finite and above 0, or null."""
    for name in _DIVISORS:
        yield name, config.get(name)
    for outer in _ROPE_DICTIONARIES:
        nested = config.get(outer)
        if isinstance(nested, Mapping):
            for rope in (nested, *(inner for inner in nested.values() if isinstance(inner, Mapping))):
                for name in _ROPE_NUMBERS:
                    yield f"{outer}.{name}", rope.get(name)


def _check_sizes(checkpoint: Checkpoint, value_of: Callable[[str], Any]) -> None:
    for name in _SIZES:
        value = value_of(name)
        # Some models have a list, one number a layer.
        if isinstance(value, int | float | str):
            _check_count(checkpoint, name, value)


def _check_experts(checkpoint: Checkpoint, config: Any) -> None:
    # Several names may mean the same number: the file's own name is the one to show.
    names = sorted(_EXPERTS, key=lambda name: name not in checkpoint.config)
    name, num_experts = next(((name, count) for name in names if (count := getattr(config, name, None))), (names[0], 0))
    if not num_experts and not any(getattr(type(config), attribute, 0) for attribute in _EXPERTS):
        # A model without experts may have any number below.
        return
    if num_experts == 0 and config.model_type in _WITHOUT_EXPERTS:
        return
    _check_count(checkpoint, name, num_experts)
    num_groups = getattr(config, "n_group", None) or 1
    if num_experts % num_groups:
        raise _wrong_number(checkpoint, "n_group", num_groups)
    of_experts = {"num_experts_per_tok": num_experts, "top_k_experts": num_experts, "topk_group": num_groups}
    for name, most in of_experts.items():
        _check_count(checkpoint, name, getattr(config, name, None), most)
    sizes = getattr(config, "moe_intermediate_size", None)
    # Some models have a list: experts of texts, and of images.
    for size in sizes if isinstance(sizes, list) else (sizes,):
        _check_count(checkpoint, "moe_intermediate_size", size)
    for name in ("n_shared_experts", "shared_expert_intermediate_size", "zero_expert_num"):
        _check_count(checkpoint, name, getattr(config, name, None), least=0)


def _check_count(checkpoint: Checkpoint, name: str, value: Any, most: int = _LARGEST_SIZE, least: int = 1) -> None:
    """Raise ConfigError for a value that is neither None nor a whole number in this range."""
    if value is not None and not (type(value) is int and least <= value <= most):
        raise _wrong_number(checkpoint, name, value)


def _wrong_number(checkpoint: Checkpoint, name: str, value: Any) -> ConfigError:
    return ConfigError(f"{checkpoint.directory} has {name} {value!r:.40} in its config.json; copy it again")
