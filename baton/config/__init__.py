"""The settings of each process, as frozen models that are loaded from flags, environment and file.

`node`, `router`, `cluster` and `up` declare them with their bounds and defaults; `setting` makes flags and variables of
the declarations, and `load` takes the values.
"""

from baton.config.cluster import bundled_model_dir
from baton.config.kinds import KVDigests
from baton.config.load import MODELS, Loaded, config_file, load
from baton.config.node import NodeConfig
from baton.config.router import RouterConfig
from baton.config.up import UpConfig

__all__ = [
    "MODELS",
    "KVDigests",
    "Loaded",
    "NodeConfig",
    "RouterConfig",
    "UpConfig",
    "bundled_model_dir",
    "config_file",
    "load",
]
