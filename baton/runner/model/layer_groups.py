"""Which layers keep their KV together: those with equal windows, in groups of about one size.

A block of any group has the same size, so that one pool serves all (as in vLLM's hybrid KV cache manager). A group that
has fewer layers than the largest wastes a part of its blocks; many groups mean many blocks to keep books of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from baton.engine.runner import LayerGeometry, LayerGroup


def group_layers(layers: Sequence[LayerGeometry], windows: Mapping[int, int | None]) -> tuple[LayerGroup, ...]:
    """The groups of a model, those that see everything first. `windows`: of each layer, by its index.

    Of all group sizes the one that costs least is taken, where a wasted layer costs as much as a group; of two that
    cost the same, the one that wastes less.
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
    """Room in a block of each group that holds nothing, in layers of average size."""
    used = [sum(layers[layer].token_elements for layer in group.layers) for group in groups]
    return (max(used) * len(groups) - sum(used)) * len(layers) / sum(used)
