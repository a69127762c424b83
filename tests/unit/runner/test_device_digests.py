"""Digests of KV blocks by the kernel for GPUs: those that the host computes, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
import torch

from baton.engine.runner import KVLayout, KVMemory
from baton.runner.blocks.digest_definition import digest_of, digested_rows
from baton.runner.blocks.sub_blocks import WHOLE, Division
from tests.support.triton_interpreter import DEVICE, triton_attention_module

pytestmark = pytest.mark.triton

NUM_BLOCKS = 7


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips the test where the kernel can't run."""
    triton_attention_module(monkeypatch)


def no_copies(ids: Sequence[int], division: Division = WHOLE, /) -> Sequence[int]:
    raise AssertionError("these blocks were not to be copied")


def device_memory(layout: KVLayout | None, block_bytes: int, layers: range | None = None) -> KVMemory:
    content = bytearray(Random(block_bytes).randbytes(NUM_BLOCKS * block_bytes))
    owner = torch.frombuffer(content, dtype=torch.uint8).to(DEVICE)
    return KVMemory(owner.data_ptr(), NUM_BLOCKS, block_bytes, "VRAM", 0, owner, layout=layout, layers=layers)


def expected(memory: KVMemory, ids: Sequence[int], division: Division = WHOLE) -> list[int]:
    content, size, parts = memory.owner.cpu().numpy().tobytes(), memory.block_bytes, division.parts
    rows = digested_rows(memory, division)
    return [digest_of(content[each // parts * size :][:size], rows, each % parts) for each in ids]


def digests_of(memory: KVMemory, by_copies: Any = no_copies) -> Any:
    from baton.runner.blocks.device_digests import DeviceDigests

    return DeviceDigests(memory, by_copies)


@pytest.mark.parametrize("block_bytes", [248, 1024, 1032, 1088, 2056])
def test_digests_of_whole_blocks_equal_those_of_the_xxhash_package(block_bytes: int) -> None:
    memory = device_memory(None, block_bytes)
    ids = [6, 0, 3, 5, 3]
    assert digests_of(memory)(ids) == expected(memory, ids)
    assert digests_of(memory)([]) == []


def test_layers_count_by_their_index_in_the_whole_model() -> None:
    layout = KVLayout.uniform(4, num_layers=5, num_kv_heads=2, head_dim=16, dtype="float32")
    part = layout.part(range(2, 5))
    memory = device_memory(layout, part.block_bytes, range(2, 5))
    ids = [1, 4, 2]
    assert digests_of(memory)(ids) == expected(memory, ids)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_digests_of_sub_blocks_equal_those_of_their_bytes_put_together(dtype: str, monkeypatch: Any) -> None:
    from baton.runner.blocks import device_digests

    layout = KVLayout.uniform(8, num_layers=2, num_kv_heads=3, head_dim=32, dtype=dtype)
    memory = device_memory(layout, layout.block_bytes)
    division = Division(2)
    ids = [5, 4, 13, 0, 7]
    monkeypatch.setattr(device_digests, "_GATHERED_BYTES", 2 * layout.block_bytes)  # several are put together in turn
    assert digests_of(memory)(ids, division) == expected(memory, ids, division)


def test_short_layers_and_halves_of_words_are_left_to_copies() -> None:
    short = KVLayout.uniform(4, num_layers=2, num_kv_heads=1, head_dim=8, dtype="float32")
    for memory, division in ((device_memory(short, short.block_bytes), Division(2)), (device_memory(None, 300), WHOLE)):
        assert digests_of(memory, lambda ids, division: [*ids, division.parts])([4], division) == [4, division.parts]
