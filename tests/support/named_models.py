"""A named model that no package index has, and what is in a cache of models."""

from __future__ import annotations

import hashlib
from pathlib import Path

from baton.models.named_models import NamedModel

CONTENT = b"GGUF" + bytes(range(256)) * 100
MODEL = NamedModel(
    title="Tiny",
    license="MIT",
    package="tiny-model-of-no-index",
    version="1.0",
    member="tiny/model.gguf",
    num_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)
DIGEST = MODEL.sha256


def entries(root: Path) -> list[str]:
    """The names of all that a cache of models has, without its locks."""
    return sorted(path.name for path in root.iterdir() if path.suffix != ".lock")


def write_directory(_source: Path, directory: Path) -> None:
    """Convert a GGUF file, for tests of what happens around a conversion."""
    (directory / "config.json").write_text("{}")
