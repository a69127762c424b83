"""The compiled kernel library: opened once per process, with the fastest instruction set that the processor has."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from baton.runner.backends.cpu.kernel_file import KernelsUnavailable, open_kernels
from baton.runner.backends.cpu.kernels.call_structs import CacheFormat, check_layout, layout_of
from baton.runner.backends.cpu.kernels.errors import KernelArgumentError, RankLost

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
CACHE_FORMATS = {torch.int8: CacheFormat.INT8, torch.float8_e4m3fn: CacheFormat.E4M3}
"""How keys and values of any dtype are stored in a cache of this dtype; in others they are stored as they are."""

_STATUS = {
    2: ("query_start", "must begin at 0, never decrease, and end at the number of query rows or before"),
    3: ("seq_lens", "must be at least the request's query rows and at most what its block table holds"),
    4: ("block_tables", "names a block outside the cache"),
    5: ("slots", "names a slot outside the cache"),
    6: ("index", "names a row outside the weight"),
    10: ("block_tables", "names no block with the state that a sequence goes on from"),
}

_RANK_LOST = 7
_RANKS_DIFFER = 9
WAITING = 8
"""The status of a barrier to which not all ranks have come yet."""


@dataclass(slots=True)
class Library:
    """The opened library and the instruction set in use. Its functions are fields, since each look-up costs time."""

    functions: ctypes.CDLL
    isas: tuple[str, ...]
    """Names of the instruction sets that this processor supports."""
    isa: int
    """The library's number of the instruction set in use."""
    threads: bool
    """Whether work is spread over torch's own threads; otherwise the calling thread does all of it."""
    linear: Callable[..., int]
    linear_of_heads: Callable[..., int]
    quantized_linear: Callable[..., int]
    attention: Callable[..., int]
    select_keys: Callable[..., int]
    store_kv: Callable[..., int]
    convolve: Callable[..., int]
    recur: Callable[..., int]
    gate: Callable[..., int]
    multiply: Callable[..., int]
    route: Callable[..., int]
    sum_experts: Callable[..., int]
    clamped_gate: Callable[..., int]
    mixture: Callable[..., int]
    activate: Callable[..., int]
    streams: Callable[..., int]
    resize: Callable[..., int]
    sparse_gate: Callable[..., int]
    norm: Callable[..., int]
    take_rows: Callable[..., int]
    rotate: Callable[..., int]
    run_program: Callable[..., int]


def check_status(status: int) -> None:
    """Raise what a status of the library stands for: KernelArgumentError, RankLost or MemoryError; nothing for 0."""
    if status == 0:
        return
    if status == _RANK_LOST:
        raise RankLost("another rank of this model is lost")
    if status == _RANKS_DIFFER:
        raise RankLost("the ranks of this model compute different operations, which is a fault of Baton")
    if status in _STATUS:
        raise KernelArgumentError(*_STATUS[status])
    raise MemoryError("the kernels could not allocate scratch memory")


@functools.cache
def library() -> Library:
    """Open the library, once per process. Raises KernelsUnavailable, which says why it can't be used and what to do."""
    functions = open_kernels()
    check_layout(layout_of(functions))
    pointer, size, integer = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    functions.baton_isa_name.restype = ctypes.c_char_p
    functions.baton_set_parallel.argtypes = [pointer]
    functions.baton_set_parallel.restype = None
    functions.baton_packed_size.argtypes = [integer, size, size]
    functions.baton_packed_size.restype = size
    functions.baton_padded_k.argtypes = [integer, size]
    functions.baton_padded_k.restype = size
    functions.baton_pack.argtypes = [integer, integer, pointer, pointer, size, size, size, size]
    functions.baton_pack.restype = None
    functions.baton_linear.argtypes = [integer, integer] + [pointer] * 4 + [size] * 6 + [integer] * 3 + [pointer]
    functions.baton_linear_of_heads.argtypes = [integer, integer] + [pointer] * 3 + [size] * 9 + [integer]
    functions.baton_quantized_linear.argtypes = (
        [integer, integer] + [pointer] * 6 + [size] * 5 + [integer] * 3 + [pointer]
    )
    functions.baton_quantized_size.argtypes = [pointer, size, size]
    functions.baton_quantized_size.restype = size
    functions.baton_quantized_row_bytes.argtypes = [pointer, size]
    functions.baton_quantized_row_bytes.restype = size
    functions.baton_pack_quantized.argtypes = [pointer] * 3 + [size] * 4
    functions.baton_pack_quantized.restype = None
    functions.baton_dequantize_rows.argtypes = [integer] + [pointer] * 4 + [size] * 3 + [integer]
    functions.baton_float8_size.argtypes = [size] * 3
    functions.baton_float8_size.restype = size
    functions.baton_pack_float8.argtypes = [integer, size] + [pointer] * 3 + [size] * 5
    functions.baton_pack_float8.restype = None
    functions.baton_float8_rows.argtypes = [integer, integer, size] + [pointer] * 3 + [size] * 4 + [integer]
    functions.baton_attention.argtypes = [integer, integer, pointer, integer]
    functions.baton_store_kv.argtypes = [pointer]
    of_calls = ("select_keys", "convolve", "recur", "gate", "norm", "multiply", "activate")
    of_rows = ("route", "sum_experts", "clamped_gate", "mixture", "streams", "resize", "sparse_gate")
    for name in (*of_calls, *of_rows):
        getattr(functions, f"baton_{name}").argtypes = [integer, integer, pointer, integer]
    functions.baton_take_rows.argtypes = [integer, integer, pointer, pointer, pointer, size, size, size, integer]
    functions.baton_rotate.argtypes = [integer, integer] + [pointer] * 3 + [size] * 6 + [integer] * 3
    functions.baton_barrier_bytes.restype = size
    functions.baton_barrier_arrive.argtypes = [pointer, ctypes.c_uint32, ctypes.c_uint32, pointer]
    functions.baton_barrier_wait.argtypes = [pointer, ctypes.c_uint32]
    functions.baton_barrier_abort.argtypes = [pointer]
    functions.baton_barrier_abort.restype = None
    functions.baton_barrier_sleep_at_once.restype = None
    functions.baton_run_program.argtypes = [integer, pointer, size, pointer, integer, pointer]
    fork_join = _torch_fork_join()
    if fork_join is not None:
        functions.baton_set_parallel(fork_join)
    supported = [i for i in range(functions.baton_num_isas()) if functions.baton_isa_supported(i)]
    names = tuple(_isa_name(functions, i) for i in supported)
    return Library(
        functions,
        names,
        isa=functions.baton_default_isa(),
        threads=fork_join is not None,
        linear=functions.baton_linear,
        linear_of_heads=functions.baton_linear_of_heads,
        quantized_linear=functions.baton_quantized_linear,
        attention=functions.baton_attention,
        select_keys=functions.baton_select_keys,
        store_kv=functions.baton_store_kv,
        convolve=functions.baton_convolve,
        recur=functions.baton_recur,
        gate=functions.baton_gate,
        multiply=functions.baton_multiply,
        route=functions.baton_route,
        sum_experts=functions.baton_sum_experts,
        clamped_gate=functions.baton_clamped_gate,
        mixture=functions.baton_mixture,
        activate=functions.baton_activate,
        streams=functions.baton_streams,
        resize=functions.baton_resize,
        sparse_gate=functions.baton_sparse_gate,
        norm=functions.baton_norm,
        take_rows=functions.baton_take_rows,
        rotate=functions.baton_rotate,
        run_program=functions.baton_run_program,
    )


def isa_name() -> str:
    """The name of the instruction set in use."""
    lib = library()
    return _isa_name(lib.functions, lib.isa)


def use_isa(name: str | None) -> None:
    """Compute with this instruction set from now on; None: with the fastest one.

    Raises KernelsUnavailable for an instruction set that this processor or this build lacks.
    """
    lib = library()
    if name is None:
        lib.isa = lib.functions.baton_default_isa()
    elif name in lib.isas:
        lib.isa = next(i for i in range(lib.functions.baton_num_isas()) if _isa_name(lib.functions, i) == name)
    else:
        raise KernelsUnavailable(f"no kernels for {name!r} on this processor: it has {', '.join(lib.isas)}")


def _isa_name(functions: ctypes.CDLL, isa: int) -> str:
    name: bytes = functions.baton_isa_name(isa)
    return name.decode()


def _torch_fork_join() -> int | None:
    """The address of GOMP_parallel in the OpenMP runtime that torch has loaded; None when torch uses another runtime.

    A second runtime would have worker threads of its own, and both sets of threads would spin on the same cores.
    """
    folder = Path(torch.__file__).parent
    bundled = [*folder.glob("lib/libgomp*"), *folder.parent.glob("torch.libs/libgomp*")]
    for name in ["libgomp.so.1", *map(str, bundled)]:
        try:
            runtime = ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
            return ctypes.cast(runtime.GOMP_parallel, ctypes.c_void_p).value
        except (OSError, AttributeError):
            continue
    return None
