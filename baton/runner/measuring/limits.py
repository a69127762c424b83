"""Measures this machine's limits: how fast it reads memory and multiplies matrices, bit-exact or not.

The runner's speed is compared with these limits, so each is the best of several implementations.
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

from baton.runner.backends.cpu.kernels.product import Activation
from baton.runner.backends.operations import Operations
from baton.runner.backends.torch_operations import activate
from baton.runner.model.weights import DTYPES
from baton.runner.torch_threads import torch_threads

_READ_BYTES = 1 << 30
_CACHES = 2
"""How many times larger than the last-level cache a read is, so that memory and not the cache is measured."""


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
class Limit:
    """The best of several implementations, found once, and measured again beside what is compared with it.

    On a machine that is shared with other users, a limit measured some minutes ago does not hold any more.
    """

    way: str
    """The implementation's name."""
    amount: float
    """Bytes or operations of one call."""
    work: Callable[[], Any]

    def rate(self, repeats: int = 2) -> float:
        """Bytes or operations a second, now."""
        return self.amount / min(seconds_of(self.work, repeats))


def bytes_beyond(cache_bytes: int) -> int:
    """The bytes of a read of memory that no cache holds (`cache_bytes`: the last level)."""
    return max(_READ_BYTES, _CACHES * cache_bytes)


@contextmanager
def read_limit(num_threads: int, num_bytes: int, repeats: int = 5) -> Iterator[Limit]:
    """Reading so many bytes of memory by `num_threads` threads."""
    size = num_bytes - num_bytes % (num_threads * mmap.PAGESIZE)
    # A private mapping, since shared memory gets no huge pages, without which it reads a fifth slower.
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, size, flags=private)
    memory.madvise(mmap.MADV_HUGEPAGE)
    floats = torch.frombuffer(memory, dtype=torch.float32)
    floats.fill_(1.0)
    with ThreadPoolExecutor(num_threads) as pool:
        ways = [Limit(way, size, _with_threads(num_threads, read)) for way, read in _reads(floats, num_threads, pool)]
        yield max(ways, key=lambda limit: limit.rate(repeats))


def _reads(floats: torch.Tensor, num_threads: int, pool: ThreadPoolExecutor) -> Iterator[tuple[str, Callable[[], Any]]]:
    memchr = ctypes.CDLL(None).memchr
    memchr.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
    memchr.restype = ctypes.c_void_p
    share = floats.nbytes // num_threads
    starts = [floats.data_ptr() + index * share for index in range(num_threads)]
    # 0x77 is no byte of 1.0, so the search reads to the end; ctypes releases the interpreter lock meanwhile.
    yield "memchr", lambda: list(pool.map(lambda start: memchr(start, 0x77, share), starts))
    matrix = floats[: floats.numel() // 1024 * 1024].view(-1, 1024)
    vector = torch.ones(1024)
    yield "matrix times vector", lambda: torch.mv(matrix, vector)
    yield "sum", floats.sum
    yield "integer sum", floats.view(torch.int64).sum


def product_limit(
    shapes: Sequence[ProductShape], dtype: str, num_threads: int, operations: Operations, repeats: int = 5
) -> Limit:
    """The best plain product among `shapes`, torch's or ours."""
    # A generator, so that only the matrices of the best limit so far are kept in memory.
    limits = (limit for shape in shapes for limit in _products(shape, dtype, num_threads, operations))
    return max(limits, key=lambda limit: limit.rate(repeats))


def _products(shape: ProductShape, dtype: str, num_threads: int, operations: Operations) -> Iterator[Limit]:
    x = torch.randn(shape.m, shape.k).to(DTYPES[dtype])
    weight = torch.randn(shape.n, shape.k).to(DTYPES[dtype])
    packed = operations.pack(weight)
    name = f"{shape.m} x {shape.k} x {shape.n}"
    torchs = _with_threads(num_threads, lambda: functional.linear(x, weight))
    yield Limit(f"torch, {name}", shape.operations, torchs)
    yield Limit(f"ours, {name}", shape.operations, lambda: operations.linear(x, packed))


def _with_threads(num_threads: int, work: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> Any:
        with torch_threads(num_threads), torch.inference_mode():
            return work()

    return run


class UnpaddedOperations:
    """Torch's own products without padding, which are not bit-exact; all other operations are those of `inner`.

    No row has an adapter.
    """

    packs_quantized = False

    def __init__(self, inner: Operations) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def numerics(self) -> str:
        return f"unpadded-torch/{self._inner.numerics()}"

    def program(self, dtype: torch.dtype) -> None:
        """None: these operations have no programs, only single calls."""

    def pack(self, *weights: torch.Tensor) -> torch.Tensor:
        return torch.cat(weights)

    def pack_own(self, *weights: torch.Tensor) -> torch.Tensor:
        return self.pack(*weights)

    def pack_gated(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return torch.cat([gate, up])

    def pack_mixture(self, *_: Any) -> None:
        """None: experts are multiplied one by one."""

    def pack_choice(self, *_: Any) -> None:
        """None, as `pack_mixture`."""

    def held_rows(
        self, weight: torch.Tensor, index: torch.Tensor, dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.arange(len(index)), self.take_rows(weight, index, dtype)

    def take_rows(self, weight: torch.Tensor, index: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        return weight[index]

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        out_dtype: torch.dtype | None = None,
        adapters: None = None,
    ) -> torch.Tensor:
        return functional.linear(x, weight, bias).to(x.dtype if out_dtype is None else out_dtype)

    def gated_linear(
        self, x: torch.Tensor, weight: torch.Tensor, *, activation: Activation, adapters: None = None
    ) -> torch.Tensor:
        gate, up = functional.linear(x, weight).chunk(2, dim=-1)
        return activate(gate, activation) * up


def seconds_of(work: Callable[[], Any], repeats: int) -> list[float]:
    """The seconds of each of `repeats` calls, after one call that is not measured."""
    work()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return times
