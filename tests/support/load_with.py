"""Loads models for tests whose parameters say in one dictionary what to load, and with what."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from baton.runner.loading import load_runner
from baton.runner.model_runner import TorchModelRunner
from baton.runner.spec import TorchSpec

_OF_SPEC = {field.name for field in fields(TorchSpec)}


def load_with(directory: Path, **how: Any) -> TorchModelRunner:
    """Load a model directory; `how`: fields of `TorchSpec`, and arguments of `load_runner`."""
    spec = TorchSpec(directory, **{name: value for name, value in how.items() if name in _OF_SPEC})
    return load_runner(spec, **{name: value for name, value in how.items() if name not in _OF_SPEC})
