"""Layout fingerprints: any difference is named, and both sides are printed."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from baton.engine.runner import KVLayout, LayerState, ModelInfo
from kv_transfer.layout import LayoutFingerprint, layout_mismatch

MODEL = ModelInfo("m", "f00d", "llama", "float32", "cpu-avx512", 100, 64, frozenset({2}), True)
LAYOUT = KVLayout.uniform(block_size=16, num_layers=2, num_kv_heads=4, head_dim=32, dtype="float32")
OURS = LayoutFingerprint.of(MODEL, LAYOUT, "nixl")


def test_equal_fingerprints_are_accepted() -> None:
    assert layout_mismatch(OURS, LayoutFingerprint.of(MODEL, LAYOUT, "nixl")) is None
    assert OURS.block_bytes == 2 * 2 * 4 * 16 * 32 * 4


@pytest.mark.parametrize("name", [field.name for field in fields(LayoutFingerprint) if field.name != "kv_shape"])
def test_any_difference_is_named_and_both_sides_are_printed(name: str) -> None:
    value = getattr(OURS, name)
    changed: dict[str, Any] = {name: value + 1 if isinstance(value, int) else value + "x"}
    theirs = replace(OURS, **changed)
    detail = layout_mismatch(OURS, theirs)
    assert detail is not None
    assert f"differ in {name}:" in detail
    assert f"here [{OURS}]" in detail
    assert f"there [{theirs}]" in detail


@pytest.mark.parametrize("block_size", [1, 8, 32, 48])
def test_block_sizes_may_differ_where_one_divides_the_other(block_size: int) -> None:
    theirs = LayoutFingerprint.of(MODEL, replace(LAYOUT, block_size=block_size), "nixl")
    assert layout_mismatch(OURS, theirs) is None
    assert "differ in dtype:" in (layout_mismatch(OURS, replace(theirs, dtype="bfloat16")) or "")
    assert "block_bytes" in (layout_mismatch(OURS, replace(theirs, block_bytes=theirs.block_bytes + 1)) or "")


@pytest.mark.parametrize("block_size", [24, 6, 17])
def test_block_sizes_that_dont_fit_are_refused_with_the_reason(block_size: int) -> None:
    theirs = LayoutFingerprint.of(MODEL, replace(LAYOUT, block_size=block_size), "nixl")
    detail = layout_mismatch(OURS, theirs) or ""
    assert "block_size, block_bytes (neither block size divides the other): here" in detail


def test_nodes_that_pair_across_numerics_need_equal_kv_and_for_states_equal_blocks() -> None:
    across = LayoutFingerprint.of(MODEL, LAYOUT, "nixl", across=True)
    others = replace(across, numerics="cuda")
    assert layout_mismatch(across, others) is None
    assert layout_mismatch(OURS, replace(OURS, kv_shape="x")) is None, "of equal numerics, whatever they are told"
    assert "differ in numerics, kv_shape" in (layout_mismatch(OURS, others) or "")
    assert "differ in dtype:" in (layout_mismatch(across, replace(others, dtype="bfloat16")) or "")
    larger = LayoutFingerprint.of(replace(MODEL, numerics="cuda"), replace(LAYOUT, block_size=32), "nixl", across=True)
    assert layout_mismatch(across, larger) is None
    states = KVLayout(16, (LayerState(heads=1, key_dim=2, value_dim=2),), "float32")
    assert states.exchange_shape != replace(states, block_size=32).exchange_shape
