"""The structures of csrc/kernels.h, csrc/quantized.h and csrc/program.c for ctypes.

When the library is loaded, they are compared field by field with the compiled ones (`check_layout`).
"""

from __future__ import annotations

import ctypes
import itertools
import re
from enum import IntEnum

from baton.runner.backends.cpu.kernel_file import KernelsUnavailable

_POINTER, _SIZE, _INT64, _INT32, _INT, _FLOAT = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int64,
    ctypes.c_int32,
    ctypes.c_int,
    ctypes.c_float,
)


def _fields(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class LinearCall(ctypes.Structure):
    _fields_ = [
        *_fields(_POINTER, "x packed bias out format adapters"),
        *_fields(_SIZE, "m n k scale_group x_stride out_stride rows_per_task groups_per_task"),
        *_fields(_INT, "activation out_dtype"),
    ]


class AdapterPanel(ctypes.Structure):
    _fields_ = [("offset", ctypes.c_uint32), *_fields(ctypes.c_uint16, "first count")]


class AdapterWeights(ctypes.Structure):
    _fields_ = [*_fields(_POINTER, "a b factors constants panels"), *_fields(_SIZE, "rank k")]


class AdapterRows(ctypes.Structure):
    _fields_ = [*_fields(_POINTER, "slots weights t"), *_fields(_SIZE, "num_slots t_stride")]


class Number(IntEnum):
    """`enum number` of csrc/quantized.h."""

    NONE = 0
    FLOAT32 = 1
    BFLOAT16 = 2
    FLOAT16 = 3
    INT8 = 4
    UINT8 = 5


class QuantizedFormat(ctypes.Structure):
    """How a packed weight is quantised (csrc/quantized.h); equal formats are one value."""

    _fields_ = [
        *_fields(_SIZE, "bits group block groups_per_record"),
        *_fields(_INT32, "zero has_zeros scales offsets"),
    ]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, QuantizedFormat) and bytes(self) == bytes(other)

    def __hash__(self) -> int:
        return hash(bytes(self))


class QuantizedParts(ctypes.Structure):
    """The tensors of a weight that is packed (`struct quantized_parts` of csrc/packing_quantized.c)."""

    _fields_ = _fields(_POINTER, "codes scales scale_factors offsets offset_factors zeros")


class QuantizeCall(ctypes.Structure):
    _fields_ = [*_fields(_POINTER, "x out format"), *_fields(_SIZE, "rows k x_stride rows_per_task")]


class NormCall(ctypes.Structure):
    _fields_ = [
        *_fields(_POINTER, "x weight out residual sum gate bias"),
        *_fields(_SIZE, "rows columns n row_stride column_stride gate_row_stride gate_column_stride weight_stride"),
        ("rows_per_task", _SIZE),
        ("eps", _FLOAT),
        *_fields(_INT, "plus_one has_sigmoid_gate gate_first around_mean"),
    ]


class GateKind(IntEnum):
    """`enum gate_function` of csrc/kernels.h."""

    SOFTPLUS = 0
    SIGMOID = 1
    PLAIN = 2
    NARROWED = 3


class GateCall(ctypes.Structure):
    _fields_ = [
        *_fields(_POINTER, "x out bias scale factor"),
        *_fields(_SIZE, "rows columns x_stride out_stride rows_per_task"),
        *_fields(_FLOAT, "low high"),
        ("function", _INT),
    ]


class Multiplier(IntEnum):
    """`enum multiplier` of csrc/kernels.h."""

    PLAIN = 0
    SIGMOID = 1
    SOFTPLUS = 2


class MultiplyCall(ctypes.Structure):
    _fields_ = [
        *_fields(_POINTER, "x by out"),
        *_fields(_SIZE, "rows columns width x_stride by_stride rows_per_task"),
        ("multiplier", _INT),
    ]


class RoutingScores(IntEnum):
    """`enum routing_scores` of csrc/kernels.h."""

    SOFTMAX = 0
    SIGMOID = 1
    SOFTMAX_OF_CHOSEN = 2
    SOFTMAX_OF_NEAR = 3


class RouteCall(ctypes.Structure):
    _fields_ = [
        *_fields(_POINTER, "logits choice_bias expert_factors chosen weights"),
        *_fields(_SIZE, "rows experts most logits_stride rows_per_task groups most_groups"),
        *_fields(_INT, "scores groups_by_two normalised"),
        *_fields(_FLOAT, "eps factor near"),
        ("weights_dtype", _INT),
    ]


class SumCall(ctypes.Structure):
    _fields_ = [
        *_fields(_POINTER, "outs places weights rest shared gate out"),
        *_fields(_SIZE, "rows most n rows_per_task shared_stride rest_stride"),
        ("factor", _FLOAT),
        ("are_weighted", _INT),
    ]


class ClampCall(ctypes.Structure):
    _fields_ = [
        *_fields(_POINTER, "x out"),
        *_fields(_SIZE, "rows columns rows_per_task"),
        *_fields(_FLOAT, "limit alpha"),
    ]


class ActivateCall(ctypes.Structure):
    _fields_ = [
        *_fields(_POINTER, "x out"),
        *_fields(_SIZE, "rows columns x_stride rows_per_task"),
        ("activation", _INT),
        *_fields(_FLOAT, "bound factor positive negative linear near"),
    ]


class MixtureCall(ctypes.Structure):
    _fields_ = [
        *_fields(LinearCall, "up down"),
        *_fields(_POINTER, "ups downs up_biases down_biases"),
        ("clamp", ClampCall),
        ("activate", ActivateCall),
        *_fields(_POINTER, "x chosen gathered inner quantized rest"),
        *_fields(_SIZE, "experts x_stride x_apart"),
        ("sum", SumCall),
        *_fields(_INT, "weighs_inputs passes_rest are_weighted are_apart"),
    ]


class AddCall(ctypes.Structure):
    _fields_ = [
        *_fields(_POINTER, "one other out"),
        *_fields(_SIZE, "rows columns width one_stride other_stride out_stride rows_per_task"),
        ("factor", _FLOAT),
    ]


class StreamsKind(IntEnum):
    """`enum streams_kind` of csrc/kernels.h."""

    MIXED = 0
    CORRECTED = 1
    AVERAGED = 2


class StreamsCall(ctypes.Structure):
    _fields_ = [
        *_fields(_POINTER, "x factors result out"),
        *_fields(_SIZE, "rows streams columns active x_stride factors_stride result_stride rows_per_task"),
        ("kind", _INT),
    ]


class ResizeCall(ctypes.Structure):
    _fields_ = [
        *_fields(_POINTER, "x like out"),
        *_fields(_SIZE, "rows columns x_stride like_stride out_stride rows_per_task"),
        ("least", _FLOAT),
    ]


class SparseGateCall(ctypes.Structure):
    _fields_ = [
        *_fields(_POINTER, "x out"),
        *_fields(_SIZE, "rows columns x_stride rows_per_task"),
        ("activation", _INT),
        ("deviations", _FLOAT),
    ]


class RotateCall(ctypes.Structure):
    _fields_ = [
        *_fields(_POINTER, "x cos sin"),
        *_fields(_SIZE, "tokens heads half token_stride head_stride angle_stride tokens_per_task"),
        *_fields(_INT, "angle_dtype in_pairs"),
    ]


class StoreCall(ctypes.Structure):
    _fields_ = [
        *_fields(_POINTER, "key value cache slots"),
        *_fields(_INT64, "tokens kv_heads num_blocks block_size key_size value_size key_stride value_stride"),
        *_fields(_INT64, "block_stride key_offset value_offset scale_offset scales_apart tokens_per_task"),
        *_fields(_INT, "format dtype"),
    ]


class KernelAttentionCall(ctypes.Structure):
    _fields_ = [
        *_fields(_POINTER, "query out cache query_start seq_lens block_tables sinks selected distance_bias"),
        *_fields(_INT64, "block_stride key_offset value_offset scale_offset scales_apart key_stride values_in_keys"),
        *_fields(_INT64, "rows query_stride out_stride num_seqs"),
        *_fields(
            _INT64, "table_width table_stride num_blocks heads kv_heads key_dim value_dim block_size window ahead"
        ),
        *_fields(_INT64, "in_chunks selected_words num_distances"),
        *_fields(_FLOAT, "scale softcap"),
        ("format", _INT),
    ]


class KernelSelectionCall(ctypes.Structure):
    _fields_ = [
        ("keys", KernelAttentionCall),
        *_fields(_POINTER, "weights selected"),
        *_fields(_INT64, "weights_stride words most"),
    ]


class States(ctypes.Structure):
    """Where one layer's states are, and the rows of a step (`struct states` of csrc/kernels.h)."""

    _fields_ = [
        *_fields(_POINTER, "memory query_start seq_lens block_tables kept_lens"),
        *_fields(_INT64, "num_blocks block_stride offset block_size rows num_seqs table_width table_stride"),
    ]


class KernelConvolutionCall(ctypes.Structure):
    _fields_ = [
        ("states", States),
        *_fields(_POINTER, "x out weight bias"),
        *_fields(_INT64, "columns taps x_stride out_stride columns_per_task state_stride"),
        ("has_silu", _INT),
    ]


class KernelRecurrenceCall(ctypes.Structure):
    _fields_ = [
        ("states", States),
        *_fields(_POINTER, "query key value out decay beta skip rates"),
        *_fields(_INT64, "query_stride key_stride value_stride out_stride decay_stride beta_stride"),
        *_fields(_INT64, "heads groups key_dim value_dim columns_per_task"),
        *_fields(_FLOAT, "scale norm_eps"),
        *_fields(_INT, "decay_per_key has_norm has_delta_rule"),
    ]


class TakeRowsCall(ctypes.Structure):
    _fields_ = [*_fields(_POINTER, "x out index"), *_fields(_INT64, "rows row_bytes x_stride")]


class CopyCall(ctypes.Structure):
    _fields_ = [
        *_fields(_POINTER, "x out"),
        *_fields(_INT64, "rows pieces piece_bytes x_stride x_apart out_stride out_apart zero_bytes"),
    ]


class HeadsCall(ctypes.Structure):
    _fields_ = [
        ("linear", LinearCall),
        *_fields(_SIZE, "heads tasks_of_head x_apart packed_apart out_apart"),
        ("function", _POINTER),
    ]


class BarrierCall(ctypes.Structure):
    _fields_ = [*_fields(_POINTER, "barrier"), *_fields(_INT64, "ranks tag")]


class OperationKind(IntEnum):
    """`enum operation_kind` of csrc/program.c."""

    LINEAR = 0
    NORM = 1
    ROTATE = 2
    STORE_KV = 3
    ATTENTION = 4
    TAKE_ROWS = 5
    QUANTIZE = 6
    BARRIER = 7
    CONVOLVE = 8
    RECUR = 9
    GATE = 10
    MULTIPLY = 11
    ROUTE = 12
    MIXTURE = 13
    ACTIVATE = 14
    ADD = 15
    COPY = 16
    HEADS = 17
    SELECT = 18
    STREAMS = 19
    RESIZE = 20
    SPARSE_GATE = 21


OPERATION_NAMES = {
    **{kind: kind.name.lower() for kind in OperationKind},
    OperationKind.NORM: "rms_norm",
    OperationKind.ATTENTION: "paged_attention",
    OperationKind.QUANTIZE: "linear",
    OperationKind.MIXTURE: "mix_experts",
    OperationKind.COPY: "copy_columns",
    OperationKind.HEADS: "linear_of_heads",
    OperationKind.SELECT: "select_keys",
    OperationKind.STREAMS: "mix_streams",
}
"""The method of `Program` by which an operation is recorded."""


class CacheFormat(IntEnum):
    """`enum cache_format` of csrc/kernels.h."""

    AS_IT_IS = 0
    INT8 = 1
    E4M3 = 2


class Call(ctypes.Union):
    _fields_ = [
        ("linear", LinearCall),
        ("norm", NormCall),
        ("rotate", RotateCall),
        ("store", StoreCall),
        ("attention", KernelAttentionCall),
        ("selection", KernelSelectionCall),
        ("take", TakeRowsCall),
        ("quantize", QuantizeCall),
        ("barrier", BarrierCall),
        ("convolution", KernelConvolutionCall),
        ("recurrence", KernelRecurrenceCall),
        ("gate", GateCall),
        ("multiply", MultiplyCall),
        ("route", RouteCall),
        ("mixture", MixtureCall),
        ("activate", ActivateCall),
        ("add", AddCall),
        ("copy", CopyCall),
        ("heads", HeadsCall),
        ("streams", StreamsCall),
        ("resize", ResizeCall),
        ("sparse_gate", SparseGateCall),
    ]


class Place(ctypes.Structure):
    _fields_ = _fields(_INT64, "buffer offset")


class Operation(ctypes.Structure):
    _fields_ = [
        *_fields(_INT64, "kind which_rows group dtype product second_stride"),
        *_fields(Place, "x out second third fourth fifth"),
        ("room", Place * 5),
        ("call", Call),
    ]


class StepGroup(ctypes.Structure):
    _fields_ = [*_fields(_POINTER, "slots block_tables"), *_fields(_INT64, "table_width table_stride")]


class Step(ctypes.Structure):
    _fields_ = [
        *_fields(_POINTER, "buffers sampled query_start sample_start seq_lens kept_lens groups"),
        *_fields(_INT64, "rows num_sampled num_seqs"),
        *_fields(_POINTER, "adapter_slots sampled_slots adapter_weights t"),
        *_fields(_INT64, "num_slots t_stride selection_words"),
    ]


class _LayoutEntry(ctypes.Structure):
    """`struct layout_entry` of csrc/layout.inc.h."""

    _fields_ = [("structure", ctypes.c_char_p), ("field", ctypes.c_char_p), ("offset", _SIZE), ("size", _SIZE)]


def _c_name(structure: type) -> str:
    """The name of a structure in C: linear_call of LinearCall, and recurrence_call of KernelRecurrenceCall."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", structure.__name__.removeprefix("Kernel")).lower()


_STRUCTURES: dict[str, type[ctypes.Structure | ctypes.Union]] = {
    _c_name(structure): structure
    for structure in (
        *(LinearCall, AdapterPanel, AdapterWeights, AdapterRows, QuantizedFormat),
        *(QuantizedParts, QuantizeCall, NormCall, GateCall, MultiplyCall),
        *(RouteCall, SumCall, ClampCall, MixtureCall, ActivateCall),
        *(AddCall, StreamsCall, ResizeCall, SparseGateCall, RotateCall),
        *(StoreCall, KernelAttentionCall, KernelSelectionCall, States, KernelConvolutionCall),
        *(KernelRecurrenceCall, TakeRowsCall, CopyCall, HeadsCall, BarrierCall),
        *(Call, Place, Operation, StepGroup, Step),
    )
}

_ENUMS: dict[str, type[IntEnum]] = {
    "operation_kind": OperationKind,
    "cache_format": CacheFormat,
    "multiplier": Multiplier,
    "gate_function": GateKind,
    "routing_scores": RoutingScores,
    "streams_kind": StreamsKind,
    "number": Number,
}

Layout = dict[tuple[str, str], tuple[int, int]]
"""Offset and size in bytes of each (structure, field); a field without a name stands for the whole structure.

For a constant of an enum the pair is its value and 0."""


def layout_here() -> Layout:
    """The layout of this file's structures."""
    layout: Layout = {}
    for name, structure in _STRUCTURES.items():
        layout[name, ""] = (0, ctypes.sizeof(structure))
        if issubclass(structure, ctypes.Structure):
            for field, *_ in structure._fields_:
                descriptor = getattr(structure, field)
                layout[name, field] = (descriptor.offset, descriptor.size)
    for name, constants in _ENUMS.items():
        layout |= {(name, constant.name): (int(constant), 0) for constant in constants}
    return layout


def layout_of(functions: ctypes.CDLL) -> Layout:
    """The layout of the compiled structures; raises KernelsUnavailable for a library that does not report it."""
    if not hasattr(functions, "baton_layout"):
        raise KernelsUnavailable("the kernel library was built from an older source: run `pip install -e .` again")
    functions.baton_layout.argtypes = [_SIZE]
    functions.baton_layout.restype = ctypes.POINTER(_LayoutEntry)
    layout: Layout = {}
    for index in itertools.count():
        fields = functions.baton_layout(index)
        if not fields:
            return layout
        entry = fields.contents
        layout[entry.structure.decode(), entry.field.decode()] = (entry.offset, entry.size)
    raise AssertionError("itertools.count() never ends")


def check_layout(compiled: Layout) -> None:
    """Raises KernelsUnavailable, with the first difference, if the compiled structures differ from this file's."""
    here = layout_here()
    for field in {**here, **compiled}:
        if here.get(field) != compiled.get(field):
            raise KernelsUnavailable(
                f"the kernel library was built from another source: {'.'.join(filter(None, field))} has offset and"
                f" size {compiled.get(field)} there and {here.get(field)} here; run `pip install -e .` again"
            )
