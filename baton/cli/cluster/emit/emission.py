"""The systems that can run a cluster instead of `baton up`."""

from __future__ import annotations

import enum


class Emission(enum.StrEnum):
    """A system that can run a cluster; the value is its name on the command line."""

    SYSTEMD = "systemd"
    COMPOSE = "compose"
    HELM = "helm"
    SLURM = "slurm"
