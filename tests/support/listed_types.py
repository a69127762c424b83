"""Configurations of tiny models of all listed types.

Each has at least one layer of every kind that its type has, windows and lengths of rotary embeddings that prompts of 70
tokens exceed, numbers other than 1 to multiply with, and more experts than are chosen.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.support.tiny_models import TINY_MODELS

_Fields = Mapping[str, Any]

_PLAIN: _Fields = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
}
_HEADS: _Fields = {**_PLAIN, "head_dim": 16}
_WINDOWS: _Fields = {**_HEADS, "sliding_window": 16}
_LOCAL_EXPERTS: _Fields = {"num_local_experts": 4, "num_experts_per_tok": 2}
_EXPERTS: _Fields = {"num_experts": 4, "num_experts_per_tok": 2}
_MIXTURE: _Fields = {**_LOCAL_EXPERTS, **_EXPERTS, "moe_intermediate_size": 64}
_GROUPED: _Fields = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
}
_LATENT: _Fields = {
    # Multiples of 32, as those of checkpoints, and unlike one another.
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
_SELECTING: _Fields = {"index_n_heads": 16, "index_head_dim": 16, "index_topk": 8}
_LATENT_MIXTURE: _Fields = {**_PLAIN, **_LATENT, **_GROUPED, "num_experts_per_tok": 3}

_ALTERNATING = ["sliding_attention", "full_attention"] * 2
_GRANITE: _Fields = {
    **_PLAIN,
    "embedding_multiplier": 2.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.8,
    "attention_multiplier": 0.3,
}
_ROTATED_TO_64: _Fields = {"rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}
_LLAMA3: _Fields = {**_ROTATED_TO_64, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_YARN: _Fields = {**_ROTATED_TO_64, "rope_type": "yarn"}

_OTHERS: Mapping[str, _Fields] = {
    "afmoe": {
        **_WINDOWS,
        **_EXPERTS,
        "moe_intermediate_size": 64,
        "num_dense_layers": 1,
        "num_shared_experts": 1,
        "route_scale": 1.5,
        "mup_enabled": True,
    },
    "apertus": {**_PLAIN, "rope_parameters": {**_LLAMA3, "rope_theta": 12e6}},
    "arcee": _PLAIN,
    "axk1": _LATENT_MIXTURE,
    "bitnet": _PLAIN,
    "cohere": {**_PLAIN, "use_qk_norm": True},
    "cohere2": _WINDOWS,
    "cohere2_moe": {**_WINDOWS, **_MIXTURE, "num_shared_experts": 1},
    "deepseek_v2": {**_LATENT_MIXTURE, "topk_method": "greedy"},
    "deepseek_v32": {**_LATENT_MIXTURE, **_SELECTING, "num_local_experts": 8},
    "dots1": {**_WINDOWS, **_GROUPED, "layer_types": _ALTERNATING},
    "ernie4_5": _HEADS,
    "ernie4_5_moe": {
        **_PLAIN,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 64,
        "moe_num_shared_experts": 1,
    },
    "exaone4": _WINDOWS,
    "exaone_moe": {**_WINDOWS, **_MIXTURE, "n_group": 2, "topk_group": 1},
    "flex_olmo": {**_PLAIN, **_EXPERTS},
    "gemma": {**_HEADS, "tie_word_embeddings": False},
    "gemma3n_text": {
        **_WINDOWS,
        "vocab_size_per_layer_input": 256,
        "hidden_size_per_layer_input": 16,
        "laurel_rank": 8,
        "num_hidden_layers": 5,  # the first one can be a stage, and the others share keys
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.0] * 5,
        "layer_types": ["sliding_attention", *_ALTERNATING],
    },
    "glm": {**_HEADS, "pad_token_id": 0},
    "glm4": {**_HEADS, "pad_token_id": 0},
    "glm4_moe": {**_HEADS, **_GROUPED, "use_qk_norm": True},
    "glm4_moe_lite": _LATENT_MIXTURE,
    "glm_moe_dsa": {
        **_LATENT_MIXTURE,
        **_SELECTING,
        "num_local_experts": 8,
        "indexer_types": ["full", "shared"] * 2,
    },
    "gpt_bigcode": {name: value for name, value in TINY_MODELS["gpt2"].items() if name != "model_type"},
    "gpt_neox": {name: value for name, value in _PLAIN.items() if name != "num_key_value_heads"},
    "granite": _GRANITE,
    "granite_swa": {**_GRANITE, "sliding_window": 16},
    "granitemoe": {**_GRANITE, **_LOCAL_EXPERTS},
    "granitemoe_swa": {**_GRANITE, **_LOCAL_EXPERTS, "sliding_window": 16},
    "granitemoeshared": {**_GRANITE, **_LOCAL_EXPERTS, "shared_intermediate_size": 64},
    "helium": _HEADS,
    "hunyuan_v1_dense": _HEADS,
    "hunyuan_v1_moe": {**_HEADS, "num_experts": 4, "moe_topk": 2},
    "hy_v3": {**_HEADS, **_MIXTURE},
    "jais2": _PLAIN,
    "jetmoe": {**_PLAIN, **_LOCAL_EXPERTS, "kv_channels": 16},
    "laguna": {
        **_WINDOWS,
        **_EXPERTS,
        "layer_types": _ALTERNATING,
        "num_attention_heads_per_layer": [4, 8, 4, 8],
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "moe_routed_scaling_factor": 1.5,
    },
    "llama4_text": {
        **_HEADS,
        "intermediate_size_mlp": 128,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "moe_layers": [1, 3],
        "attention_chunk_size": 24,
        "floor_scale": 16,
        "attn_scale": 0.3,
    },
    "longcat_flash": {
        **_LATENT,
        **{name: value for name, value in _PLAIN.items() if name not in ("num_hidden_layers", "intermediate_size")},
        "num_key_value_heads": 4,
        "q_lora_rank": 32,  # this and the next two are wide enough for programs
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "num_layers": 2,
        "head_dim": 8,
        "n_routed_experts": 4,
        "zero_expert_num": 2,
        "moe_topk": 3,
        "expert_ffn_hidden_size": 32,
        "ffn_hidden_size": 128,
    },
    "mimo_v2_flash": {
        **_WINDOWS,
        "v_head_dim": 8,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_group": 2,
        "topk_group": 1,
    },
    "minicpm3": {
        **_PLAIN,
        **_LATENT,
        "dim_model_base": 24,
        "tie_word_embeddings": False,
    },
    "minimax_m2": {**_HEADS, **_LOCAL_EXPERTS},
    "ministral": _WINDOWS,
    "ministral3": {
        **_HEADS,
        "rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "nanochat": _PLAIN,
    "nemotron": _PLAIN,
    "olmo": {**_PLAIN, "clip_qkv": 2.0},
    "olmo2": _PLAIN,
    "olmo3": {**_PLAIN, "sliding_window": 16},
    "olmoe": {**_PLAIN, **_EXPERTS},
    "persimmon": _PLAIN,
    "phi": {**_PLAIN, "qk_layernorm": True},
    "phimoe": {
        **_PLAIN,
        **_LOCAL_EXPERTS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "short_mscale": 1.1, "long_mscale": 1.3},
    },
    "qwen2_moe": {
        **_PLAIN,
        **_EXPERTS,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    },
    "seed_oss": _HEADS,
    "smollm3": _PLAIN,
    "solar_open": {**_HEADS, **_GROUPED},
    "starcoder2": _PLAIN,
    "vaultgemma": _WINDOWS,
    "youtu": _LATENT_MIXTURE,
}

_CONVOLVED: _Fields = {"conv_L_cache": 3, "conv_bias": True, "layer_types": ["conv", "full_attention"] * 2}
_HYBRID = ["linear_attention", "full_attention"] * 2
_DELTA_RULE: _Fields = {
    "layer_types": _HYBRID,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}
_KIMI: _Fields = {
    **{name: value for name, value in {**_HEADS, **_LATENT, **_LOCAL_EXPERTS}.items() if name != "q_lora_rank"},
    "num_local_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 1.5,
    "layer_types": _HYBRID,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MAMBA2: _Fields = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
}
_WITHOUT_ATTENTION: _Fields = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "vocab_size": 256,
}
_MAMBA: _Fields = {
    **_WITHOUT_ATTENTION,
    "state_size": 8,
    "time_step_rank": 32,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}

WITH_STATES: Mapping[str, _Fields] = {
    # Wide enough for programs.
    "bailing_hybrid": {**_KIMI, "first_k_dense_replace": 1, "qk_nope_head_dim": 32, "v_head_dim": 32},
    "bamba": {**_PLAIN, **_MAMBA2, "attn_layer_indices": [1, 3]},
    "falcon_h1": {
        **_PLAIN,
        **_MAMBA2,
        "num_hidden_layers": 3,
        "mamba_d_ssm": 128,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
        "embedding_multiplier": 2.0,
        "lm_head_multiplier": 0.8,
        "key_multiplier": 0.7,
        "attention_in_multiplier": 1.2,
        "attention_out_multiplier": 0.9,
        "ssm_in_multiplier": 1.3,
        "ssm_out_multiplier": 0.8,
        "ssm_multipliers": [1.1, 0.9, 0.8, 1.2, 0.7],
        "mlp_multipliers": [0.9, 1.2],
    },
    "falcon_mamba": _MAMBA,
    "granitemoehybrid": {
        **_GRANITE,
        **_LOCAL_EXPERTS,
        **_MAMBA2,
        "shared_intermediate_size": 64,
        "position_embedding_type": "rope",
        "layer_types": _HYBRID,
    },
    "jamba": {
        **_PLAIN,
        **_EXPERTS,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 32,
    },
    "kimi_linear": {**_KIMI, "linear_head_dim": 32, "linear_num_heads": 2},
    "lfm2": {**_PLAIN, **_CONVOLVED},
    "lfm2_moe": {**_PLAIN, **_CONVOLVED, **_EXPERTS, "moe_intermediate_size": 64, "num_dense_layers": 1},
    "lfm3": {**_WINDOWS, "conv_bias": True, "layer_types": ["conv", "sliding_attention", "conv", "full_attention"]},
    "mamba": _MAMBA,
    "mamba2": {
        **_WITHOUT_ATTENTION,
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 16,
        "n_groups": 2,
        "chunk_size": 16,
    },
    "nemotron_h": {
        **_HEADS,
        "hybrid_override_pattern": "M*E-M*",
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 16,
        "chunk_size": 16,
        "n_routed_experts": 8,
        "n_group": 2,
        "moe_intermediate_size": 96,
        "moe_shared_expert_intermediate_size": 160,
        "moe_latent_size": 32,
        "routed_scaling_factor": 1.5,
    },
    "olmo_hybrid": {**_PLAIN, **_DELTA_RULE},
    "qwen3_5_moe_text": {
        **_HEADS,
        **_DELTA_RULE,
        **_EXPERTS,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    },
    "qwen3_5_text": {**_HEADS, **_DELTA_RULE},
    "qwen3_next": {
        **_HEADS,
        **_DELTA_RULE,
        **_EXPERTS,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    },
    "zamba2": {
        **_PLAIN,
        "num_key_value_heads": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "mamba_d_state": 16,
        "mamba_ngroups": 2,
        "n_mamba_heads": 8,
        "use_mem_rope": True,
        "use_shared_attention_adapter": True,
        "adapter_rank": 32,  # wide enough for programs
        "chunk_size": 16,
    },
}
"""The types that have layers with a state."""

LISTED_TYPES: Mapping[str, _Fields] = {
    **TINY_MODELS,
    **{name: {**fields, "model_type": name} for name, fields in sorted({**_OTHERS, **WITH_STATES}.items())},
}
"""Each type's configuration, as a config.json has it."""

_WINDOWS_ON_DEMAND: Mapping[str, _Fields] = {
    "mixtral": {"sliding_window": 16},
    "ministral3": {"sliding_window": 16},
    "phi3": {"sliding_window": 16},
    "qwen2": {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    "qwen3": {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    "qwen3_moe": {"use_sliding_window": True, "sliding_window": 16},
    "smollm3": {"use_sliding_window": True, "sliding_window": 16},
    "starcoder2": {"sliding_window": 16},
}
WITH_WINDOWS: Mapping[str, _Fields] = {
    name: {**LISTED_TYPES[name], **fields} for name, fields in _WINDOWS_ON_DEMAND.items()
}
"""The types of which only some checkpoints have windows, with one."""
