"""64-bit XXH3 of many pieces of a GPU's memory as one Triton kernel, for digests of KV blocks.

After the specification of XXH3 (https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md), without a seed, for
pieces of more than 240 bytes whose length and start are multiples of 8. All sums are of integers, so that no order of
additions can change a digest.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ROWS = 4
"""Pieces that one program hashes: with eight lanes each they fill a warp."""
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_START = (
    0xC2B2AE3D,
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x85EBCA77,
    0x27D4EB2F165667C5,
    0x9E3779B1,
)
"""The sums of the eight lanes at the start."""


def xxh3_constants(device: torch.device) -> torch.Tensor:
    """uint64 [193]: the secret's eight bytes from each of its places 0 to 184 on, and the eight lanes' first sums."""
    words = [int.from_bytes(_SECRET[place : place + 8], "little") for place in range(len(_SECRET) - 7)]
    return torch.tensor([*words, *_START], dtype=torch.uint64).to(device)


def xxh3_of_layers(
    memory: torch.Tensor,
    block_words: int,
    blocks: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    weights: torch.Tensor,
    constants: torch.Tensor,
) -> torch.Tensor:
    """For each block the sum over its layers of weight times XXH3, modulo 2**64: int64 [B], to be read as uint64.

    `memory`: uint64 words, with `block_words` of them in each block. `blocks`: int64 [B], numbers of blocks. `starts`,
    `lengths`, `weights`: int64 [L], the word in a block at which each layer begins, the bytes that it has, and how
    often its hash counts. `constants`: those of `xxh3_constants`. Nothing is read from the device.
    """
    count, layers = blocks.shape[0], starts.shape[0]
    hashes = torch.empty(layers, count, dtype=torch.int64, device=memory.device)
    if count:
        # A grid's first dimension has room for any number of blocks.
        grid = (triton.cdiv(count, _ROWS), layers)
        _hash_layers[grid](
            memory, block_words, blocks, starts, lengths, weights, constants, hashes, count, ROWS=_ROWS, num_warps=1
        )
    return hashes.sum(0)


@triton.jit
def _add_stripe(sums, memory, at, keys, is_piece):
    """Add one stripe of 64 bytes to the eight lanes of each piece; a lane also gets its neighbour's word."""
    lanes = tl.arange(0, 8)
    words = tl.load(memory + at[:, None] + lanes[None, :], mask=is_piece[:, None], other=0)
    neighbours = tl.load(memory + at[:, None] + (lanes ^ 1)[None, :], mask=is_piece[:, None], other=0)
    mixed = words ^ tl.load(keys + lanes * 8)[None, :]
    return sums + neighbours + (mixed & 0xFFFFFFFF) * (mixed >> 32)


@triton.jit(do_not_specialize=["block_words", "count"])
def _hash_layers(memory, block_words, blocks, starts, lengths, weights, constants, hashes, count, ROWS: tl.constexpr):
    """Programs: one layer of ROWS blocks each. A block of the hash is 16 stripes, whose keys are 8 bytes of the secret
    apart; then the sums are scrambled."""
    layer = tl.program_id(1)
    places = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_piece = places < count
    first = tl.load(blocks + places, mask=is_piece, other=0) * block_words + tl.load(starts + layer)
    length = tl.load(lengths + layer)
    lanes = tl.arange(0, 8)
    sums = tl.zeros([ROWS, 8], tl.uint64) + tl.load(constants + 185 + lanes)[None, :]
    scramble = tl.load(constants + 128 + lanes * 8)
    stripes = (length - 1) // 64
    for block in range(stripes // 16):
        # Written out, so that the loads of all stripes are under way together.
        for stripe in tl.static_range(16):
            sums = _add_stripe(sums, memory, first + (block * 16 + stripe) * 8, constants + stripe * 8, is_piece)
        sums = (sums ^ (sums >> 47) ^ scramble[None, :]) * 0x9E3779B1
    for stripe in range(stripes % 16):
        at = first + (stripes // 16 * 16 + stripe) * 8
        sums = _add_stripe(sums, memory, at, constants + stripe * 8, is_piece)
    sums = _add_stripe(sums, memory, first + length // 8 - 8, constants + 121, is_piece)
    one, other = tl.split(tl.reshape(sums ^ tl.load(constants + 11 + lanes * 8)[None, :], [ROWS, 4, 2]))
    result = tl.sum((one * other) ^ tl.umulhi(one, other), 1) + length.to(tl.uint64) * 0x9E3779B185EBCA87
    result = (result ^ (result >> 37)) * 0x165667919E3779F9
    result = (result ^ (result >> 32)) * tl.load(weights + layer).to(tl.uint64)
    tl.store(hashes + layer * count + places, result.to(tl.int64, bitcast=True), mask=is_piece)
