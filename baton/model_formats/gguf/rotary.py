"""Rotary embeddings: a GGUF file's frequencies and factors as `rope_parameters` of transformers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from baton.errors import ConfigError
from baton.model_formats.gguf.facts import Facts

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What all models of Llama 3.1 and later have. A file has only the factors that follow from it."""
_SAME = 1e-4


def rope_parameters(facts: Facts, head_dim: int) -> dict[str, Any]:
    """The `rope_parameters` of a model; raises ConfigError for a kind of scaling that is not known."""
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": facts.positive(".rope.freq_base", 10_000.0)}
    kind = facts.text(".rope.scaling.type", "none")
    if kind in ("linear", "yarn"):
        found |= {"rope_type": kind, "factor": facts.positive(".rope.scaling.factor")}
    if kind == "yarn":
        found["original_max_position_embeddings"] = facts.whole(".rope.scaling.original_context_length")
    elif kind not in ("none", "linear") and (kind, facts.architecture) != ("longrope", "phi3"):
        raise ConfigError(f"{facts.file.path} scales its rotary embedding by {kind!r}; none, linear and yarn are known")
    factors = facts.factors("rope_freqs.weight")
    if factors is not None and any(factor != 1 for factor in factors):
        found |= _llama3(facts, factors, head_dim, found["rope_theta"])
    return found


def long_rope(facts: Facts) -> dict[str, Any]:
    """The two sets of factors of Phi-3's LongRoPE; empty for a model without them."""
    short, long = (facts.factors(f"rope_factors_{name}.weight") for name in ("short", "long"))
    if short is None or long is None:
        return {}
    found: dict[str, Any] = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
    found["original_max_position_embeddings"] = facts.whole(".rope.scaling.original_context_length")
    if facts.has(".rope.scaling.attn_factor"):
        found["attention_factor"] = facts.positive(".rope.scaling.attn_factor")
    return found


def _llama3(facts: Facts, factors: Sequence[float], head_dim: int, theta: float) -> dict[str, Any]:
    """Llama 3's scaling, if the factors are what it computes."""
    found = {"rope_type": "llama3", "factor": max(factors), **_LLAMA3}
    expected = (_llama3_factor(theta ** (2 * place / head_dim), found) for place in range(head_dim // 2))
    if len(factors) != head_dim // 2 or any(
        abs(ours - theirs) > _SAME * theirs for ours, theirs in zip(expected, factors, strict=True)
    ):
        raise ConfigError(f"{facts.file.path} has rope_freqs.weight of an unknown kind; those of Llama 3 are known")
    return found


def _llama3_factor(inverse_frequency: float, how: dict[str, Any]) -> float:
    """The number by which a frequency is divided (`_compute_llama3_parameters` of transformers)."""
    turns = how["original_max_position_embeddings"] / (2 * math.pi * inverse_frequency)
    if turns > how["high_freq_factor"]:
        return 1.0
    if turns < how["low_freq_factor"]:
        return float(how["factor"])
    smooth = (turns - how["low_freq_factor"]) / (how["high_freq_factor"] - how["low_freq_factor"])
    return float(1 / ((1 - smooth) / how["factor"] + smooth))
