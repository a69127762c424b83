"""The fake of `torch.nn.attention.varlen.varlen_attn`, torch's flash kernel, in plain torch on any device.

It refuses the arguments that the kernel refuses, as far as Baton could pass them.
"""

from __future__ import annotations

import itertools

import torch


def fake_varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    num_splits: int,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    """query [T, H, D]; key and value [T_k, KH, D], or [pages, page_size, KH, D] with a block table. Returns [T, H, D].

    The last query of a sequence sees its last key. Raises RuntimeError for arguments that contradict each other.
    """
    if not enable_gqa or num_splits != 1 or window_size[1] != 0:
        raise RuntimeError("Baton calls the kernel with enable_gqa, one split and no window to the right")
    if (block_table is None) != (seqused_k is None) or (block_table is None) != (cu_seq_k is not None):
        raise RuntimeError("give either pages with their lengths, or packed keys with their bounds")
    # Operations inside a kernel are exempt from the checks of a graph that is being recorded (fake_graph.py).
    with torch._C.DisableTorchFunction():
        out = torch.full_like(query, torch.nan)
        starts = cu_seq_q.tolist()
        for sequence, (first, last) in enumerate(itertools.pairwise(starts)):
            if cu_seq_k is not None:
                own = slice(int(cu_seq_k[sequence]), int(cu_seq_k[sequence + 1]))
                keys, values = key[own], value[own]
            else:
                assert block_table is not None
                assert seqused_k is not None
                length = int(seqused_k[sequence])
                pages = block_table[sequence, : -(-length // key.shape[1])].long()
                keys, values = key[pages].flatten(0, 1)[:length], value[pages].flatten(0, 1)[:length]
            if last - first > max_q or keys.shape[0] > max_k:
                raise RuntimeError("a sequence is longer than max_q or max_k")
            for row in range(first, last):
                stop = keys.shape[0] - (last - 1 - row)
                start = max(0, stop - 1 - window_size[0]) if window_size[0] >= 0 else 0
                heads = query[row].view(keys.shape[1], -1, query.shape[2]).float()
                scores = torch.einsum("khd,tkd->kht", heads, keys[start:stop].float()) * scale
                mixed = torch.einsum("kht,tkd->khd", scores.softmax(-1), values[start:stop].float())
                out[row] = mixed.reshape(out[row].shape).to(out.dtype)
    return out
