"""Readers of the adapters that PEFT writes: settings, and where each tensor lies. No pickle is read.

Routers and commands may read an adapter's digest here, too.
"""

from baton.model_formats.adapters.config import DEFAULT_MAX_RANK, MAX_RANK, AdapterConfig
from baton.model_formats.adapters.files import AdapterFiles, AdapterInfo, ModuleTensors, TensorPlace, open_adapter

__all__ = [
    "DEFAULT_MAX_RANK",
    "MAX_RANK",
    "AdapterConfig",
    "AdapterFiles",
    "AdapterInfo",
    "ModuleTensors",
    "TensorPlace",
    "open_adapter",
]
