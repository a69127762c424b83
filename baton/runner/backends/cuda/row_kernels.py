"""Which kernels compute norms and heads on a GPU: those that were seen to run, and to be right.

A kernel is tried when rows of their kind come for the first time, which is in the checks at start.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import NamedTuple

import torch

from baton.runner.backends.cuda.kernels import Heads, Norm
from baton.runner.backends.cuda.trials import is_near, why_failed
from baton.runner.backends.head_rows import HeadRows
from baton.runner.backends.paged_cache import CacheView, write_rows
from baton.runner.backends.torch_operations import rms_norm, rotate

_log = logging.getLogger(__name__)

_SAMPLE_ROWS = 19
_SAMPLE_BLOCKS = 3


class NormChoice:
    """The kernel of norms, or none once it was seen to fail. Called from one thread."""

    def __init__(self, device: torch.device, norm: Norm | None) -> None:
        self._device = device
        self._norm = norm
        self._tried: set[tuple[torch.dtype, int]] = set()

    @property
    def is_by_torch(self) -> bool:
        """Whether torch computes norms, whose bits depend on the number of rows."""
        return self._norm is None

    def kernel_for(self, x: torch.Tensor) -> Norm | None:
        """The kernel for rows of this dtype and width; None if torch computes them."""
        kind = (x.dtype, x.shape[-1])
        if self._norm is not None and kind not in self._tried:
            self._tried.add(kind)
            if reason := self._why_not(self._norm, *kind):
                _log.warning("torch computes norms, whose bits depend on the number of rows: %s", reason)
                self._norm = None
        return self._norm

    def _why_not(self, norm: Norm, dtype: torch.dtype, width: int) -> str:
        """Why a kernel can't compute norms here; empty if it can."""
        generator = torch.Generator().manual_seed(0)
        x, residual = torch.randn(2, _SAMPLE_ROWS, width, generator=generator).to(self._device, dtype)
        weight, eps = torch.ones(width, dtype=dtype, device=self._device), 1e-6
        try:
            together = norm(x, residual, weight, eps, False)
            alone = norm(x[-1:], residual[-1:], weight, eps, False)
        except Exception as error:
            return why_failed(error)
        total = x + residual
        for normed, wanted, lone in zip(together, (total, rms_norm(total, weight, eps, False)), alone, strict=True):
            if not is_near(normed, wanted):
                return "the result of Triton's kernel differs from torch's"
            if not torch.equal(normed[-1:], lone):
                return "Triton's kernel gives a row other bits alone than in a batch"
        return ""


class HeadChoice:
    """The kernels of heads, or none once one was seen to fail. Called from one thread."""

    def __init__(self, device: torch.device, heads: Heads | None) -> None:
        self._device = device
        self._heads = heads
        self._tried: set[Hashable] = set()

    @property
    def is_by_torch(self) -> bool:
        return self._heads is None

    def prepare(
        self, rows: HeadRows, cos: torch.Tensor, sin: torch.Tensor, cache: CacheView, slots: torch.Tensor
    ) -> bool:
        """Compute `Operations.prepare_heads`."""
        if cache.scale_offset is not None or cache.values_in_keys:
            return False
        x, value = rows.queries_and_keys, rows.value
        shape = (*x.shape[1:], value.shape[1:], rows.num_queries, cos.shape[1], cache.block_size)
        kind = ("prepare", x.dtype, cos.dtype, shape, rows.norms is not None, rows.in_pairs)
        heads = self._usable(kind, lambda heads: self._why_wrong(heads, rows, cos, cache))
        if heads is None:
            return False
        heads.prepare(rows, cos, sin, cache, slots)
        return True

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, in_pairs: bool) -> bool:
        """Compute `Operations.rotate`; False, and nothing is done, if torch is to."""
        if x.stride(-1) != 1:
            return False

        def why_not(heads: Heads) -> str:
            by_torch, by_kernel = x.clone(), x.clone()
            rotate(by_torch, cos, sin, in_pairs=in_pairs)
            heads.rotate(by_kernel, cos, sin, in_pairs)
            return "" if is_near(by_kernel, by_torch) else "rotates otherwise than torch"

        heads = self._usable(("rotate", x.dtype, cos.dtype, x.shape[1:], cos.shape[1], in_pairs), why_not)
        if heads is None:
            return False
        heads.rotate(x, cos, sin, in_pairs)
        return True

    def store(self, key: torch.Tensor, value: torch.Tensor | None, cache: CacheView, slots: torch.Tensor) -> bool:
        """Compute `Operations.store_kv`; False, and nothing is done, if torch is to."""
        if cache.scale_offset is not None or any(x is not None and x.stride(-1) != 1 for x in (key, value)):
            return False
        widths = (key.shape[1:], None if value is None else value.shape[1:], cache.block_size)
        heads = self._usable(
            ("store", key.dtype, widths), lambda heads: self._why_stored_wrong(heads.store, key, value, cache)
        )
        if heads is None:
            return False
        heads.store(key, value, cache, slots)
        return True

    def _usable(self, kind: Hashable, why_not: Callable[[Heads], str]) -> Heads | None:
        if self._heads is not None and kind not in self._tried:
            self._tried.add(kind)
            try:
                reason = why_not(self._heads)
            except Exception as error:
                reason = why_failed(error)
            if reason:
                _log.warning("torch norms, rotates and stores heads in many kernels: %s", reason)
                self._heads = None
        return self._heads

    def _why_stored_wrong(
        self,
        store: Callable[[torch.Tensor, torch.Tensor | None, CacheView, torch.Tensor], None],
        key: torch.Tensor,
        value: torch.Tensor | None,
        cache: CacheView,
    ) -> str:
        """Why a kernel can't store such rows in such a cache; empty if it can."""
        sample = _Sample.of(cache, self._device)
        key = key.new_ones(_SAMPLE_ROWS, *key.shape[1:])
        value = None if value is None else value.new_ones(_SAMPLE_ROWS, *value.shape[1:])
        slots = torch.arange(_SAMPLE_ROWS, device=self._device) - 1
        store(key, value, sample.given, slots)
        _write(sample.expected, key, value, slots)
        return "" if sample.are_equal else "stores otherwise than torch"

    def _why_wrong(self, heads: Heads, rows: HeadRows, cos: torch.Tensor, cache: CacheView) -> str:
        """Why a kernel can't prepare such rows; empty if it can."""
        generator = torch.Generator().manual_seed(0)

        def random(like: torch.Tensor) -> torch.Tensor:
            return torch.randn(_SAMPLE_ROWS, *like.shape[1:], generator=generator).to(like.device, like.dtype)

        x, value, angles = random(rows.queries_and_keys), random(rows.value), random(cos)
        slots = torch.arange(_SAMPLE_ROWS, device=self._device) - 1
        together, alone = _Sample.of(cache, self._device), _Sample.of(cache, self._device)
        by_kernel, lone = x.clone(), x[-1:].clone()
        heads.prepare(rows.of(by_kernel, value), angles, angles, together.given, slots)
        heads.prepare(rows.of(lone, value[-1:]), angles[-1:], angles[-1:], alone.given, slots[-1:])
        queries = rows.num_queries
        if not torch.equal(by_kernel[-1:, :queries], lone[:, :queries]):
            return "a row has other bits alone than in a batch"
        parts = [x[:, :queries], x[:, queries:].clone()]
        for place, norm in enumerate(rows.norms or ()):
            parts[place] = rms_norm(parts[place], norm.weight, norm.eps, norm.plus_one)
        for part in parts:
            rotate(part, angles, angles, in_pairs=rows.in_pairs)
        _write(together.expected, parts[1], value, slots)
        if not is_near(by_kernel[:, :queries], parts[0]) or not together.are_near:
            return "the result differs from torch's"
        return ""


class _Sample(NamedTuple):
    """Two empty caches of a few blocks with one layer alone."""

    given: CacheView
    expected: CacheView

    @classmethod
    def of(cls, cache: CacheView, device: torch.device) -> _Sample:
        blocks = max(_SAMPLE_BLOCKS, -(-_SAMPLE_ROWS // cache.block_size))
        keys, values = (cache.num_kv_heads * cache.block_size * dim for dim in (cache.key_dim, cache.value_dim))
        alone = replace(cache, num_blocks=blocks, block_stride=keys + values, key_offset=0, value_offset=keys)
        size = blocks * alone.block_stride
        memories = (torch.zeros(size, dtype=cache.memory.dtype, device=device) for _ in range(2))
        return cls(*(replace(alone, memory=memory) for memory in memories))

    @property
    def are_equal(self) -> bool:
        return torch.equal(self.given.memory, self.expected.memory)

    @property
    def are_near(self) -> bool:
        return is_near(self.given.memory, self.expected.memory)


def _write(cache: CacheView, key: torch.Tensor, value: torch.Tensor | None, slots: torch.Tensor) -> None:
    """Store the rows that have a slot, by torch."""
    kept = slots >= 0
    own = None if value is None else value[kept]
    write_rows(cache, key[kept], own, slots[kept] // cache.block_size, slots[kept] % cache.block_size)
