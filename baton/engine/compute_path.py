"""Which implementation computes a model: what a runner finds out, a node publishes and an operator reads."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ComputePath:
    """Which implementation computes one part of a model's steps here."""

    part: str
    """products, attention, decoder or step."""
    runs: str
    why_not_faster: str = ""
    """Why a faster implementation that Baton has does not run; empty: there is none."""
