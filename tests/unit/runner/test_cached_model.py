"""Layers with equal windows share blocks, in groups of about one size."""

from __future__ import annotations

import pytest

from baton.engine.runner import KVLayout, LayerGeometry, LayerGroup
from baton.runner.model.cached_model import group_layers

ONE = LayerGeometry(2, 8, 8)


def groups(*windows: int | None, layers: tuple[LayerGeometry, ...] = ()) -> list[str]:
    found = group_layers(layers or (ONE,) * len(windows), dict(enumerate(windows)))
    return [str(group) for group in found]


@pytest.mark.parametrize("window", [None, 7])
def test_layers_with_equal_windows_are_one_group(window: int | None) -> None:
    assert groups(window, window, window) == [f"{window or 'all'}@0,1,2"]


def test_groups_without_a_window_come_first() -> None:
    assert groups(9, None, 9, None) == ["all@1,3", "9@0,2"]
    assert groups(9, 4, 4, None) == ["all@3", "4@1", "4@2", "9@0"]


def test_many_layers_are_cut_into_groups_of_the_size_of_few() -> None:
    windows = [None if layer % 6 == 5 else 512 for layer in range(24)]
    found = group_layers((ONE,) * 24, dict(enumerate(windows)))
    assert [(len(group.layers), group.window) for group in found] == [(4, None)] + [(4, 512)] * 5


def test_a_little_waste_is_better_than_many_groups() -> None:
    windows = [None if layer % 2 else 512 for layer in range(13)]
    found = group_layers((ONE,) * 13, dict(enumerate(windows)))
    assert [(len(group.layers), group.window) for group in found] == [(6, None), (7, 512)]


def test_a_block_is_as_large_as_the_largest_group() -> None:
    wide = LayerGeometry(2, 16, 16)
    layers = (ONE, wide, ONE, wide)
    layout = KVLayout(4, layers, "float32", group_layers(layers, {0: 8, 1: None, 2: 8, 3: None}))
    assert layout.windows == (None, 8)
    assert layout.block_elements == 4 * 2 * wide.token_elements
    assert layout.geometry == "1*2x(8+8),1*2x(16+16),1*2x(8+8),1*2x(16+16) in all@1,3 8@0,2"


def test_groups_must_have_each_layer_once() -> None:
    for wrong in [(LayerGroup((0,)),), (LayerGroup((0, 1)), LayerGroup((1,)))]:
        with pytest.raises(ValueError, match="must have each of the 2 layers once"):
            KVLayout(4, (ONE, ONE), "float32", wrong)
