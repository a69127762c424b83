"""Tiny image models: the configurations of the model and of its image processor, one pair for each kind of family."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from baton.runner.model.random_model import write_random_model

_TEXT: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 2048,
    "initializer_range": 0.15,
    "pad_token_id": None,
}
IMAGE_TOKEN_ID = 250
_IDEFICS3_VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
    "initializer_range": 0.15,
}
_IDEFICS3 = {"text_config": {**_TEXT, "model_type": "llama"}, "image_token_id": IMAGE_TOKEN_ID, "scale_factor": 2}
_QWEN_TEXT = {**_TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}
_QWEN = {
    "image_token_id": IMAGE_TOKEN_ID,
    "video_token_id": 251,
    "vision_start_token_id": 252,
    "vision_end_token_id": 253,
}
_QWEN_PATCHES = {"patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2, "initializer_range": 0.15}

IMAGE_MODELS: Mapping[str, Mapping[str, Any]] = {
    "idefics3": {**_IDEFICS3, "model_type": "idefics3", "vision_config": _IDEFICS3_VISION},
    "smolvlm": {**_IDEFICS3, "model_type": "smolvlm", "vision_config": _IDEFICS3_VISION},
    "qwen2_vl": {
        **_QWEN,
        "model_type": "qwen2_vl",
        "text_config": {**_QWEN_TEXT, "model_type": "qwen2_vl_text"},
        "vision_config": {
            **_QWEN_PATCHES,
            "depth": 2,
            "embed_dim": 32,
            "hidden_size": 64,
            "num_heads": 2,
            "mlp_ratio": 2,
        },
    },
    "qwen2_5_vl": {
        **_QWEN,
        "model_type": "qwen2_5_vl",
        "text_config": {**_QWEN_TEXT, "model_type": "qwen2_5_vl_text"},
        "vision_config": {
            **_QWEN_PATCHES,
            "depth": 2,
            "hidden_size": 32,
            "out_hidden_size": 64,
            "intermediate_size": 64,
            "num_heads": 2,
            "window_size": 32,
            "fullatt_block_indexes": [1],
        },
    },
}
_TILES = {"size": {"longest_edge": 96}, "max_image_size": {"longest_edge": 32}}
_PATCHES = {"patch_size": 8, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 256, "max_pixels": 16384}
PROCESSORS: Mapping[str, Mapping[str, Any]] = {
    "idefics3": {"image_processor_type": "Idefics3ImageProcessor", **_TILES},
    "smolvlm": {"image_processor_type": "SmolVLMImageProcessor", **_TILES},
    "qwen2_vl": {"image_processor_type": "Qwen2VLImageProcessor", **_PATCHES},
    "qwen2_5_vl": {"image_processor_type": "Qwen2VLImageProcessor", **_PATCHES},
}


def write_image_model(directory: Path, name: str) -> None:
    """Write the model directory of one of IMAGE_MODELS, with random weights."""
    write_random_model(directory, {"pad_token_id": None, **IMAGE_MODELS[name]}, seed=5)
    (directory / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[name]))


def random_image(seed: int, width: int, height: int) -> bytes:
    """A PNG file of random pixels."""
    from PIL import Image

    pixels = np.frombuffer(Random(seed).randbytes(width * height * 3), dtype=np.uint8).reshape(height, width, 3)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def add_image_tokens(directory: Path) -> None:
    """Give the model's tokenizer the tokens that stand for images, with the ids that its config.json has for them."""
    ids = {IMAGE_TOKEN_ID: "<image>", 252: "<|vision_start|>", 253: "<|vision_end|>"}
    if "qwen" in json.loads((directory / "config.json").read_text())["model_type"]:
        ids[IMAGE_TOKEN_ID] = "<|image_pad|>"
    add_special_tokens(directory, ids)


def add_special_tokens(directory: Path, texts: Mapping[int, str]) -> None:
    """Make these ids of a model's tokenizer special tokens with these texts."""
    path = directory / "tokenizer.json"
    spec = json.loads(path.read_text())
    vocabulary = {token: token_id for token, token_id in spec["model"]["vocab"].items() if token_id not in texts}
    spec["model"]["vocab"] = {**vocabulary, **{text: token_id for token_id, text in texts.items()}}
    spec["added_tokens"] = [
        {
            "id": token_id,
            "content": text,
            "special": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for token_id, text in texts.items()
    ]
    path.write_text(json.dumps(spec))
