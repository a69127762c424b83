"""Divides layers into groups that share KV blocks: layers with equal windows, in groups of about one size.

Blocks of all groups have the same size, so that one pool serves all groups (as in vLLM's hybrid KV cache manager). A
group with fewer layers than the largest one wastes a part of its blocks, and more groups mean more blocks to manage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from baton.engine.runner import LayerGeometry, LayerGroup


def group_layers(layers: Sequence[LayerGeometry], windows: Mapping[int, int | None]) -> tuple[LayerGroup, ...]:
    """The groups of a model, those without a window first. `windows`: each layer's window, by the layer's index.

    The group size is the one of least cost, where a wasted layer costs as much as a group; of two sizes with equal cost
    the one that wastes less.
    """
    kinds: dict[int | None, list[int]] = {}
    for layer in range(len(layers)):
        kinds.setdefault(windows[layer], []).append(layer)
    if len(kinds) == 1:
        return (LayerGroup(tuple(range(len(layers))), windows[0]),)
    ordered = sorted(kinds, key=lambda window: (window is not None, window))
    sizes = range(1, max(map(len, kinds.values())) + 1)
    divisions = [[group for window in ordered for group in _cut(kinds[window], window, size)] for size in sizes]
    waste = [_wasted_layers(groups, layers) for groups in divisions]
    best = min(range(len(divisions)), key=lambda index: (waste[index] + len(divisions[index]), waste[index]))
    return tuple(divisions[best])


def _cut(layers: Sequence[int], window: int | None, size: int) -> list[LayerGroup]:
    return [LayerGroup(tuple(layers[first : first + size]), window) for first in range(0, len(layers), size)]


def _wasted_layers(groups: Sequence[LayerGroup], layers: Sequence[LayerGeometry]) -> float:
    """The unused part of a block, added up over all groups, in layers of average size."""
    used = [sum(layers[layer].token_elements for layer in group.layers) for group in groups]
    return (max(used) * len(groups) - sum(used)) * len(layers) / sum(used)
