"""Which kernels run on this machine, and a fingerprint of the bits that they compute."""

from __future__ import annotations

import hashlib
import typing
from dataclasses import dataclass, replace
from functools import cache

import torch

from baton.runner.backends.attention_call import AttentionCall, AttentionFeatures
from baton.runner.backends.cpu.kernel_file import KernelsUnavailable
from baton.runner.backends.cpu.kernels.attention import SCALE_BYTES, paged_attention, store_kv
from baton.runner.backends.cpu.kernels.library import CACHE_FORMATS, isa_name, library
from baton.runner.backends.cpu.kernels.mixture import route, sum_experts
from baton.runner.backends.cpu.kernels.product import Activation
from baton.runner.backends.cpu.kernels.rows import (
    GateActivation,
    GateFunction,
    gate,
    gated_rms_norm,
    multiply,
    rms_norm,
    rotate,
)
from baton.runner.backends.cpu.kernels.states import convolve, recur
from baton.runner.backends.cpu.kernels.weights import gated_linear, linear, pack, pack_gated
from baton.runner.backends.paged_cache import CacheView
from baton.runner.backends.quantized_weight import Float8Weight, QuantizedWeight
from baton.runner.backends.routing import Routing, Scores, SharedRows
from baton.runner.backends.state_calls import ConvolutionCall, RecurrenceCall, StateStep, StateView


@dataclass(frozen=True, slots=True)
class KernelInfo:
    """Whether the kernels can be used, and which of them."""

    isa: str | None
    """The instruction set in use; None when there are no kernels."""
    isas: tuple[str, ...]
    """All instruction sets that the library has and this processor supports."""
    numerics: str
    """A fingerprint of the bits that the kernels compute for fixed input; empty without kernels."""
    threads: bool
    """Whether work is spread over torch's threads; otherwise the calling thread does all of it."""
    reason: str
    """Why there are no kernels, and what to do about it; empty when there are."""

    def __bool__(self) -> bool:
        return self.isa is not None


def available() -> KernelInfo:
    """Load the kernels and describe them; never raises."""
    try:
        lib = library()
    except KernelsUnavailable as error:
        return KernelInfo(isa=None, isas=(), numerics="", threads=False, reason=str(error))
    isa = isa_name()
    return KernelInfo(isa, lib.isas, _numerics(isa), lib.threads, reason="")


@cache
def _numerics(_isa: str) -> str:
    """The fingerprint of the instruction set in use, computed once for each: loading a model asks three times."""
    digest = hashlib.sha256()
    for dtype in (torch.float32, torch.bfloat16):
        for probe in (_rounding_noise, _rows_probe, _quantized_probe, _float8_probe, _states_probe, _mixture_probe):
            digest.update(_bytes(probe(dtype)))
        for cache_dtype in (dtype, *CACHE_FORMATS):
            digest.update(_bytes(_attention_probe(dtype, cache_dtype)))
    digest.update(_bytes(_rounding_noise(torch.bfloat16, out_dtype=torch.float32)))
    return digest.hexdigest()[:12]


def _rounding_noise(dtype: torch.dtype, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """Products whose second half cancels the first: the rounding errors that remain show the order of summation."""
    x, weight = _noise(5, 320).to(dtype), _noise(70, 320).to(dtype)
    packed = pack(torch.cat([weight, -weight], dim=1))
    return linear(torch.cat([x, x], dim=1), packed, out_dtype=out_dtype, threads=1)


def _attention_probe(dtype: torch.dtype, cache_dtype: torch.dtype) -> torch.Tensor:
    blocks, size, key_dim, value_dim = 8, 16, 24, 16
    stride = size * (key_dim + value_dim)
    scales = stride if cache_dtype in CACHE_FORMATS else None
    stride += 0 if scales is None else size * SCALE_BYTES
    memory = torch.zeros(blocks * stride, dtype=cache_dtype)
    cache = CacheView(memory, blocks, stride, 0, size * key_dim, 1, size, key_dim, value_dim, scales)
    keys, values = _noise(100, 24)[:, None].to(dtype), _noise(101, 16)[1:, None].to(dtype)
    store_kv(keys, values, cache, torch.arange(100))
    call = AttentionCall(
        _noise(2 * 3, key_dim).view(2, 3, key_dim).to(dtype),
        cache,
        torch.tensor([0, 2], dtype=torch.int32),
        torch.tensor([100], dtype=torch.int32),
        torch.arange(blocks, dtype=torch.int32)[None],
        AttentionFeatures(0.7, softcap=30.0, sinks=_noise(1, 3)[0]),
    )
    return paged_attention(call, threads=1)


def _rows_probe(dtype: torch.dtype) -> torch.Tensor:
    """Norms, a rotation and all gated products, of numbers of all magnitudes."""
    x = (_noise(20, 150) * 4).to(dtype)
    weight = pack_gated(_noise(40, 150).to(dtype), _noise(41, 150)[1:].to(dtype))
    parts = [rms_norm(x, x[0], 1e-6, plus_one=plus_one, threads=1) for plus_one in (False, True)]
    activations: tuple[Activation, ...] = ("silu", "gelu", "gelu_tanh")
    parts += [gated_linear(x, weight, activation=activation, threads=1) for activation in activations]
    turned = x.clone().view(20, 3, 50)
    rotate(turned, x[:, :48].contiguous(), x[:, 50:98].contiguous(), threads=1)
    return torch.cat([part.flatten() for part in (*parts, turned)])


def _quantized_probe(dtype: torch.dtype) -> torch.Tensor:
    """Products with quantised weights of both widths, and of every kind of scale, zero and offset."""
    x = (_noise(5, 640) * 4).to(dtype)
    codes = ((_noise(70, 640) + 1) * 128).to(torch.uint8)
    groups = _noise(70, 20)
    small = QuantizedWeight(codes >> 4, 4, 32, groups.half(), zeros=(groups.abs() * 15).to(torch.uint8))
    factors = _noise(70, 5).half()
    large = QuantizedWeight(
        codes,
        8,
        16,
        (_noise(70, 40) * 127).to(torch.int8),
        _noise(70, 5).half(),
        zeros=128,
        offsets=(_noise(70, 40).abs() * 255).to(torch.uint8),
        offset_factors=factors,
    )
    wide = QuantizedWeight(codes, 8, 32, groups.bfloat16(), zeros=3, offsets=groups)
    return torch.cat([linear(x, pack(weight), threads=1) for weight in (small, large, wide)])


def _float8_probe(dtype: torch.dtype) -> torch.Tensor:
    """Products with all finite numbers of float8, with a scale for blocks of 128 and for a row."""
    x, scales = (_noise(5, 320) * 4).to(dtype), _noise(70, 3)
    codes = ((_noise(70, 320) + 1) * 63.4).to(torch.uint8) + 128 * (_noise(320, 70).T < 0).to(torch.uint8)
    numbers = codes.view(torch.float8_e4m3fn)
    blocks, row = Float8Weight(numbers, scales, 128), Float8Weight(numbers, scales[:, :1].contiguous(), 320)
    return torch.cat([linear(x, pack(weight), threads=1) for weight in (blocks, row)])


def _states_probe(dtype: torch.dtype) -> torch.Tensor:
    """A convolution and recurrences of all kinds, states behind them, gates, gated norms and products."""
    rows, heads, key_dim, value_dim = 40, 2, 24, 40
    lengths = torch.tensor([rows], dtype=torch.int32)
    step = StateStep(torch.tensor([0, rows], dtype=torch.int32), lengths, lengths, torch.ones(1, 1, dtype=torch.int32))
    memory = torch.zeros(2, heads * key_dim * value_dim, dtype=torch.float32)
    state = StateView(memory.view(-1), 2, memory.shape[1], 0, (3, 70), rows)
    x, weight = (_noise(rows, 70) * 4).to(dtype), _noise(70, 4)
    parts = [convolve(ConvolutionCall(x, weight, weight[:, 0].contiguous(), "silu", state, step), threads=1)]
    state = replace(state, shape=(heads, key_dim, value_dim))
    query, value = _noise(2 * rows, key_dim).view(2, rows, 1, key_dim).to(dtype), _noise(rows, heads * value_dim)
    of_heads, of_keys = _noise(rows, heads), _noise(rows, heads * key_dim).view(rows, heads, key_dim)
    for decay, skip in ((of_heads, None), (of_keys, None), (of_heads, _noise(1, heads)[0])):
        call = RecurrenceCall(
            query[0],
            query[1],
            value.view(rows, heads, value_dim).to(dtype),
            -decay.abs(),
            _noise(rows, heads).abs(),
            scale=0.2,
            norm_eps=1e-6,
            state=state,
            step=step,
            has_delta_rule=skip is None,
            skip=skip,
        )
        parts += [recur(call, threads=1), memory.clone()]
    bias, functions = weight[:, 0].contiguous(), typing.get_args(GateFunction)
    parts += [gate(x, function, bias, None, (0.2, 0.8), bias, threads=1) for function in functions]
    heads_of_x, activations = x.view(rows, 2, 35), typing.get_args(GateActivation)
    parts += [gated_rms_norm(heads_of_x, heads_of_x, x[0, :35], 1e-6, by, threads=1) for by in activations]
    parts.append(gated_rms_norm(heads_of_x, heads_of_x, heads_of_x[0], 1e-6, "silu", gate_first=True, threads=1))
    parts += [multiply(x, x.flip(1), function, threads=1) for function in (None, *functions)]
    return torch.cat([part.float().flatten() for part in parts])


def _mixture_probe(dtype: torch.dtype) -> torch.Tensor:
    """Experts chosen by both kinds of scores, and sums of their rows with shared ones."""
    logits, rows = (_noise(20, 24) * 4).to(dtype), _noise(40, 70).to(dtype)
    parts = []
    for scores in typing.get_args(Scores):
        chosen, weights = route(logits, Routing(24, 3, scores, dtype, normalised=True), threads=1)
        shared = SharedRows(rows[:20], rows[20:, :1].contiguous())
        parts += [chosen, weights, sum_experts(rows, chosen, weights, 0.7, shared, threads=1)]
    return torch.cat([part.float().flatten() for part in parts])


def _noise(rows: int, columns: int) -> torch.Tensor:
    """Numbers in [-1, 1), computed with integers alone so that they are the same on every machine."""
    index = torch.arange(1, rows * columns + 1, dtype=torch.int64)
    scattered = (index * 2654435761 + (index * index) * 40503) % (1 << 24)
    return (scattered.float() / (1 << 23) - 1).view(rows, columns)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()
