"""A probe of the planned digests on a GPU: XXH3 with 64 bits of many pieces of one length, in one kernel.

After the specification of XXH3 (https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md), for inputs of more
than 240 bytes, without a seed. A length must be a multiple of 8.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

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
"""The accumulators of the eight lanes at the start."""
PIECES = 4
"""Pieces that one program hashes."""


def constants(device: torch.device) -> torch.Tensor:
    """uint64: the secret's eight bytes from each of its places 0..184, and the accumulators' start."""
    words = [int.from_bytes(_SECRET[place : place + 8], "little") for place in range(len(_SECRET) - 7)]
    return torch.tensor([*words, *_START], dtype=torch.uint64).to(device)


def digests(memory: torch.Tensor, starts: torch.Tensor, length: int, given: torch.Tensor) -> torch.Tensor:
    """The digests, uint64, of the pieces of `length` bytes that begin at these int64 words of `memory`, uint64.

    `given` are the `constants` on the device.
    """
    if length <= 240 or length % 8:
        raise ValueError(f"a length of {length} bytes: more than 240 and a multiple of 8 are hashed")
    out = torch.zeros(starts.shape[0], dtype=torch.uint64, device=memory.device)
    grid = (triton.cdiv(starts.shape[0], PIECES),)
    _digest[grid](memory, starts, given, out, starts.shape[0], length, ROWS=PIECES, num_warps=1)
    return out


@triton.jit
def _accumulate(sums, memory, at, keys, is_piece):
    """Add one stripe of 64 bytes to the eight lanes of each piece; a lane also gets its neighbour's word."""
    lanes = tl.arange(0, 8)
    words = tl.load(memory + at[:, None] + lanes[None, :], mask=is_piece[:, None], other=0)
    neighbours = tl.load(memory + at[:, None] + (lanes ^ 1)[None, :], mask=is_piece[:, None], other=0)
    mixed = words ^ tl.load(keys + lanes * 8)[None, :]
    return sums + neighbours + (mixed & 0xFFFFFFFF) * (mixed >> 32)


@triton.jit(do_not_specialize=["count", "length"])
def _digest(memory, starts, given, out, count, length, ROWS: tl.constexpr):
    """Programs: ROWS pieces each. A block is 16 stripes, whose keys are 8 bytes of the secret apart."""
    pieces = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_piece = pieces < count
    first = tl.load(starts + pieces, mask=is_piece, other=0)
    lanes = tl.arange(0, 8)
    sums = tl.zeros([ROWS, 8], tl.uint64) + tl.load(given + 185 + lanes)[None, :]
    scramble = tl.load(given + 128 + lanes * 8)
    stripes = (length - 1) // 64
    for block in range(stripes // 16):
        for stripe in range(16):
            sums = _accumulate(sums, memory, first + (block * 16 + stripe) * 8, given + stripe * 8, is_piece)
        sums = (sums ^ (sums >> 47) ^ scramble[None, :]) * 0x9E3779B1
    for stripe in range(stripes % 16):
        at = first + (stripes // 16 * 16 + stripe) * 8
        sums = _accumulate(sums, memory, at, given + stripe * 8, is_piece)
    sums = _accumulate(sums, memory, first + length // 8 - 8, given + 121, is_piece)
    one, other = tl.split(tl.reshape(sums ^ tl.load(given + 11 + lanes * 8)[None, :], [ROWS, 4, 2]))
    result = tl.sum((one * other) ^ tl.umulhi(one, other), 1) + length.to(tl.uint64) * 0x9E3779B185EBCA87
    result = (result ^ (result >> 37)) * 0x165667919E3779F9
    tl.store(out + pieces, result ^ (result >> 32), mask=is_piece)
