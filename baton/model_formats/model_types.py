"""The register of model types: which of them were computed as transformers computes them, and in which ways.

`model_types.json` is written by scripts/model_types from what the tests of the types have found. A type outside of it
is served, too, if the check at start agrees with transformers (docs/decisions/0052).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from os.path import commonprefix
from pathlib import Path

REGISTER = Path(__file__).with_suffix(".json")


@cache
def registered_types() -> Mapping[str, Sequence[str]]:
    """For each type, as config.json names it, the ways in which it was verified."""
    types: Mapping[str, Sequence[str]] = json.loads(REGISTER.read_text(encoding="utf-8"))["types"]
    return types


_FAMILY = 4
"""Letters that the names of types of one family have in common at the beginning, at least."""


def what_instead(model_type: str) -> str:
    """What to do about a model of a type that is refused: its message ends with this."""
    types = registered_types()
    shared = {name: len(commonprefix((name, model_type))) for name in types}  # noqa: RUF071 names are no paths
    near = max(types, key=lambda name: (shared[name], -len(name)), default="")
    if model_type in types or not near or shared[near] < _FAMILY:
        return "choose another model"
    return f"choose another model, for example one of type {near}"
