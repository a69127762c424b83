"""Configuration: one frozen model for each process, put together from flags, environment and file."""

from baton.config.load import Loaded, config_file, load
from baton.config.node import MIN_PRIORITY, KVDigests, NodeConfig, RouterConfig, UpConfig, bundled_model_dir

__all__ = [
    "MIN_PRIORITY",
    "KVDigests",
    "Loaded",
    "NodeConfig",
    "RouterConfig",
    "UpConfig",
    "bundled_model_dir",
    "config_file",
    "load",
]
