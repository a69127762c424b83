"""What a receiver compares: digests of a runner's blocks, each computed once."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import xxhash

from baton.engine.request import Request, SamplingParams
from baton.engine.runner.base import KVLayout, KVMemory, LayerGeometry, LayerGroup
from kv_transfer.digests import OfferedDigests, block_digest, wrong_block

BLOCK_BYTES = 64
LAYOUT = KVLayout.uniform(4, num_layers=1, num_kv_heads=1, head_dim=2, dtype="float32")


def memory_of(content: bytes) -> KVMemory:
    owner = ctypes.create_string_buffer(content, len(content))
    return KVMemory(ctypes.addressof(owner), len(content) // BLOCK_BYTES, BLOCK_BYTES, "DRAM", 0, owner)


class CountingDigest:
    """Digests of numbers that a test changes."""

    def __init__(self) -> None:
        self.content = dict(enumerate(range(100, 140)))
        self.asked: list[int] = []

    def __call__(self, block_id: int) -> int:
        self.asked.append(block_id)
        return self.content[block_id]


def request_with_keys(num_tokens: int, num_keys: int, num_cached_tokens: int = 0) -> Request:
    request = Request("r", list(range(num_tokens)), SamplingParams())
    request.block_hashes = [bytes([index]) * 32 for index in range(num_keys)]
    request.num_cached_tokens = num_cached_tokens
    return request


def test_a_digest_is_that_of_the_blocks_bytes() -> None:
    content = bytes(range(192))
    digest = block_digest(memory_of(content))
    assert digest is not None
    assert [digest(block) for block in range(3)] == [
        xxhash.xxh3_64_intdigest(content[start : start + BLOCK_BYTES]) for start in (0, 64, 128)
    ]


def test_every_bit_counts() -> None:
    memory = memory_of(bytes(128))
    digest = block_digest(memory)
    assert digest is not None
    clean = digest(1)
    for bit in range(8 * BLOCK_BYTES):
        memory.owner[64 + bit // 8] = bytes([1 << bit % 8])
        assert digest(1) != clean
        memory.owner[64 + bit // 8] = b"\0"
    assert digest(1) == clean


def test_memory_of_a_device_has_none() -> None:
    assert block_digest(replace(memory_of(bytes(128)), kind="VRAM")) is None


def test_the_first_wrong_block_is_named() -> None:
    digest = CountingDigest()
    assert wrong_block(digest, [4, 7, 9], [104, 107, 109]) is None
    assert wrong_block(digest, [4, 7, 9], [104, 108, 110]) == 7


def test_a_cached_block_keeps_the_digest_it_was_computed_with() -> None:
    digest = CountingDigest()
    offered = OfferedDigests(digest, LAYOUT)
    assert offered.of(request_with_keys(10, 2), 0, (5, 6, 7)) == (105, 106, 107)
    digest.content[5] = 0  # damaged in memory
    digest.asked.clear()
    assert offered.of(request_with_keys(10, 2, num_cached_tokens=8), 0, (5, 6, 9)) == (105, 106, 109)
    assert digest.asked == [9]


def test_what_is_computed_anew_has_a_new_digest() -> None:
    digest = CountingDigest()
    offered = OfferedDigests(digest, LAYOUT)
    request = request_with_keys(10, 2)
    offered.of(request, 0, (5, 6, 7))
    digest.content[5] = 55
    assert offered.of(request, 0, (5, 6, 7))[0] == 55


def test_a_block_with_another_key_is_another_block() -> None:
    digest = CountingDigest()
    offered = OfferedDigests(digest, LAYOUT)
    offered.of(request_with_keys(10, 2), 0, (5, 6, 7))
    digest.content[6] = 66
    other = request_with_keys(10, 2, num_cached_tokens=8)
    other.block_hashes[1] = b"x" * 32
    assert offered.of(other, 0, (5, 6)) == (105, 66)


def test_without_keys_every_digest_is_computed() -> None:
    digest = CountingDigest()
    offered = OfferedDigests(digest, LAYOUT)
    for _ in range(2):
        offered.of(request_with_keys(10, 0, num_cached_tokens=8), 0, (5, 6))
    assert digest.asked == [5, 6, 5, 6]


def test_of_several_groups_each_block_has_its_own() -> None:
    layers = (LayerGeometry(1, 2, 2),) * 2
    layout = KVLayout(4, layers, "float32", (LayerGroup((0,)), LayerGroup((1,), 4)))
    digest = CountingDigest()
    offered = OfferedDigests(digest, layout)
    assert offered.of(request_with_keys(10, 2), 0, (5, 0, 6, 7)) == (105, 0, 106, 107)
    assert offered.of(request_with_keys(10, 2, num_cached_tokens=8), 2, (6, 7)) == (106, 107)
    assert digest.asked == [5, 6, 7]
