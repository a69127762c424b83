"""The mixers that may take the place of a module, by the names of its parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

from baton.runner.backends.operations import Operations
from baton.runner.model.states.mixers import (
    DeltaNetParts,
    GatedDeltaNet,
    Mamba2,
    ShortConvolution,
    StateMixer,
)
from baton.runner.model.states.selective_scan import OWN_NORMS, SelectiveScan

_SELECTIVE = {"act", "conv1d", "dt_proj", "in_proj", "out_proj", "x_proj"}
_DELTA_NETS = (
    DeltaNetParts({"in_proj_qkv": "qkv", "in_proj_z": "z", "in_proj_b": "b", "in_proj_a": "a"}, "norm", "out_proj"),
    DeltaNetParts({"in_proj_qkvz": "qkvz", "in_proj_ba": "ba"}, "norm", "out_proj", by_key_head=True),
    DeltaNetParts(
        {"q_proj": "q", "k_proj": "k", "v_proj": "v", "g_proj": "z", "b_proj": "b", "a_proj": "a"}, "o_norm", "o_proj"
    ),
    DeltaNetParts(
        {
            "q_proj": "q",
            "k_proj": "k",
            "v_proj": "v",
            "g_a_proj": "z",
            "b_proj": "b",
            "forget_gate.f_a_proj": "a",
        },
        "o_norm",
        "o_proj",
        behind={"z": "g_b_proj", "a": "forget_gate.f_b_proj"},
        decay="forget_gate",
    ),
    DeltaNetParts(
        {
            "q_proj": "q",
            "k_proj": "k",
            "v_proj": "v",
            "g_proj": "z",
            "b_proj": "b",
            "forget_gate.f_proj": "a",
        },
        "o_norm",
        "o_proj",
        decay="forget_gate",
    ),
)
_MIXERS: Sequence[tuple[set[str], Callable[[Operations, Any], StateMixer]]] = (
    ({"conv", "in_proj", "out_proj"}, ShortConvolution),
    ({"act", "conv1d", "in_proj", "norm", "out_proj"}, Mamba2),
    (_SELECTIVE, SelectiveScan),
    (_SELECTIVE | {*OWN_NORMS}, SelectiveScan),
    *((parts.names, partial(GatedDeltaNet, parts=parts)) for parts in _DELTA_NETS),
)
"""The names of a module's parts, and the mixer that may take the place of such a module."""


def state_mixer_of(child: nn.Module, operations: Operations) -> StateMixer | None:
    """The mixer that may compute what a module computes; None if there is none."""
    names = {name for name, _ in child.named_children()}
    build = next((build for parts, build in _MIXERS if names == parts), None)
    if build is None:
        return None
    try:
        return build(operations, child)
    except (AttributeError, TypeError, RuntimeError):
        return None
