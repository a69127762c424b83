"""Reads the JSON files of a model directory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baton.errors import ConfigError


def read_json(path: Path) -> Any:
    """What a file holds. Raises ConfigError."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} can't be read as JSON ({error}); copy it again") from error


def read_object(path: Path) -> Mapping[str, Any]:
    """The object that a file holds. Raises ConfigError."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is not a JSON object; copy it again")
    return value
