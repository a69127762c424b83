"""The import contracts of pyproject.toml name every folder and module of `baton`, so that a new one can't escape."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[3]
GENERATED = "v1"


def test_every_folder_and_module_of_baton_has_its_layer() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    named = {
        name.removeprefix("baton.") for layer in layers for name in layer.split(" | ") if name.startswith("baton.")
    }
    found = {path.parent.name for path in (ROOT / "baton").glob("*/__init__.py")}
    found |= {path.stem for path in (ROOT / "baton").glob("*.py")} - {"__init__"}
    assert named == found - {GENERATED}
