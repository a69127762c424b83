"""What this machine could do at best, measured: reading memory and multiplying matrices, the rule or no rule.

Every figure here is a limit that the runner is held against, so each is the best of several ways to do the same.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from baton.engine.runner.operations import Activation, Operations
from baton.engine.runner.weights import DTYPES

_READ_BYTES = 1 << 30
_CACHES = 2
"""A read must be so many times larger than the last-level cache, or it is partly the cache that is measured."""


@dataclass(frozen=True, slots=True)
class ProductShape:
    """x [m, k] times a weight [n, k] transposed."""

    m: int
    k: int
    n: int

    @property
    def operations(self) -> int:
        """Multiplications and additions."""
        return 2 * self.m * self.k * self.n


@dataclass(frozen=True, slots=True)
class Best:
    """The best of several ways; `rate` per second, in bytes or operations."""

    rate: float
    way: str


def read_rate(num_threads: int, cache_bytes: int, repeats: int = 5) -> Best:
    """Bytes a second that `num_threads` threads read, of memory that no cache holds (`cache_bytes`: the last level)."""
    size = max(_READ_BYTES, _CACHES * cache_bytes)
    size -= size % (num_threads * mmap.PAGESIZE)
    best = Best(0.0, "")
    # Private: shared memory gets no huge pages, and reads a fifth slower without them.
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    with (
        mmap.mmap(-1, size, flags=private) as memory,
        torch_threads(num_threads),
        ThreadPoolExecutor(num_threads) as pool,
    ):
        memory.madvise(mmap.MADV_HUGEPAGE)
        floats = torch.frombuffer(memory, dtype=torch.float32)
        floats.fill_(1.0)
        for way, read in _reads(floats, num_threads, pool):
            rate = size / min(seconds_of(read, repeats))
            best = max(best, Best(rate, way), key=lambda one: one.rate)
        del floats, read
    return best


def _reads(floats: torch.Tensor, num_threads: int, pool: ThreadPoolExecutor) -> Iterator[tuple[str, Callable[[], Any]]]:
    memchr = ctypes.CDLL(None).memchr
    memchr.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
    memchr.restype = ctypes.c_void_p
    share = floats.nbytes // num_threads
    starts = [floats.data_ptr() + index * share for index in range(num_threads)]
    # 0x77 is no byte of 1.0, so the search reads to the end; ctypes lets go of the interpreter meanwhile.
    yield "memchr", lambda: list(pool.map(lambda start: memchr(start, 0x77, share), starts))
    matrix = floats[: floats.numel() // 1024 * 1024].view(-1, 1024)
    vector = torch.ones(1024)
    yield "matrix times vector", lambda: torch.mv(matrix, vector)
    yield "sum", floats.sum
    yield "integer sum", floats.view(torch.int64).sum


def product_rate(
    shapes: Sequence[ProductShape], dtype: str, num_threads: int, operations: Operations, repeats: int = 5
) -> Best:
    """Multiplications and additions a second of the best plain product among `shapes`, torch's or ours."""
    best = Best(0.0, "")
    for shape in shapes:
        x = torch.randn(shape.m, shape.k).to(DTYPES[dtype])
        weight = torch.randn(shape.n, shape.k).to(DTYPES[dtype])
        packed = operations.pack(weight)
        for library, times in _product_times(x, weight, packed, num_threads, operations, repeats):
            way = f"{library}, {shape.m} x {shape.k} x {shape.n}"
            best = max(best, Best(shape.operations / min(times), way), key=lambda one: one.rate)
    return best


def _product_times(
    x: torch.Tensor, weight: torch.Tensor, packed: Any, num_threads: int, operations: Operations, repeats: int
) -> Iterator[tuple[str, list[float]]]:
    with torch.inference_mode():
        with torch_threads(num_threads):
            yield "torch", seconds_of(lambda: functional.linear(x, weight), repeats)
        yield "ours", seconds_of(lambda: operations.linear(x, packed), repeats)


class UnpaddedOperations:
    """Torch's own products on the rows that there are; everything else as `inner` does it. Not bit-exact."""

    def __init__(self, inner: Operations) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def numerics(self) -> str:
        return f"unpadded-torch/{self._inner.numerics()}"

    def pack(self, *weights: torch.Tensor) -> torch.Tensor:
        return torch.cat(weights)

    def pack_gated(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return torch.cat([gate, up])

    def take_rows(self, weight: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return weight[index]

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return functional.linear(x, weight, bias)

    def gated_linear(self, x: torch.Tensor, weight: torch.Tensor, *, activation: Activation) -> torch.Tensor:
        gate, up = functional.linear(x, weight).chunk(2, dim=-1)
        if activation == "silu":
            return functional.silu(gate) * up
        return functional.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up


@contextmanager
def torch_threads(num_threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def seconds_of(work: Callable[[], Any], repeats: int) -> list[float]:
    """Seconds of each of so many calls, after one that warms up."""
    work()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return times
