"""Reads the JSON files of a model directory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baton.errors import ConfigError

_MOST_NESTED = 100
"""How deep the objects of a model's configuration may lie in each other: readers call themselves for each level."""


def read_json(path: Path) -> Any:
    """What a file holds. Raises ConfigError."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} can't be read as JSON ({error}); copy it again") from error


def read_object(path: Path) -> Mapping[str, Any]:
    """The object that a file holds. Raises ConfigError, also for one that is nested too deep."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is not a JSON object; copy it again")
    if _is_deeper(value, _MOST_NESTED):
        raise ConfigError(f"{path} is nested more than {_MOST_NESTED} deep; copy it again")
    return value


def _is_deeper(value: Any, most: int) -> bool:
    """Whether lists and objects lie in each other in more than `most` levels."""
    level = [value]
    for _ in range(most):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True
