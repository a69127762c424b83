"""Rotary embeddings: a GGUF file's frequencies and factors as `rope_parameters` of transformers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from baton.errors import ConfigError
from baton.model_formats.gguf.facts import Facts

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What all models of Llama 3.1 and later have. A file has only the factors that follow from it."""
_SAME = 1e-4
_LONG_ROPE = ("rope_factors_short.weight", "rope_factors_long.weight")
_KEYS = frozenset(
    f".rope.{name}"
    for name in (
        *("dimension_count", "freq_base", "freq_base_swa", "scale_linear", "scaling.type", "scaling.factor"),
        *("scaling.attn_factor", "scaling.original_context_length"),
        "scaling.finetuned",  # says how the model was trained, and changes nothing
    )
)
"""The keys about rotation that are read whatever the kind of scaling is. Those that are not read are refused."""
_YARN_KEYS = ("ext_factor", "attn_factor", "beta_fast", "beta_slow")
_KEYS_OF_KIND: Mapping[str, frozenset[str]] = {
    "yarn": frozenset(f".rope.scaling.yarn_{name}" for name in _YARN_KEYS),
}


def rope_parameters(facts: Facts, rotated: int) -> dict[str, Any]:
    """The `rope_parameters` of a model that rotates `rotated` elements of each head.

    Raises ConfigError for a kind of scaling that is not known, and for a key about rotation that would have no effect.
    """
    kind = _kind(facts)
    if facts.architecture != "gemma3":  # the only one whose layers with a window have frequencies of their own
        _refuse(facts, ".rope.freq_base_swa")
    for key in facts.keys(".rope."):
        if key not in _KEYS and key not in _KEYS_OF_KIND.get(kind, ()):
            _refuse(facts, key)
    parameters: dict[str, Any] = {"rope_type": kind, "rope_theta": facts.positive(".rope.freq_base", 10_000.0)}
    if kind in ("linear", "yarn"):
        parameters["factor"] = _factor(facts)
    if kind == "yarn":
        parameters |= _yarn(facts, parameters["factor"])
    elif kind == "longrope":
        parameters |= _long_rope(facts)
    elif facts.positive(".rope.scaling.attn_factor", 1.0) != 1:
        _refuse(facts, ".rope.scaling.attn_factor")
    factors = facts.factors("rope_freqs.weight")
    if factors is not None and any(factor != 1 for factor in factors):
        if kind != "default":
            raise ConfigError(
                f"{facts.file.path} has rope_freqs.weight, and scales its rotary embedding by {kind!r}, too"
            )
        parameters |= _llama3(facts, factors, rotated, parameters["rope_theta"])
    return parameters


def _kind(facts: Facts) -> str:
    """The kind of scaling in transformers' words. As in llama.cpp, a factor without a kind is linear."""
    long = [name for name in _LONG_ROPE if name in facts.file.tensors]
    if long and (facts.architecture != "phi3" or len(long) < len(_LONG_ROPE)):
        raise ConfigError(
            f"{facts.file.path} has {long[0]}; LongRoPE is read of phi3 alone, with {' and '.join(_LONG_ROPE)}"
        )
    if long:
        kind, known = facts.text(".rope.scaling.type", "longrope"), {"longrope": "longrope"}
    else:
        kind = facts.text(".rope.scaling.type", "linear" if _factor(facts) != 1 else "none")
        known = {"none": "default", "linear": "linear", "yarn": "yarn"}
    if kind not in known:
        raise ConfigError(
            f"{facts.file.path} scales its rotary embedding by {kind!r}; {', '.join(known)} are known of such a file"
        )
    return known[kind]


def _factor(facts: Facts) -> float:
    """The factor of linear scaling and YaRN; older files have it under another name, which the newer one overrules."""
    key = ".rope.scaling.factor" if facts.has(".rope.scaling.factor") else ".rope.scale_linear"
    return facts.positive(key, 1.0)


def _yarn(facts: Facts, factor: float) -> dict[str, Any]:
    """YaRN's numbers apart from its factor; what is not in the file has transformers' default, the paper's."""
    parameters: dict[str, Any] = {
        "original_max_position_embeddings": facts.whole(".rope.scaling.original_context_length"),
        "beta_fast": facts.positive(".rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": facts.positive(".rope.scaling.yarn_beta_slow", 1.0),
    }
    if facts.positive(".rope.scaling.yarn_ext_factor", 1.0) != 1:
        _refuse(facts, ".rope.scaling.yarn_ext_factor")
    if facts.has(".rope.scaling.yarn_attn_factor"):  # transformers' attention_factor, as the converter writes it
        parameters["attention_factor"] = facts.positive(".rope.scaling.yarn_attn_factor")
    if facts.has(".rope.scaling.attn_factor"):  # llama.cpp multiplies the usual factor by it
        usual = parameters.get("attention_factor", 0.1 * math.log(max(1.0, factor)) + 1)
        parameters["attention_factor"] = usual * facts.positive(".rope.scaling.attn_factor")
    return parameters


def _long_rope(facts: Facts) -> dict[str, Any]:
    """The two sets of factors of Phi-3's LongRoPE."""
    short, long = (facts.factors(name) for name in _LONG_ROPE)
    parameters: dict[str, Any] = {"short_factor": short, "long_factor": long}
    parameters["original_max_position_embeddings"] = facts.whole(".rope.scaling.original_context_length")
    if facts.has(".rope.scaling.attn_factor"):
        parameters["attention_factor"] = facts.positive(".rope.scaling.attn_factor")
    return parameters


def _refuse(facts: Facts, key: str) -> None:
    """Raises ConfigError for a key of the file, if it is there, which nothing here can compute."""
    if facts.has(key):
        raise ConfigError(f"{facts.file.path} has {facts.shown(key)}, which is not computed for such a file")


def _llama3(facts: Facts, factors: Sequence[float], head_dim: int, theta: float) -> dict[str, Any]:
    """Llama 3's scaling, if the factors are what it computes."""
    parameters = {"rope_type": "llama3", "factor": max(factors), **_LLAMA3}
    expected = (_llama3_factor(theta ** (2 * pair / head_dim), parameters) for pair in range(head_dim // 2))
    if len(factors) != head_dim // 2 or any(
        abs(ours - theirs) > _SAME * theirs for ours, theirs in zip(expected, factors, strict=True)
    ):
        raise ConfigError(f"{facts.file.path} has rope_freqs.weight of an unknown kind; those of Llama 3 are known")
    return parameters


def _llama3_factor(inverse_frequency: float, how: dict[str, Any]) -> float:
    """The number by which a frequency is divided (`_compute_llama3_parameters` of transformers)."""
    turns = how["original_max_position_embeddings"] / (2 * math.pi * inverse_frequency)
    if turns > how["high_freq_factor"]:
        return 1.0
    if turns < how["low_freq_factor"]:
        return float(how["factor"])
    smooth = (turns - how["low_freq_factor"]) / (how["high_freq_factor"] - how["low_freq_factor"])
    return float(1 / ((1 - smooth) / how["factor"] + smooth))
