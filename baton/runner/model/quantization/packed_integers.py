"""Integers of 4 or 8 bits that are packed into words of 32 bits, lowest bits first."""

from __future__ import annotations

import torch


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """The integers in words int32 [..., m]: uint8 [..., m * 32 / bits]."""
    octets = words.contiguous().view(torch.uint8)
    if bits == 8:
        return octets
    return torch.stack((octets & 15, octets >> 4), dim=-1).flatten(-2)


def one_or_each(zeros: torch.Tensor) -> int | torch.Tensor:
    """The codes that mean zero, uint8 [n, G]: as one number where all are equal, which costs no memory."""
    first = int(zeros.flatten()[0])
    return first if bool((zeros == first).all()) else zeros.contiguous()
