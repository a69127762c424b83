"""Tiny models with other parts than text, of which Baton serves the text part alone, or not even that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.support.layer_number_models import GEMMA4_MODELS
from tests.support.tiny_models import BASE, TINY_MODELS

_TEXT: Mapping[str, Any] = {**BASE, "num_hidden_layers": 4, "head_dim": 16, "pad_token_id": 0}
_ENCODER = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 14,
}
_IMAGES = {**_ENCODER, "image_size": 28}
_PATCHES = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "patch_size": 8,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
}
_GRIDS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
_HALF_GRIDS = {**_GRIDS, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_DELTA_RULE = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
}
_ROUTED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
_WINDOWS = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2}
_GEMMA4_IMAGES = {**_ENCODER, "num_key_value_heads": 2, "head_dim": 16, "patch_size": 8}
_SPEECH = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
_QWEN3_IMAGES = {**_PATCHES, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}

TEXT_PART_MODELS: Mapping[str, Mapping[str, Any]] = {
    "gemma3": {
        "model_type": "gemma3",
        # Its images' class leaves out the soft cap that its text's class has.
        "text_config": {**_TEXT, **_WINDOWS, "final_logit_softcapping": 5.0},
        "vision_config": _IMAGES,
        "mm_tokens_per_image": 4,
        "tie_word_embeddings": False,
    },
    "gemma4": {
        "model_type": "gemma4",
        "text_config": GEMMA4_MODELS["shared"],
        "vision_config": _GEMMA4_IMAGES,
        "audio_config": None,
    },
    "gemma4+mixture": {
        "model_type": "gemma4",
        "text_config": {**GEMMA4_MODELS["mixture"], "use_bidirectional_attention": "vision"},
        "vision_config": _GEMMA4_IMAGES,
        "tie_word_embeddings": False,
        "audio_config": {**_SPEECH, "output_proj_dims": 32, "subsampling_conv_channels": [8, 4]},
    },
    "mistral3": {
        "model_type": "mistral3",
        "text_config": {**_TEXT, "model_type": "mistral", "sliding_window": 16},
        "vision_config": {**_IMAGES, "model_type": "pixtral", "head_dim": 16},
    },
    "qwen3_vl": {
        "model_type": "qwen3_vl",
        "text_config": {**_TEXT, "rope_parameters": _GRIDS},
        "vision_config": _QWEN3_IMAGES,
    },
    "qwen3_vl_moe": {
        "model_type": "qwen3_vl_moe",
        "text_config": {**_TEXT, **_EXPERTS, "rope_parameters": _GRIDS},
        "vision_config": _QWEN3_IMAGES,
    },
    "qwen3_5": {
        "model_type": "qwen3_5",
        "text_config": {**_TEXT, **_DELTA_RULE, "rope_parameters": _HALF_GRIDS},
        "vision_config": {**_PATCHES, "num_position_embeddings": 16},
    },
    "qwen3_5_moe": {
        "model_type": "qwen3_5_moe",
        "text_config": {
            **_TEXT,
            **_DELTA_RULE,
            **_EXPERTS,
            "shared_expert_intermediate_size": 64,
            "rope_parameters": _HALF_GRIDS,
        },
        "vision_config": {**_PATCHES, "num_position_embeddings": 16},
    },
    "lfm2_vl": {
        "model_type": "lfm2_vl",
        "text_config": {**_TEXT, "model_type": "lfm2", "layer_types": ["conv", "full_attention"] * 2},
        "vision_config": {**_ENCODER, "model_type": "siglip2_vision_model", "num_patches": 16},
    },
    "glm4v": {
        "model_type": "glm4v",
        "text_config": {**_TEXT, "rope_parameters": _HALF_GRIDS},
        "vision_config": {**_PATCHES, "image_size": 32},
    },
    "glm4v_moe": {
        "model_type": "glm4v_moe",
        "text_config": {**_TEXT, **_ROUTED, "rope_parameters": _HALF_GRIDS},
        "vision_config": {**_PATCHES, "image_size": 32},
    },
    "ernie4_5_vl_moe": {
        "model_type": "ernie4_5_vl_moe",
        "text_config": {
            **{name: value for name, value in _TEXT.items() if name != "head_dim"},
            # Experts of texts, and of images.
            "moe_intermediate_size": [64, 32],
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_num_shared_experts": 1,
            "rope_parameters": {**_GRIDS, "mrope_section": [3, 3, 2]},
        },
        "vision_config": {**_PATCHES, "temporal_merge_size": 2},
    },
    "kimi_k25": {
        "model_type": "kimi_k25",
        "text_config": {**TINY_MODELS["deepseek_v3"], "pad_token_id": 0},
        "vision_config": {**_ENCODER, "patch_size": 8},
    },
    "internvl": {
        "model_type": "internvl",
        "text_config": TINY_MODELS["qwen2"],
        "vision_config": {**_IMAGES, "image_size": [28, 28], "patch_size": [14, 14]},
    },
    "llava_next": {
        "model_type": "llava_next",
        "text_config": TINY_MODELS["mistral"],
        "vision_config": {**_IMAGES, "model_type": "clip_vision_model"},
    },
    "cohere2_vision": {
        "model_type": "cohere2_vision",
        # The images' class does not scale logits, and the text's does.
        "text_config": {**_TEXT, **_WINDOWS, "model_type": "cohere2", "logit_scale": 0.25},
        "vision_config": {**_IMAGES, "model_type": "siglip_vision_model"},
    },
    "voxtral": {
        "model_type": "voxtral",
        "text_config": {**_TEXT, "model_type": "llama"},
        "audio_config": {**_SPEECH, "intermediate_size": 128, "num_mel_bins": 16},
    },
}
"""The models whose text is served, with every way in which transformers makes logits of it."""
# Tokens that no prompt and no output can have: the whole models put other rows in their places.
_OUTSIDE = {name: 256 + place for place, name in enumerate(("image", "video", "audio"))}
TEXT_PART_MODELS = {
    name: {
        **{f"{kind}_token_id": token_id for kind, token_id in _OUTSIDE.items()},
        **({"image_token_index": _OUTSIDE["image"]} if name in ("gemma3", "mistral3", "llava_next") else {}),
        **config,
    }
    for name, config in TEXT_PART_MODELS.items()
}

REFUSED: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "llama4": (
        {
            "model_type": "llama4",
            "text_config": {
                **_TEXT,
                "intermediate_size_mlp": 128,
                "num_local_experts": 4,
                "num_experts_per_tok": 1,
                "attention_chunk_size": 16,
                "moe_layers": [1, 3],
            },
            "vision_config": _IMAGES,
        },
        "the text part of Llama4ForConditionalGeneration can't be taken out of it, so models of type 'llama4'",
    ),
    "qwen4_exp": (
        {
            "model_type": "qwen4_exp",
            "text_config": {
                **_TEXT,
                **_DELTA_RULE,
                **_EXPERTS,
                "layer_types": ["linear_attention", "indexed_attention"] * 2,
                "indexer_n_heads": 2,
                "indexer_kv_heads": 1,
                "indexer_head_dim": 16,
                "indexer_budget": 8,
                "indexer_compress_ratio": 2,
            },
            "vision_config": {**_PATCHES, "num_position_embeddings": 16},
        },
        "is of type 'qwen4_exp'.*of type 'qwen4_exp_text', and it has layers of type indexed_attention",
    ),
    "diffusion_gemma": (
        {
            "model_type": "diffusion_gemma",
            "text_config": {**GEMMA4_MODELS["mixture"], "model_type": "diffusion_gemma_text"},
            "vision_config": _GEMMA4_IMAGES,
        },
        "is of type 'diffusion_gemma'.*of type 'diffusion_gemma_text', and the model generates in a way of its own",
    ),
}
"""Models whose text can't be served, and what the refusal says of it."""
