"""Tiny models with every type of rotary embedding that transformers knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.support.tiny_models import TINY_MODELS

MOST_SHORT = 64
"""The length up to which LongRoPE has the angles of short sequences in these models."""
_BASE: Mapping[str, Any] = {"rope_theta": 10000.0}
_LONGROPE: Mapping[str, Any] = {
    **_BASE,
    "rope_type": "longrope",
    "original_max_position_embeddings": MOST_SHORT,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0 + place for place in range(8)],
}


def _llama(**rope: Any) -> Mapping[str, Any]:
    return {**TINY_MODELS["llama"], "num_hidden_layers": 2, "rope_parameters": {**_BASE, **rope}}


ROPE_TYPES: Mapping[str, Mapping[str, Any]] = {
    "default": _llama(rope_type="default"),
    "linear": _llama(rope_type="linear", factor=4.0),
    "dynamic": _llama(rope_type="dynamic", factor=4.0),
    "yarn": _llama(rope_type="yarn", factor=8.0, original_max_position_embeddings=MOST_SHORT),
    "longrope": _llama(**_LONGROPE),
    "llama3": _llama(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=MOST_SHORT,
    ),
    "proportional": _llama(rope_type="proportional", factor=2.0, partial_rotary_factor=0.5),
}
"""One model for each type, by its name."""

PHI3_LONGROPE: Mapping[str, Any] = {
    **TINY_MODELS["phi3"],
    "num_hidden_layers": 2,
    "original_max_position_embeddings": MOST_SHORT,
    "rope_parameters": _LONGROPE,
}
"""A model whose `generate()` computes an output that outgrows the short angles from the beginning again."""
