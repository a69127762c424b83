"""Imports what the processes of a cluster, and the commands that its users give, need."""

from __future__ import annotations

import importlib

from baton.cli.main import _COMMANDS

_MODULES = (
    "baton.cli.cluster.supervisor.node_imports",
    "baton.cli.cluster.supervisor.run",
    "baton.runner.ranks.rank",
    "router.app",
    "tests.support.forked_commands",
    *(module for module, _help in _COMMANDS.values()),
)

for module in _MODULES:
    importlib.import_module(module)
