"""Layout fingerprints: any difference is named, and both sides are printed."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from baton.engine.runner import KVLayout, ModelInfo
from kv_transfer.layout import LayoutFingerprint, layout_mismatch

MODEL = ModelInfo("m", "f00d", "llama", "float32", "cpu-avx512", 100, 64, frozenset({2}), True)
LAYOUT = KVLayout.uniform(block_size=16, num_layers=2, num_kv_heads=4, head_dim=32, dtype="float32")
OURS = LayoutFingerprint.of(MODEL, LAYOUT, "nixl")


def test_equal_fingerprints_are_accepted() -> None:
    assert layout_mismatch(OURS, LayoutFingerprint.of(MODEL, LAYOUT, "nixl")) is None
    assert OURS.block_bytes == 2 * 2 * 4 * 16 * 32 * 4


@pytest.mark.parametrize("name", [field.name for field in fields(LayoutFingerprint)])
def test_any_difference_is_named_and_both_sides_are_printed(name: str) -> None:
    value = getattr(OURS, name)
    changed: dict[str, Any] = {name: value + 1 if isinstance(value, int) else value + "x"}
    theirs = replace(OURS, **changed)
    detail = layout_mismatch(OURS, theirs)
    assert detail is not None
    assert f"differ in {name}:" in detail
    assert f"here [{OURS}]" in detail
    assert f"there [{theirs}]" in detail
