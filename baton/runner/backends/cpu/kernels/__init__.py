"""Row-invariant products, norms, paged attention, and convolutions and recurrences with states, as a small C library.

torch's products give a row different bits in different batches. These kernels sum each output over k in one fixed
order, so a token is computed in the same way in every batch and chunk and with any number of threads. csrc/kernels.h
has the rule and the memory layouts.
"""

from __future__ import annotations

from baton.runner.backends.cpu.kernel_file import KernelsUnavailable
from baton.runner.backends.cpu.kernels.attention import paged_attention, select_keys, store_kv
from baton.runner.backends.cpu.kernels.errors import KernelArgumentError
from baton.runner.backends.cpu.kernels.float8 import PackedFloat8Weight
from baton.runner.backends.cpu.kernels.info import KernelInfo, available
from baton.runner.backends.cpu.kernels.library import use_isa
from baton.runner.backends.cpu.kernels.mixture import (
    PackedChoice,
    PackedMixture,
    clamped_gate,
    mix_experts,
    multiply_chosen,
    route,
    sum_experts,
)
from baton.runner.backends.cpu.kernels.product import PackedHeads, PackedWeight, linear_of_heads, pack_heads
from baton.runner.backends.cpu.kernels.programs.program import Program
from baton.runner.backends.cpu.kernels.quantized import PackedQuantizedWeight
from baton.runner.backends.cpu.kernels.rows import (
    activate,
    add_rms_norm,
    correct_streams,
    gate,
    gated_rms_norm,
    layer_norm,
    mean_of_streams,
    mix_streams,
    multiply,
    resize,
    rms_norm,
    rotate,
    row_means,
    sparse_gate,
)
from baton.runner.backends.cpu.kernels.states import convolve, recur
from baton.runner.backends.cpu.kernels.weights import (
    Packed,
    StackedWeight,
    adapt,
    gated_linear,
    linear,
    pack,
    pack_gated,
    take_rows,
)
from baton.runner.backends.paged_cache import CacheView

__all__ = [
    "CacheView",
    "KernelArgumentError",
    "KernelInfo",
    "KernelsUnavailable",
    "Packed",
    "PackedChoice",
    "PackedFloat8Weight",
    "PackedHeads",
    "PackedMixture",
    "PackedQuantizedWeight",
    "PackedWeight",
    "Program",
    "StackedWeight",
    "activate",
    "adapt",
    "add_rms_norm",
    "available",
    "clamped_gate",
    "convolve",
    "correct_streams",
    "gate",
    "gated_linear",
    "gated_rms_norm",
    "layer_norm",
    "linear",
    "linear_of_heads",
    "mean_of_streams",
    "mix_experts",
    "mix_streams",
    "multiply",
    "multiply_chosen",
    "pack",
    "pack_gated",
    "pack_heads",
    "paged_attention",
    "recur",
    "resize",
    "rms_norm",
    "rotate",
    "route",
    "row_means",
    "select_keys",
    "sparse_gate",
    "store_kv",
    "sum_experts",
    "take_rows",
    "use_isa",
]
