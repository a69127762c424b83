"""Configurations of tiny models, one for each supported architecture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

BASE: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    # Wide enough that the largest logits are far apart: a greedy choice must not depend on the last bit.
    "initializer_range": 0.15,
}

TINY_MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama": {**BASE, "model_type": "llama"},
    "qwen2": {**BASE, "model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {**BASE, "model_type": "qwen3", "head_dim": 16},
    "mistral": {**BASE, "model_type": "mistral", "sliding_window": 16},
    "gemma2": {
        **BASE,
        "model_type": "gemma2",
        "tie_word_embeddings": False,
        "head_dim": 16,
        "sliding_window": 16,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 5.0,
    },
    "gemma3_text": {
        **BASE,
        "model_type": "gemma3_text",
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "head_dim": 16,
        "sliding_window": 16,
        "tie_word_embeddings": False,
    },
    "phi3": {**BASE, "model_type": "phi3", "pad_token_id": 0},
    "mixtral": {**BASE, "model_type": "mixtral", "num_local_experts": 4},
    "qwen3_moe": {
        **BASE,
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
    },
    "deepseek_v3": {
        **BASE,
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 96,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    },
    "gpt_oss": {
        **BASE,
        "model_type": "gpt_oss",
        "head_dim": 16,
        "sliding_window": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "pad_token_id": None,
    },
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 64,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 512,
        "vocab_size": 256,
        "initializer_range": 0.15,
    },
    "opt": {
        "model_type": "opt",
        "hidden_size": 64,
        "ffn_dim": 128,
        "word_embed_proj_dim": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "vocab_size": 256,
        "max_position_embeddings": 512,
        "init_std": 0.15,
    },
}
