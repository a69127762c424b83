"""Who can be told to run a cluster instead of `baton up`."""

from __future__ import annotations

import enum


class Emission(enum.StrEnum):
    """The value is the word for it on the command line."""

    SYSTEMD = "systemd"
    COMPOSE = "compose"
    HELM = "helm"
    SLURM = "slurm"
