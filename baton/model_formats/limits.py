"""What a model may ask for at most, whatever the format of its files, and what all models for speech take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from baton.errors import ConfigError

LONGEST_CONTEXT = 1 << 24
"""In tokens. float32, in which positions become angles, has every whole number up to here and not beyond."""
CONTEXT_WITHOUT_POSITIONS = 1 << 18
"""In tokens: what a model is served with whose config.json names no longest sequence, since its states have none. Mamba
Codestral was tested up to here."""
TYPES_WITHOUT_POSITIONS = frozenset({"falcon_mamba", "mamba", "mamba2"})
LARGEST_VOCABULARY = 1 << 27
"""In tokens."""
AUDIO_RATE = 16_000
"""Samples in a second of speech."""
LONGEST_SPEECH_S = 30
"""The most seconds that a model for speech takes at once: longer recordings are cut."""


_UNBOUNDED = 1e100
"""Products of two numbers below it are finite."""


def longest_context(model_dir: Path, config: Mapping[str, Any], max_position_embeddings: int) -> int:
    """The tokens of a model's context; `config` is what config.json holds.

    YaRN stretches the context with which a model was trained by a factor, whatever `max_position_embeddings` says: many
    models come with that recipe, and with the shorter number. Raises ConfigError for a context beyond all bounds.
    """
    text_config = config.get("text_config")
    parts = [config, *([text_config] if isinstance(text_config, Mapping) else [])]
    stretched = [round(_stretched(rope)) for part in parts for rope in _rope_dictionaries(part)]
    longest = max([max_position_embeddings, *stretched])
    if stretched and longest > LONGEST_CONTEXT:
        raise ConfigError(
            f"{model_dir / 'config.json'} has a YaRN that makes a context of {longest} tokens, more than "
            f"{LONGEST_CONTEXT}: lower its factor"
        )
    return longest


def _rope_dictionaries(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The dictionaries about rotation, and those for each kind of layer inside of them."""
    for name in ("rope_parameters", "rope_scaling"):
        outer = config.get(name)
        if isinstance(outer, Mapping):
            yield outer
            yield from (inner for inner in outer.values() if isinstance(inner, Mapping))


def _stretched(rope: Mapping[str, Any]) -> float:
    """The context that a YaRN makes; 0 for another dictionary, or numbers that are refused elsewhere."""
    kind = rope.get("rope_type", rope.get("type"))
    original: Any = rope.get("original_max_position_embeddings")
    factor: Any = rope.get("factor")
    if kind != "yarn" or not (_is_number(original) and _is_number(factor)):
        return 0.0
    return float(original) * float(factor)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < _UNBOUNDED
