"""On a GPU attention has the bits of one order of arithmetic, whatever tiles and items a step is dealt to."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from baton.runner.backends.attention_call import AttentionCall, AttentionFeatures
from baton.runner.backends.attention_work import dealing
from baton.runner.backends.attention_work.step_work import KeptWork, StepWork
from baton.runner.backends.paged_cache import CacheView, widen, write_rows
from baton.runner.backends.paged_cache import narrow as narrow_rows
from tests.support.triton_interpreter import DEVICE, SPLIT, triton_attention_module

pytestmark = [
    pytest.mark.triton,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # exp of what is far too large, in the interpreter
]

Float32Array = npt.NDArray[np.float32]
LOG2_E = np.float32(1.4426950408889634)
SEEDS = range(4)
"""Each one a layer: plain, with a window and sinks, with a soft cap, and in chunks with sinks."""


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return triton_attention_module(monkeypatch)


def random_call(seed: int) -> AttentionCall:
    """A step of decode rows, drafts and prompts, with shuffled blocks, in bfloat16."""
    choose = np.random.default_rng(seed)
    group, kv_heads = [(16, 1), (3, 1), (4, 1), (20, 1)][seed]
    key_dim, value_dim = [(16, 16), (64, 64), (80, 80), (48, 32)][seed]
    block_size = int(choose.choice([8, 16, 64]))
    counts = [1, 2, int(choose.integers(65, 100)) // group]
    lengths = [SPLIT * 2 + 3, int(choose.integers(2, SPLIT)), int(choose.integers(SPLIT, 2 * SPLIT))]
    width = -(-max(lengths) // block_size)
    keys, values = (kv_heads * block_size * dim for dim in (key_dim, value_dim))
    generator = torch.Generator().manual_seed(seed)
    num_blocks = 3 * width + 1
    cache = CacheView(
        torch.randn(num_blocks * (keys + values), generator=generator).to(DEVICE, torch.bfloat16),
        num_blocks,
        keys + values,
        0,
        keys,
        kv_heads,
        block_size,
        key_dim,
        value_dim,
    )
    heads = group * kv_heads
    sinks = torch.randn(heads, generator=generator).to(DEVICE, torch.bfloat16) if seed % 2 else None
    window = [None, SPLIT + 9, None, 20][seed]
    softcap = 15.0 if seed == 2 else None
    return AttentionCall(
        torch.randn(sum(counts), heads, key_dim, generator=generator).to(DEVICE, torch.bfloat16),
        cache,
        torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=DEVICE),
        torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        (torch.randperm(num_blocks - 1, generator=generator) + 1).view(3, width).to(DEVICE, torch.int32),
        AttentionFeatures(key_dim**-0.5, window, softcap, sinks, in_chunks=seed == 3),
    )


def dot(row: Float32Array, matrix: Float32Array) -> Float32Array:
    """One row's products, as the interpreter computes them (triton_interpreter.py): a chain of sums for each."""
    total = np.zeros(matrix.shape[1], np.float32)
    for number, of_number in zip(row, matrix, strict=True):
        total += number * of_number
    return total


def narrow(numbers: Float32Array) -> Float32Array:
    return torch.from_numpy(np.ascontiguousarray(numbers)).bfloat16().float().numpy()


def in_tiles(rows: Float32Array, first: int, tile: int, width: int) -> Float32Array:
    """A tile of rows of a sequence, padded with zeros [tile, width]."""
    out = np.zeros((tile, width), np.float32)
    part = rows[first : first + tile]
    out[: part.shape[0], : part.shape[1]] = part
    return out


def attend_to(module: Any, q: Float32Array, k: Float32Array, v: Float32Array, how: Any, sink: Any) -> Float32Array:
    """One head of one row: the keys it sees are those of its window among k [N, KD]; v [N, VD]. All in one order."""
    tile = module._keys(torch.bfloat16, max(k.shape[1], v.shape[1]))
    width, rest = module._key_widths(k.shape[1])
    first = how.first_key(k.shape[0] - 1)
    unit = np.float32(how.scale * 1.4426950408889634)
    if how.softcap:
        unit = LOG2_E
        cap, to_cap = np.float32(how.softcap), np.float32(2 * 1.4426950408889634 * how.scale / how.softcap)
    ones = np.ones((tile, 8), np.float32)
    nothing = (np.float32(-np.inf), np.float32(0), np.zeros(module._padded(v.shape[1]), np.float32))
    best, total, mixed = nothing
    for split in range(first // SPLIT, -(-k.shape[0] // SPLIT)):
        b, t, m = nothing
        for at in range(split * SPLIT, min((split + 1) * SPLIT, k.shape[0]), tile):
            if at + tile <= first:
                continue
            keys = in_tiles(k, at, tile, width + rest)
            padded = np.concatenate([q, np.zeros(width + rest - q.size, np.float32)])
            scores = dot(padded[:width], np.ascontiguousarray(keys[:, :width]).T)
            if rest:
                scores = dot(padded[width:], np.ascontiguousarray(keys[:, width:]).T) + scores
            if how.softcap:
                scores = cap * (np.float32(1) - np.float32(2) / (np.exp2(scores * to_cap) + np.float32(1)))
            places = np.arange(at, at + tile)
            scores = np.where((places >= first) & (places < k.shape[0]), scores, np.float32(-np.inf))
            higher = np.maximum(b, scores.max() * unit)
            weights = narrow(np.exp2(scores * unit - higher))
            decay = np.exp2(b - higher)
            t = dot(weights, ones)[0] + t * decay
            m = dot(weights, in_tiles(v, at, tile, m.size)) + m * decay
            b = higher
        higher = np.maximum(best, b)
        decay, other = np.exp2(best - higher), np.exp2(b - higher)
        best, total, mixed = higher, total * decay + t * other, mixed * decay + m * other
    if sink is not None:
        higher = np.maximum(best, np.float32(sink) * LOG2_E)
        decay = np.exp2(best - higher)
        total = total * decay + np.exp2(np.float32(sink) * LOG2_E - higher)
        mixed = mixed * decay
    return narrow((mixed + np.float32(0)) / total)[: v.shape[1]]


def by_hand(module: Any, call: AttentionCall) -> Float32Array:
    """The call's result, row by row [T, H, VD]."""
    cache, how, group = call.cache, call.how, call.query.shape[1] // call.cache.num_kv_heads
    query = call.query.float().cpu().numpy()
    blocks = cache.memory.float().cpu().numpy().reshape(cache.num_blocks, -1)
    keys, values = (
        part.reshape(cache.num_blocks, cache.num_kv_heads, cache.block_size, -1)
        for part in np.split(blocks, [cache.value_offset], axis=1)
    )
    sinks = [None] * query.shape[1] if how.sinks is None else how.sinks.float().tolist()
    starts, lengths, tables = call.query_start.tolist(), call.seq_lens.tolist(), call.block_tables.cpu().numpy()
    out = np.zeros((*query.shape[:2], cache.value_dim), np.float32)
    for number, (start, stop) in enumerate(itertools.pairwise(starts)):
        k, v = (part[tables[number]].transpose(1, 0, 2, 3) for part in (keys, values))
        for row, head in itertools.product(range(start, stop), range(query.shape[1])):
            length = lengths[number] - (stop - 1 - row)
            own_k, own_v = (part[head // group].reshape(-1, part.shape[-1])[:length] for part in (k, v))
            out[row, head] = attend_to(module, query[row, head], own_k, own_v, how, sinks[head])
    return out


@pytest.mark.parametrize("seed", SEEDS)
def test_tiles_and_items_change_no_bits(module: ModuleType, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 16, 64 and 128 rows, all splits of a row by one program or each by another one."""
    call = random_call(seed)
    results = []
    for rows, programs in ((16, 1), (16, 10**6), (64, 1), (128, 1), (128, 10**6)):
        monkeypatch.setattr(dealing, "_PROGRAMS_TO_FILL", programs)
        results.append(module.triton_attention(replace(call, most_rows=rows)))
    assert all(torch.equal(result, results[0]) for result in results)
    expected = by_hand(module, call)
    if DEVICE.type == "cpu":
        np.testing.assert_array_equal(results[0].float().numpy(), expected)
    else:  # whose exp2 and whose order within a dot are its own
        torch.testing.assert_close(results[0].float().cpu(), torch.from_numpy(expected), atol=2e-2, rtol=2e-2)


def test_a_graph_s_buffers_take_one_step_after_another(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of decode rows, of which the longest are divided, at fixed addresses; what is behind them is padding."""
    monkeypatch.setattr(dealing, "_PROGRAMS_TO_FILL", 10**6)
    call, kept = random_call(0), None
    for lengths in ([SPLIT + 9, 40], [2 * SPLIT + 3, SPLIT], [7, 2 * SPLIT]):
        size = len(lengths)
        step = StepWork(np.arange(size + 1, dtype=np.int32), np.array(lengths, np.int32), DEVICE)
        expected = module.triton_attention(
            replace(call, query=call.query[:size], block_tables=call.block_tables[:size], work=step)
        )
        if kept is None:
            kept = KeptWork(step.padded(3), 3 * SPLIT, DEVICE)
        kept.take(step.padded(3))
        out = module.triton_attention(replace(call, query=call.query[:3], work=kept))
        assert torch.equal(out[:size], expected)


@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn], ids=["int8", "fp8"])
def test_a_cache_in_8_bits_is_read_as_torch_reads_it(module: ModuleType, cache_dtype: torch.dtype) -> None:
    """A row has the bits that it has with the numbers of its codes and scales in bfloat16."""
    call = random_call(2)
    wide = call.cache
    scales = 4 * wide.num_kv_heads * wide.block_size
    eight = replace(
        wide,
        memory=torch.zeros(wide.num_blocks * (wide.block_stride + scales), dtype=cache_dtype, device=DEVICE),
        block_stride=wide.block_stride + scales,
        scale_offset=wide.block_stride,
    )
    at = torch.arange(wide.num_blocks * wide.block_size, device=DEVICE)
    blocks, offsets = at // wide.block_size, at % wide.block_size
    key, value = (
        torch.randn(at.numel(), wide.num_kv_heads, dim, device=DEVICE).to(torch.bfloat16) * 3
        for dim in (wide.key_dim, wide.value_dim)
    )
    write_rows(eight, key, value, blocks, offsets)
    key, value = (widen(*narrow_rows(rows, cache_dtype), torch.bfloat16) for rows in (key, value))
    write_rows(wide, key, value, blocks, offsets)
    assert torch.equal(module.triton_attention(replace(call, cache=eight)), module.triton_attention(call))
