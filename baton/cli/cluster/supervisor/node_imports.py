"""Imports what the processes of nodes need, and those of their ranks: a fork server imports this module."""

from __future__ import annotations

import importlib

from baton.processes.interpreter import rare_collections
from baton.runner.lean_imports import import_transformers

_MODULES = (
    "baton.cli.main",
    "baton.cli.commands.processes",
    "baton.node.process",
    "baton.runner.loading",
    "baton.runner.ranks.rank_process",
    "baton.stage.running",
    "decode_node.app",
    "prefill_node.app",
    # What `np.median` imports.
    "numpy.ma",
    # What the modules of most models import, and what torch does where it computes without memory.
    "torch.fx.experimental.symbolic_shapes",
    "transformers.models.llama.modeling_llama",
)

with rare_collections():
    import_transformers()
    for name in _MODULES:
        importlib.import_module(name)
    # transformers compiles a thousand patterns of names for the first model of a process, whichever that is.
    importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("llama")
