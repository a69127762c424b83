"""Models of known shapes with random weights: what a benchmark computes does not depend on what they are."""

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
    }
)
"""Shapes that benchmarks name; 0.5b-kv has the KV of 0.5b, and computes next to nothing."""


def write_shape(directory: Path, shape: str) -> None:
    """Write the model of a shape, always the same one; raises ConfigError for an unknown name."""
    if shape not in SHAPES:
        raise ConfigError(f"shape {shape!r} is unknown; known are {', '.join(sorted(SHAPES))}")
    # Not before the name is known: it takes seconds.
    from baton.runner.model.random_model import write_random_model

    write_random_model(directory, SHAPES[shape], seed=0, dtype="bfloat16")


@contextmanager
def shape_dir(shape: str) -> Iterator[Path]:
    """A directory with the model of a shape, gone on exit; raises as `write_shape`."""
    with TemporaryDirectory(prefix="baton-shape-") as place:
        write_shape(Path(place), shape)
        yield Path(place)
