"""Checks the numbers of a config.json before anything is made of them, so that a wrong one is refused by its name.

transformers would divide by them, make tensors of them, or compute with them whatever they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from baton.errors import ConfigError
from baton.model_formats.contexts import longest_context
from baton.model_formats.limits import LONGEST_CONTEXT
from baton.runner.model.checkpoint import Checkpoint

_MOST = {"vocab_size": 1 << 27, "max_position_embeddings": LONGEST_CONTEXT}
"""The largest vocabulary and the longest context that a config.json may ask for."""
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
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
_MOST_ENTRIES = {
    **dict.fromkeys(
        ("num_hidden_layers", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers", "depth"), 1 << 14
    ),
    "num_labels": 1 << 20,
}
"""Numbers of entries of lists that transformers makes of a configuration, or of a part of it, before it is checked."""
_DIVISORS = ("query_pre_attn_scalar", "final_logit_softcapping", "logits_scaling", "rope_theta", "rope_local_base_freq")
"""Numbers that need not be whole, and that something is divided by."""
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""The number of experts, by its names."""
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
            if type(count := part.get(name)) is int and count > most:
                raise _wrong_number(checkpoint, name, count)
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


def check_numbers(checkpoint: Checkpoint, config: Any) -> None:
    """Check the numbers of a model that is supported, as transformers understands them. Raises ConfigError."""
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
        found = config.get(outer)
        if isinstance(found, Mapping):
            for rope in (found, *(inner for inner in found.values() if isinstance(inner, Mapping))):
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
    if not num_experts and not any(getattr(type(config), each, 0) for each in _EXPERTS):
        # A model without experts may have any number below.
        return
    _check_count(checkpoint, name, num_experts)
    num_groups = getattr(config, "n_group", None) or 1
    if num_experts % num_groups:
        raise _wrong_number(checkpoint, "n_group", num_groups)
    for name, most in (
        ("num_experts_per_tok", num_experts),
        ("topk_group", num_groups),
        ("moe_intermediate_size", _LARGEST_SIZE),
    ):
        _check_count(checkpoint, name, getattr(config, name, None), most)
    for name in ("n_shared_experts", "shared_expert_intermediate_size"):
        _check_count(checkpoint, name, getattr(config, name, None), least=0)


def _check_count(checkpoint: Checkpoint, name: str, value: Any, most: int = _LARGEST_SIZE, least: int = 1) -> None:
    """Raise ConfigError for a value that is neither None nor a whole number in this range."""
    if value is not None and not (type(value) is int and least <= value <= most):
        raise _wrong_number(checkpoint, name, value)


def _wrong_number(checkpoint: Checkpoint, name: str, value: Any) -> ConfigError:
    return ConfigError(f"{checkpoint.directory} has {name} {value!r:.40} in its config.json; copy it again")
