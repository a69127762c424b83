"""Which format a checkpoint's quantised weights have, by the `quantization_config` of its config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from baton.runner.model.stored.compressed_tensors import CompressedTensors
from baton.runner.model.stored.fp8 import Fp8
from baton.runner.model.stored.gguf import METHOD as GGUF
from baton.runner.model.stored.gguf import Gguf
from baton.runner.model.stored.gptq_awq import Awq, Gptq
from baton.runner.model.stored.weight import UnusableWeight, WeightFormat

_FORMATS: Mapping[str, Callable[[Mapping[str, Any]], WeightFormat]] = {
    "gptq": Gptq.of,
    "awq": Awq.of,
    "compressed-tensors": CompressedTensors.of,
    "fp8": Fp8.of,
    "fbgemm_fp8": Fp8.of,
    GGUF: Gguf.of,
}

_REFUSED: Mapping[str, str] = {
    "bitsandbytes": "serve the original checkpoint with --quantization int4 or int8 instead",
    "hqq": "serve the original checkpoint with --quantization int4 or int8 instead",
    "exl2": "take its GPTQ or AWQ form, or the original checkpoint with --quantization int4",
    "exl3": "take its GPTQ or AWQ form, or the original checkpoint with --quantization int4",
    "mxfp4": "take a checkpoint in bfloat16, and --quantization int4",
    "aqlm": "take its GPTQ or AWQ form, or the original checkpoint with --quantization int4",
    "quip": "take its GPTQ or AWQ form, or the original checkpoint with --quantization int4",
    "quark": "take its GPTQ, AWQ or compressed-tensors form",
    "torchao": "serve the original checkpoint with --quantization int4 or int8 instead",
    "modelopt": "take its compressed-tensors or fp8 form",
    "eetq": "serve the original checkpoint with --quantization int8 instead",
    "quanto": "serve the original checkpoint with --quantization int4 or int8 instead",
    "vptq": "take its GPTQ or AWQ form, or the original checkpoint with --quantization int4",
    "spqr": "take its GPTQ or AWQ form, or the original checkpoint with --quantization int4",
    "higgs": "serve the original checkpoint with --quantization int4 or int8 instead",
    "bitnet": "its weights of 1.58 bits have no packed form here; take another model",
    "auto-round": "export it in the format auto_gptq or auto_awq",
}


def format_of(config: Mapping[str, Any]) -> WeightFormat | None:
    """The format that a config.json names; None: its weights are plain.

    Raises UnusableWeight for a format that Baton can't read, and says what to do instead.
    """
    quantization = config.get("quantization_config", config.get("compression_config"))
    if quantization is None:
        return None
    if not isinstance(quantization, dict):
        raise UnusableWeight("its quantization_config is not a JSON object; copy config.json again")
    method = quantization.get("quant_method")
    if method is None and (quantization.get("load_in_4bit") or quantization.get("load_in_8bit")):
        method = "bitsandbytes"
    if not isinstance(method, str):
        raise UnusableWeight(f"its quantization_config has no quant_method; Baton reads {', '.join(_FORMATS)}")
    if method in _FORMATS:
        return _FORMATS[method](quantization)
    advice = _REFUSED.get(method, "take one of these forms, or the original checkpoint with --quantization int4")
    raise UnusableWeight(f"it is quantised by {method!r:.80}; Baton reads {', '.join(_FORMATS)}: {advice}")
