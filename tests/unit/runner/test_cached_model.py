"""Layers with equal windows share blocks, in groups of about one size."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.engine.runner import STATE_WINDOW, KVLayout, LayerGeometry, LayerGroup, LayerState
from baton.runner.loading import states_path
from baton.runner.model.cached_model import group_layers, larger_for_states

ONE = LayerGeometry(2, 8, 8)
"""4 tokens of it take 512 bytes in float32."""
STATE = LayerState(rows=2, width=8, heads=2, key_dim=4, value_dim=4)
"""A state of 192 bytes."""


def of(*layers: LayerGeometry | LayerState) -> KVLayout:
    return KVLayout(4, layers, "float32")


def groups(*windows: int | None) -> list[str]:
    found = group_layers(of(*(ONE,) * len(windows)), dict(enumerate(windows)))
    return [str(group) for group in found]


@pytest.mark.parametrize("window", [None, 7])
def test_layers_with_equal_windows_are_one_group(window: int | None) -> None:
    assert groups(window, window, window) == [f"{window or 'all'}@0,1,2"]


def test_groups_without_a_window_come_first() -> None:
    assert groups(9, None, 9, None) == ["all@1,3", "9@0,2"]
    assert groups(9, 4, 4, None) == ["all@3", "4@1", "4@2", "9@0"]


def test_many_layers_are_cut_into_groups_of_the_size_of_few() -> None:
    windows = [None if layer % 6 == 5 else 512 for layer in range(24)]
    found = group_layers(of(*(ONE,) * 24), dict(enumerate(windows)))
    assert [(len(group.layers), group.window) for group in found] == [(4, None)] + [(4, 512)] * 5


def test_a_little_waste_is_better_than_many_groups() -> None:
    windows = [None if layer % 2 else 512 for layer in range(13)]
    found = group_layers(of(*(ONE,) * 13), dict(enumerate(windows)))
    assert [(len(group.layers), group.window) for group in found] == [(6, None), (7, 512)]


def test_a_block_is_as_large_as_the_largest_group() -> None:
    wide = LayerGeometry(2, 16, 16)
    whole = of(ONE, wide, ONE, wide)
    layout = replace(whole, groups=group_layers(whole, {0: 8, 1: None, 2: 8, 3: None}))
    assert layout.windows == (None, 8)
    assert layout.block_elements == 4 * 2 * wide.token_elements
    assert layout.geometry == "1*2x(8+8),1*2x(16+16),1*2x(8+8),1*2x(16+16) in all@1,3 8@0,2"


def grouped(*layers: LayerGeometry | LayerState) -> KVLayout:
    whole = of(*layers)
    windows = {i: STATE_WINDOW if isinstance(layer, LayerState) else None for i, layer in enumerate(layers)}
    return replace(whole, groups=group_layers(whole, windows))


def test_states_are_in_groups_of_their_own_and_fill_a_block_of_keys() -> None:
    layout = grouped(STATE, ONE, STATE, STATE)
    assert [group.layers for group in layout.groups] == [(1,), (0, 2), (3,)]
    assert layout.block_bytes == 512, "two states fit into it"
    assert layout.keeps_states
    assert layout.geometry == ("1*state(2x8+2x4x4),1*2x(8+8),2*state(2x8+2x4x4) in all@1 2@0,2 2@3")


def test_a_window_of_two_keys_is_no_state() -> None:
    whole = of(STATE, ONE)
    assert [group.layers for group in group_layers(whole, {0: STATE_WINDOW, 1: STATE_WINDOW})] == [(1,), (0,)]


def test_states_alone_are_one_group() -> None:
    assert [group.layers for group in grouped(STATE, STATE).groups] == [(0, 1)]


def test_blocks_get_more_tokens_until_their_states_cost_little_beside_their_keys() -> None:
    assert larger_for_states(of(ONE, *(STATE,) * 10)).block_size == 4, "10 x 192 bytes are less than 4 x 512"
    assert larger_for_states(of(ONE, *(STATE,) * 11)).block_size == 8
    assert larger_for_states(of(STATE)).block_size == 512
    assert larger_for_states(replace(of(STATE), block_size=24)).block_size == 384, "not beyond 512"
    assert larger_for_states(of(ONE)).block_size == 4


def test_blocks_of_states_begin_at_whole_numbers_in_every_dtype() -> None:
    for dtype in ("float32", "bfloat16", "int8", "fp8"):
        layout = KVLayout(3, (LayerGeometry(1, 3, 0), STATE), dtype)
        assert layout.block_bytes % 4 == 0
        assert layout.layer_elements(1) * layout.block_bytes == STATE.num_bytes * layout.block_elements


def test_groups_must_have_each_layer_once() -> None:
    for wrong in [(LayerGroup((0,)),), (LayerGroup((0, 1)), LayerGroup((1,)))]:
        with pytest.raises(ValueError, match="must have each of the 2 layers once"):
            KVLayout(4, (ONE, ONE), "float32", wrong)


def test_operators_are_told_what_states_take() -> None:
    path = states_path(grouped(STATE, ONE, STATE))
    assert path is not None
    assert (path.part, path.runs) == ("states", "1 KiB of a sequence in the KV cache, kept every 4 tokens")
    large = states_path(of(LayerState(heads=16, key_dim=128, value_dim=128), ONE))
    assert large is not None
    assert large.runs.startswith("1 MiB of a sequence")
    assert states_path(of(ONE)) is None
