"""`baton up --emit`: a cluster as files for systemd, Docker Compose, Helm or Slurm; `write` writes them."""

from __future__ import annotations

import enum


class Emission(enum.StrEnum):
    """A system that can run a cluster; the value is its name on the command line."""

    SYSTEMD = "systemd"
    COMPOSE = "compose"
    HELM = "helm"
    SLURM = "slurm"
