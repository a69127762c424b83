"""Products and paged attention whose rows do not depend on their company, as a small C library.

torch's products give a row other bits in another batch; these sum each output over k in one fixed order, so a token's
computation is the same in every batch, chunk and thread count. See csrc/kernels.h for the rule and the layouts.
"""

from __future__ import annotations

from baton.engine.runner.kernels.attention import paged_attention, store_kv
from baton.engine.runner.kernels.errors import KernelArgumentError, KernelsUnavailable
from baton.engine.runner.kernels.info import KernelInfo, available
from baton.engine.runner.kernels.library import use_isa
from baton.engine.runner.kernels.product import PackedWeight, linear, pack

__all__ = [
    "KernelArgumentError",
    "KernelInfo",
    "KernelsUnavailable",
    "PackedWeight",
    "available",
    "linear",
    "pack",
    "paged_attention",
    "store_kv",
    "use_isa",
]
