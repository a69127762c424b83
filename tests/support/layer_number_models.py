"""Tiny models of gemma4_text, whose layers have numbers of their own: each variant has the mechanisms of a released
size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.support.tiny_models import BASE

_GEMMA4: Mapping[str, Any] = {
    **BASE,
    "model_type": "gemma4_text",
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 16,
    "head_dim": 16,
    "global_head_dim": 32,
    "pad_token_id": 0,
}
_EMBEDDINGS_BY_LAYER = {"vocab_size_per_layer_input": 256, "hidden_size_per_layer_input": 32}

GEMMA4_MODELS: Mapping[str, Mapping[str, Any]] = {
    "mixture": {
        **_GEMMA4,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
    "shared": {
        **_GEMMA4,
        **_EMBEDDINGS_BY_LAYER,
        "num_hidden_layers": 5,  # the first one can be a stage, and the others share keys
        "layer_types": ["full_attention", *_GEMMA4["layer_types"]],
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "final_logit_softcapping": 5.0,
    },
    "dense": {
        **_GEMMA4,
        "global_head_dim": 512,
        "tie_word_embeddings": False,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "use_bidirectional_attention": "vision",
    },
}
"""26B-A4B (a mixture, keys that are values), E2B and E4B (shared keys and values, embeddings by layer, wide MLPs), and
31B (dense, with attention in both ways within images alone)."""
