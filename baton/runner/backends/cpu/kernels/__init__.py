"""Products, norms and paged attention whose rows do not depend on their company, as a small C library.

torch's products give a row other bits in another batch; these sum each output over k in one fixed order, so a token's
computation is the same in every batch, chunk and thread count. See csrc/kernels.h for the rule and the layouts.
"""

from __future__ import annotations

from baton.runner.backends.cpu.kernel_file import KernelsUnavailable
from baton.runner.backends.cpu.kernels.attention import paged_attention, store_kv
from baton.runner.backends.cpu.kernels.cache import CacheView
from baton.runner.backends.cpu.kernels.errors import KernelArgumentError
from baton.runner.backends.cpu.kernels.info import KernelInfo, available
from baton.runner.backends.cpu.kernels.library import use_isa
from baton.runner.backends.cpu.kernels.product import PackedWeight, gated_linear, linear, pack, pack_gated, take_rows
from baton.runner.backends.cpu.kernels.program import Program
from baton.runner.backends.cpu.kernels.rows import add_rms_norm, rms_norm, rotate

__all__ = [
    "CacheView",
    "KernelArgumentError",
    "KernelInfo",
    "KernelsUnavailable",
    "PackedWeight",
    "Program",
    "add_rms_norm",
    "available",
    "gated_linear",
    "linear",
    "pack",
    "pack_gated",
    "paged_attention",
    "rms_norm",
    "rotate",
    "store_kv",
    "take_rows",
    "use_isa",
]
