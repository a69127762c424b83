"""Readers of the adapters that PEFT writes: settings, and where each tensor lies. No pickle is read.

Routers and commands may read an adapter's digest here, too.
"""

from baton.model_formats.adapters.config import CONFIG_NAME, DEFAULT_MAX_RANK, MAX_RANK, AdapterConfig
from baton.model_formats.adapters.files import (
    WEIGHTS_NAME,
    AdapterFiles,
    AdapterInfo,
    ModuleTensors,
    TensorPiece,
    TensorPlace,
    open_adapter,
    read_adapter,
    without_wrappers,
)

__all__ = [
    "CONFIG_NAME",
    "DEFAULT_MAX_RANK",
    "MAX_RANK",
    "WEIGHTS_NAME",
    "AdapterConfig",
    "AdapterFiles",
    "AdapterInfo",
    "ModuleTensors",
    "TensorPiece",
    "TensorPlace",
    "open_adapter",
    "read_adapter",
    "without_wrappers",
]
