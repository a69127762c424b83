"""The operations of a program as they are recorded: products, copies, and what all kinds of operations share."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from baton.runner.backends.cpu.kernels.barrier import GrowingMemory
from baton.runner.backends.cpu.kernels.buffers import Buffers, Rows
from baton.runner.backends.cpu.kernels.call_structs import (
    Call,
    CopyCall,
    HeadsCall,
    LinearCall,
    Operation,
    OperationKind,
    Place,
    QuantizeCall,
    TakeRowsCall,
)
from baton.runner.backends.cpu.kernels.errors import KernelArgumentError
from baton.runner.backends.cpu.kernels.float8 import PackedFloat8Weight
from baton.runner.backends.cpu.kernels.library import DTYPES, library
from baton.runner.backends.cpu.kernels.product import ACTIVATIONS, NOT_GATED, Activation, PackedHeads, PackedWeight
from baton.runner.backends.cpu.kernels.quantized import PackedQuantizedWeight
from baton.runner.backends.cpu.kernels.weights import Packed, PackedPart, StackedWeight, columns_of

_OF_OTHER_DTYPES = (
    *(OperationKind.ROTATE, OperationKind.ROUTE, OperationKind.MIXTURE),
    *(OperationKind.ATTENTION, OperationKind.SELECT),
)
"""Operations whose operands besides x and out may have other dtypes."""
_TO_OTHER_DTYPES = (
    *(OperationKind.LINEAR, OperationKind.GATE, OperationKind.ROUTE, OperationKind.TAKE_ROWS),
    OperationKind.SELECT,
)
"""Operations whose x and out may have different dtypes."""


class Recording:
    """Operations in the order in which they were recorded.

    Recording methods take the name of a scratch buffer, or an argument's rows, `into` which the result is written, and
    return the rows of the result. They raise KernelArgumentError for arguments that the kernels can't take.
    """

    def __init__(self, dtype: torch.dtype, shared_memory: GrowingMemory | None = None) -> None:
        """`shared_memory`: for rows that this process shares with others."""
        if dtype not in DTYPES:
            raise KernelArgumentError("dtype", f"must be float32 or bfloat16, is {dtype}")
        self._dtype = dtype
        self._isa = library().isa
        self._recorded: list[Operation] = []
        self._kept: list[object] = []
        self._buffers = Buffers(dtype, shared_memory)
        self._num_groups = 0
        self._products: list[tuple[int, int]] = []
        """The products that adapters may change: the number of each in the model, and the part of its weight."""

    def argument(self, width: int, *, sampled: bool = False, dtype: torch.dtype | None = None) -> Rows:
        """Declare a matrix that callers of `run` pass: [T, width], or [S, width] with `sampled`, contiguous.

        `dtype`: the program's (None), or float32 for the result of `linear`.
        """
        if dtype not in (None, self._dtype, torch.float32):
            raise KernelArgumentError("dtype", f"must be {self._dtype} or float32, is {dtype}")
        return self._buffers.argument(width, sampled, self._dtype if dtype is None else dtype)

    def scratch(self, name: str, width: int, *, sampled: bool = False) -> Rows:
        """Rows of the scratch buffer with this name, which operations write in parts."""
        return self._buffers.scratch(name, width, sampled)

    def linear(
        self, x: Rows, w: Packed, bias: torch.Tensor | None, *, into: str | Rows, product: int | None = None
    ) -> Rows:
        """Record the product of x and the weight transposed, plus bias; float32 rows `into` keep the sums unrounded.

        Of float32 rows x the result is float32, too, and adapters don't change it.
        `product`: its number in the tables of adapters that steps have; None: adapters don't change it.
        """
        self._require_bias(bias, w.n, x.dtype)
        out = self._out(into, w.n, x.sampled, x.dtype)
        self._multiply_all(x, w, bias, out, product)
        return out

    def gated_linear(
        self, x: Rows, w: Packed, activation: Activation, *, into: str | Rows, product: int | None = None
    ) -> Rows:
        """Record the gated product activation(x gateᵀ) * (x upᵀ)."""
        out = self._out(into, w.n, x.sampled)
        self._multiply_gated(x, w, activation, out, product)
        return out

    def linear_of_heads(self, x: Rows, weights: PackedHeads, out: Rows) -> None:
        """Record the product of the first columns of each head of x with its weight, for the first columns of out's."""
        w, heads = weights.first, len(weights)
        of_x, of_out = x.width // heads, out.width // heads
        if x.width % heads or out.width % heads or w.k > of_x or w.n > of_out or w.padded_k != w.k:
            raise KernelArgumentError("x", f"and out have heads of {of_x} and {of_out}, the weight [{w.n}, {w.k}]")
        if w.isa != self._isa or w.dtype != self._dtype:
            raise KernelArgumentError("w", f"must be packed for this instruction set from {self._dtype}")
        size, dtype = self._dtype.itemsize, DTYPES[self._dtype]
        product = LinearCall(packed=w.address, n=w.n, k=w.k, x_stride=x.stride, out_stride=out.stride, out_dtype=dtype)
        call = HeadsCall(
            linear=product,
            heads=heads,
            x_apart=of_x * size,
            packed_apart=weights.apart * size,
            out_apart=of_out * size,
        )
        self._kept.append(weights)
        self._record(OperationKind.HEADS, x, Call(heads=call), out=out)

    def copy_columns(self, x: Rows, out: Rows, heads: int = 1, *, first: int = 0, width: int, to: int = 0) -> None:
        """Record the copy of `width` columns, from `first` on in each head of x, to those from `to` on of out's.

        Both may be float32.
        """
        of_x, of_out = x.width // heads, out.width // heads
        if x.width % heads or out.width % heads or first + width > of_x or to + width > of_out:
            raise KernelArgumentError("width", f"of {width} columns is not in heads of {of_x} and {of_out}")
        size = x.dtype.itemsize
        call = CopyCall(
            pieces=heads,
            piece_bytes=width * size,
            x_stride=x.stride * size,
            x_apart=of_x * size,
            out_stride=out.stride * size,
            out_apart=of_out * size,
        )
        out = out.columns(to, out.width)
        self._record(OperationKind.COPY, x.columns(first, x.width), Call(copy=call), out=out, dtype=x.dtype)

    def take_sampled(self, x: Rows, *, into: str | Rows) -> Rows:
        """Record the copy of those rows of x that sample."""
        out = self._out(into, x.width, True, x.dtype)
        size = x.dtype.itemsize
        call = TakeRowsCall(row_bytes=x.width * size, x_stride=x.stride * size)
        if x.width:  # rows of no bytes would be taken for a selection
            self._record(OperationKind.TAKE_ROWS, x, Call(take=call), out=out)
        return out

    def _require_bias(self, bias: torch.Tensor | None, n: int, dtype: torch.dtype) -> None:
        if bias is not None and (bias.shape != (n,) or bias.dtype != dtype or not bias.is_contiguous()):
            raise KernelArgumentError("bias", f"must be [{n}] {dtype}, contiguous")

    def _multiply_all(
        self, x: Rows, w: Packed, bias: torch.Tensor | None, out: Rows, product: int | None = None
    ) -> None:
        """Record the product with each part of a weight, plus its columns of the bias."""
        if w.gated:
            raise KernelArgumentError("w", "is gated: use gated_linear")
        for index, (first, part) in enumerate(columns_of(w.parts if isinstance(w, StackedWeight) else (w,))):
            own_bias = None if bias is None else bias[first : first + part.n]
            adapted = None if product is None else (product, index)
            self._multiply(x, part, own_bias, NOT_GATED, out.columns(first, first + part.n), adapted)

    def _multiply_gated(
        self, x: Rows, w: Packed, activation: Activation, out: Rows, product: int | None = None
    ) -> None:
        if not w.gated or isinstance(w, StackedWeight):
            raise KernelArgumentError("w", "is not gated: use pack_gated")
        self._multiply(x, w, None, ACTIVATIONS[activation], out, None if product is None else (product, 0))

    def _multiply(
        self,
        x: Rows,
        w: PackedPart,
        bias: torch.Tensor | None,
        activation: int,
        out: Rows,
        adapted: tuple[int, int] | None,
    ) -> None:
        """`adapted`: if adapters may change it, the number of the product in the model and of the weight's part."""
        given = x
        if x.width != w.k:
            raise KernelArgumentError("x", f"has {x.width} columns, the weight {w.k}")
        call = LinearCall(
            packed=w.address,
            bias=None if bias is None else bias.data_ptr(),
            n=w.n,
            k=w.k,
            x_stride=x.stride,
            out_stride=out.stride,
            activation=activation,
            out_dtype=DTYPES[out.dtype],
        )
        if isinstance(w, PackedQuantizedWeight):
            x = self._quantize(x, w)
            call.format, call.x_stride = ctypes.addressof(w.format), w.row_bytes
        elif w.isa != self._isa or (isinstance(w, PackedWeight) and w.dtype != x.dtype):
            raise KernelArgumentError("w", f"must be packed for this instruction set from {x.dtype}")
        else:
            if w.padded_k != w.k:
                x = self._padded(x, w.padded_k)
                call.k, call.x_stride = w.padded_k, x.stride
            if isinstance(w, PackedFloat8Weight):
                call.scale_group = w.group
        self._kept += [w, bias]
        if adapted is None:
            self._record(OperationKind.LINEAR, x, Call(linear=call), out=out, dtype=given.dtype)
            return
        self._record(
            OperationKind.LINEAR, x, Call(linear=call), out=out, operands=(given,), product=len(self._products)
        )
        self._products.append(adapted)

    def _quantize(self, x: Rows, w: PackedQuantizedWeight) -> Rows:
        """Record that x is quantised for a weight, and return the rows of the scratch buffer with the result."""
        out = self._buffers.scratch("quantized x", -(-w.row_bytes // self._dtype.itemsize), x.sampled)
        call = QuantizeCall(format=ctypes.addressof(w.format), k=w.k, x_stride=x.stride)
        self._record(OperationKind.QUANTIZE, x, Call(quantize=call), out=out)
        return out

    def _padded(self, x: Rows, width: int) -> Rows:
        """Record that x is copied, with zeros behind it, and return the rows of the scratch buffer of that width."""
        out, size = self._buffers.scratch("padded x", width, x.sampled, x.dtype), x.dtype.itemsize
        call = CopyCall(
            pieces=1,
            piece_bytes=x.width * size,
            zero_bytes=(width - x.width) * size,
            x_stride=x.stride * size,
            out_stride=width * size,
        )
        self._record(OperationKind.COPY, x, Call(copy=call), out=out, dtype=x.dtype)
        return out

    def _require_as_many(self, x: Rows, other: Rows, name: str) -> None:
        if other.sampled != x.sampled:
            raise KernelArgumentError(name, "must be as many rows as x has")

    def _record(
        self,
        kind: OperationKind,
        x: Rows | None,
        call: Call,
        *,
        out: Rows | None = None,
        operands: Sequence[Rows | None] = (),
        group: int = 0,
        product: int = -1,
        room: Sequence[Rows | None] = (),
        dtype: torch.dtype | None = None,
    ) -> None:
        """`operands`: the second to the fifth, as far as there are any (csrc/program.c). `room`: of a mixture.

        `dtype`: of what is computed, which may be float32; None: the program's, and for a route that of x.
        """
        of = x if out is None else out
        dtype = (x.dtype if x is not None and kind is OperationKind.ROUTE else self._dtype) if dtype is None else dtype
        # The operands that these operations have checked may have other dtypes.
        alike = {OperationKind.RECUR: 2} | dict.fromkeys(_OF_OTHER_DTYPES, 0)
        same = [*operands[: alike.get(kind, len(operands))]]
        if kind not in _TO_OTHER_DTYPES:
            same += [x, out]
        if any(rows is not None and rows.dtype != dtype for rows in same):
            raise KernelArgumentError("into", f"and all operands must be {dtype}")
        places = [self._place(rows) for rows in (x, out, *operands, *[None] * (4 - len(operands)))]
        second = operands[0] if operands else None
        stride = 0 if second is None else second.stride
        of_room = (Place * 5)(*(self._place(rows) for rows in (*room, *[None] * (5 - len(room)))))
        which = of is not None and of.sampled
        self._recorded.append(Operation(kind, which, group, DTYPES[dtype], product, stride, *places, of_room, call))
        self._num_groups = max(self._num_groups, group + 1)

    def _place(self, rows: Rows | None) -> Place:
        return Place(-1, 0) if rows is None else Place(rows.buffer, rows.first * rows.dtype.itemsize)

    def _out(self, into: str | Rows, width: int, sampled: bool, dtype: torch.dtype | None = None) -> Rows:
        """The rows for a result: of the scratch buffer with the name `into`, or of an argument.

        `dtype`: of a scratch buffer; None: the program's.
        """
        out = self._buffers.scratch(into, width, sampled, dtype) if isinstance(into, str) else into
        if (out.width, out.stride, out.sampled) != (width, width, sampled):
            raise KernelArgumentError("into", f"must be whole rows of {width}")
        return out
