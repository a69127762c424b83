"""Layout fingerprints: any difference refuses, and the refusal prints both sides."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from baton.engine.runner import KVLayout, ModelInfo
from kv_transfer.layout import LayoutFingerprint, refusal

MODEL = ModelInfo("m", "f00d", "llama", "float32", "cpu-avx512", 100, 64, frozenset({2}), True)
LAYOUT = KVLayout.uniform(block_size=16, num_layers=2, num_kv_heads=4, head_dim=32, dtype="float32")
OURS = LayoutFingerprint.of(MODEL, LAYOUT, "nixl")


def test_equal_fingerprints_are_accepted() -> None:
    assert refusal(OURS, LayoutFingerprint.of(MODEL, LAYOUT, "nixl")) is None
    assert OURS.block_bytes == 2 * 2 * 4 * 16 * 32 * 4


@pytest.mark.parametrize("name", [field.name for field in fields(LayoutFingerprint)])
def test_any_difference_refuses_and_prints_both(name: str) -> None:
    value = getattr(OURS, name)
    theirs = replace(OURS, **{name: value + 1 if isinstance(value, int) else value + "x"})
    story = refusal(OURS, theirs)
    assert story is not None
    assert f"differ in {name}:" in story
    assert f"here [{OURS}]" in story
    assert f"there [{theirs}]" in story
