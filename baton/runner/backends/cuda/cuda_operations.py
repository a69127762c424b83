"""The operations on a GPU: torch's products in calls of one number of rows, attention and norms in kernels of our own.

How attention is computed is chosen by kind of layer (attention_choice.py). The kernel for norms (triton_norm.py) is
tried in the same way. Without it torch computes them, whose bits depend on the number of rows, so that the model is
hardly bit-exact.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from baton.runner.backends.attention_call import AttentionCall
from baton.runner.backends.cuda.attention_choice import AttentionChoice, PagedAttention, triton_attention
from baton.runner.backends.cuda.graph_recording import GpuRecorder, Record
from baton.runner.backends.paged_cache import CacheView, keys_and_values
from baton.runner.backends.torch_operations import TorchOperations

_log = logging.getLogger(__name__)

ROWS_PER_CALL = (128, 256, 64)
"""The numbers of rows that the check at start tries: few enough for a decode step, enough to keep a GPU busy with a
prompt."""

_TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 2e-2}


Norm = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor, float, bool], tuple[torch.Tensor, torch.Tensor]]
"""Computes x + residual, if there is one, and its `Operations.rms_norm`, from x, residual, weight, eps and plus_one, in
one order of summation for every row. Implemented by `triton_norm.triton_norm`."""


def _triton_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, plus_one: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    from baton.runner.backends.cuda.triton_norm import triton_norm

    return triton_norm(x, residual, weight, eps, plus_one)


class CudaOperations(TorchOperations):
    """The operations on one GPU. Called from one thread."""

    packs_quantized = False  # quantised weights are dequantised when they are loaded: there is no kernel for them here

    def __init__(
        self,
        device: torch.device,
        attend: PagedAttention = triton_attention,
        record: Record | None = None,
        norm: Norm | None = None,
    ) -> None:
        """`norm`: None for the kernel's on a GPU, and torch's elsewhere."""
        super().__init__(num_threads=1)
        self.rows_per_call = ROWS_PER_CALL[0]
        self.rows_to_try = ROWS_PER_CALL
        self._device = device
        self._attention = AttentionChoice(device, attend, super().paged_attention)
        self.record = GpuRecorder() if record is None and device.type == "cuda" else record
        """Records decode steps as CUDA graphs; None: they are not recorded."""
        self._norm = _triton_norm if norm is None and device.type == "cuda" else norm
        self._tried_norms: set[tuple[torch.dtype, int]] = set()
        """The dtypes and widths with which the kernel for norms has been tried."""

    @property
    def device_name(self) -> str:
        return torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else self._device.type

    @property
    def ways(self) -> set[str]:
        """The ways that layers take, as far as they have been called."""
        return self._attention.ways

    @property
    def why_plain(self) -> str:
        """Why the latest kind of layer that takes the plain way does not take a faster one."""
        return self._attention.why_plain

    @property
    def attends_together(self) -> bool:
        """Whether there are layers in which rows attend together to the blocks that they share."""
        return self._attention.attends_together

    def store_kv(self, key: torch.Tensor, value: torch.Tensor | None, cache: CacheView, slots: torch.Tensor) -> None:
        keys, values = keys_and_values(cache)
        # Rows without a slot are written to the null block, which no query attends to. To leave them out, their number
        # would have to be read from the GPU.
        slots = slots.clamp(min=0)
        blocks, offsets = slots // cache.block_size, slots % cache.block_size
        keys[blocks, :, offsets] = key
        if value is not None:
            values[blocks, :, offsets] = value

    def numerics(self) -> str:
        ways = "+".join(sorted(self.ways))
        norms = "torch" if self._norm is None else "triton"
        return f"{self.product_numerics()}-{ways}-norms-{norms}"

    def product_numerics(self) -> str:
        return f"torch-4-{self.device_name.replace(' ', '-')}-rows-{self.rows_per_call}"

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, *, plus_one: bool = False) -> torch.Tensor:
        norm = self._norm_for(x)
        if norm is None:
            return super().rms_norm(x, weight, eps, plus_one=plus_one)
        return norm(x, None, weight, eps, plus_one)[1]

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, plus_one: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        norm = self._norm_for(x)
        if norm is None:
            return super().add_rms_norm(x, residual, weight, eps, plus_one=plus_one)
        return norm(x, residual, weight, eps, plus_one)

    def _norm_for(self, x: torch.Tensor) -> Norm | None:
        """The kernel for norms of this dtype and width; None if torch computes them."""
        tried = (x.dtype, x.shape[-1])
        if self._norm is not None and tried not in self._tried_norms:
            self._tried_norms.add(tried)
            if reason := self._why_no_norm(self._norm, *tried):
                _log.warning("torch computes norms, whose bits depend on the number of rows: %s", reason)
                self._norm = None
        return self._norm

    def _why_no_norm(self, norm: Norm, dtype: torch.dtype, width: int) -> str:
        """Why a kernel can't compute norms here; empty if it can."""
        generator = torch.Generator().manual_seed(0)
        x, residual = torch.randn(2, _SAMPLE_NORMS, width, generator=generator).to(self._device, dtype)
        weight, eps = torch.ones(width, dtype=dtype, device=self._device), 1e-6
        try:
            together = norm(x, residual, weight, eps, False)
            alone = norm(x[-1:], residual[-1:], weight, eps, False)
        except Exception as error:  # of Triton's compiler or of the driver
            return f"Triton's kernel fails with {type(error).__name__} ({(str(error).splitlines() or [''])[0]:.200})"
        expected = super().add_rms_norm(x, residual, weight, eps)
        tolerance = _TOLERANCE[dtype]
        for normed, wanted, lone in zip(together, expected, alone, strict=True):
            if not torch.allclose(normed.float(), wanted.float(), atol=tolerance, rtol=tolerance):
                return "the result of Triton's kernel differs from torch's"
            if not torch.equal(normed[-1:], lone):
                return "Triton's kernel gives a row other bits alone than in a batch"
        return ""

    def _float32_product(self, rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        # On a GPU torch returns the float32 sums of narrower operands, which need not be widened.
        if rows.device.type == "cuda":
            return torch.mm(rows, matrix.T, out_dtype=torch.float32)
        return super()._float32_product(rows, matrix)

    def paged_attention(self, call: AttentionCall) -> torch.Tensor:
        return self._attention.attend(call)


_SAMPLE_NORMS = 19
"""The rows of which a sample of norms is computed."""
