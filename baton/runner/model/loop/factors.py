"""The numbers of a model that rows may be multiplied with."""

from __future__ import annotations

import math
from typing import Any

from torch import nn


def numbers_of(config: Any) -> list[float]:
    """The numbers of a configuration that may be factors, those among them that it computes of others."""
    computed = (_computed(config, name) for name, of in vars(type(config)).items() if isinstance(of, property))
    numbers = {float(value) for value in (*vars(config).values(), *computed) if isinstance(value, int | float)}
    return sorted(number for number in numbers if math.isfinite(number) and number not in (0.0, 1.0))


def _computed(config: Any, name: str) -> object:
    """A property of a configuration; None if it can't be computed, as some can't of numbers that they don't expect."""
    try:
        return getattr(config, name)
    except Exception:  # whatever a model's own code raises
        return None


def factors_of(layer: nn.Module) -> list[float]:
    """The numbers that a layer has made of its configuration and may have as factors."""
    return [
        value
        for name, value in vars(layer).items()
        if isinstance(value, float) and not name.startswith("_") and math.isfinite(value) and value not in (0.0, 1.0)
    ]


def own_factor(layer: nn.Module) -> float:
    """The number that a layer has as a tensor of one element, which it may multiply its rows with; 1.0: it has none."""
    own = [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]
    factors = [float(tensor) for tensor in own if tensor.numel() == 1]
    return factors[0] if len(factors) == 1 else 1.0
