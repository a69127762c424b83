"""Models of known shapes with random weights: the time of a step does not depend on the weights' values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

from baton.errors import ConfigError

SHAPES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "0.5b": {
            "model_type": "qwen2",
            "hidden_size": 896,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "intermediate_size": 4864,
            "vocab_size": 32000,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
        },
        "0.5b-kv": {
            "model_type": "qwen2",
            "hidden_size": 128,
            "num_hidden_layers": 24,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "intermediate_size": 128,
            "vocab_size": 512,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
        },
        "deepseek-v3-small": {
            "model_type": "deepseek_v3",
            "hidden_size": 2048,
            "num_hidden_layers": 6,
            "num_attention_heads": 40,
            "num_key_value_heads": 40,
            "q_lora_rank": 768,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "intermediate_size": 5120,
            "moe_intermediate_size": 1024,
            "first_k_dense_replace": 1,
            "n_routed_experts": 16,
            "num_experts_per_tok": 4,
            "n_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "vocab_size": 32000,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": False,
        },
        "gemma4-e2b": {
            "model_type": "gemma4_text",
            "hidden_size": 1536,
            "num_hidden_layers": 35,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "global_head_dim": 512,
            "intermediate_size": 6144,
            "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
            "sliding_window": 512,
            "num_kv_shared_layers": 20,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 256,
            "vocab_size_per_layer_input": 65536,
            "vocab_size": 65536,
            "final_logit_softcapping": 30.0,
            "max_position_embeddings": 32768,
            "pad_token_id": 0,
            "tie_word_embeddings": True,
        },
        "lfm2-700m": {
            "model_type": "lfm2",
            "hidden_size": 1536,
            "num_hidden_layers": 16,
            "num_attention_heads": 24,
            "num_key_value_heads": 8,
            "intermediate_size": 6912,
            "vocab_size": 65536,
            "max_position_embeddings": 32768,
            "conv_L_cache": 3,
            "full_attn_idxs": [2, 5, 8, 10, 12, 14],
            "tie_word_embeddings": True,
        },
        "qwen3-moe-small": {
            "model_type": "qwen3_moe",
            "hidden_size": 2048,
            "num_hidden_layers": 6,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 32,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "vocab_size": 32000,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
        },
        "qwen3.5-0.8b": {
            "model_type": "qwen3_5_text",
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "intermediate_size": 3584,
            "vocab_size": 248320,
            "max_position_embeddings": 32768,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 16,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "tie_word_embeddings": True,
        },
    }
)
"""Shapes by name. 0.5b-kv has as much KV per token as 0.5b, and needs very little computing; gemma4-e2b is the text of
Gemma 4 E2B with a quarter of its vocabulary, lfm2-700m is LFM2-700M, and qwen3.5-0.8b the text of Qwen3.5-0.8B."""


def write_shape(directory: Path, shape: str) -> None:
    """Writes the model of a shape, always with the same weights; raises ConfigError for an unknown name."""
    if shape not in SHAPES:
        raise ConfigError(f"shape {shape!r} is unknown; the known shapes are {', '.join(sorted(SHAPES))}")
    # Imported after the check, since it takes seconds.
    from baton.runner.model.random_model import write_random_model

    write_random_model(directory, SHAPES[shape], seed=0, dtype="bfloat16")


@contextmanager
def shape_dir(shape: str) -> Iterator[Path]:
    """A temporary directory with the model of a shape; raises like `write_shape`."""
    with TemporaryDirectory(prefix="baton-shape-") as folder:
        write_shape(Path(folder), shape)
        yield Path(folder)
