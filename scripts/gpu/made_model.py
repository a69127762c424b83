"""A runner of a made model: as `load_runner` prepares one, without a checkpoint."""

from __future__ import annotations

import hashlib
import json
from functools import partial
from pathlib import Path

import torch

from baton.engine.runner import ModelInfo
from baton.runner.backends.cuda.cuda_operations import CudaOperations
from baton.runner.backends.cuda.device_sampler import DeviceSampler, sampler_on
from baton.runner.backends.cuda.graph_recording import GpuRecorder
from baton.runner.backends.cuda.kernels import triton_kernels
from baton.runner.compute_paths import compute_paths
from baton.runner.execution.sampler import Sampler
from baton.runner.model import attention
from baton.runner.model.checkpoint import Checkpoint
from baton.runner.model.transformer import Transformer
from baton.runner.model.weights import LoadedModel, ModelWeights
from baton.runner.model_runner import TorchModelRunner
from baton.runner.self_check import why_not_bit_exact
from baton.runner.shared_by_loaders import numerics_of, prepare, settle
from baton.runner.spec import CacheSpec
from gpu.shapes import Shape, fill_by_counter, made_module

BLOCK_SIZE = 16
"""The tokens of a block, as nodes have by default."""
DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}
"""The dtype of models by device. Triton's interpreter multiplies no bfloat16."""


def made_runner(shape: Shape, device: torch.device, num_blocks: int) -> TorchModelRunner:
    """A runner with the operations of a GPU, also on a CPU, where Triton's interpreter runs their kernels.

    Its KV cache holds numbers everywhere, so that requests can begin behind tokens that were never computed. The
    process has one thread for torch, as a node on a GPU has. Raises what torch raises when there is no memory.
    """
    prepare(num_threads=1)
    dtype = DTYPES[device.type]
    module = made_module(shape, device, dtype, attention.ATTENTION_NAME)
    fingerprint = hashlib.sha256(json.dumps(shape.config).encode()).hexdigest()
    # There is no directory: what loading reads from it are files that a made model lacks.
    checkpoint = Checkpoint(Path("made") / shape.name, shape.config, (), fingerprint, frozenset())
    weights = ModelWeights(num_bytes=shape.num_weights * dtype.itemsize)
    name = str(dtype).removeprefix("torch.")
    loaded = LoadedModel(module, module.config, checkpoint, name, type(module).__name__, device, weights)
    operations = made_operations(device)
    transformer = Transformer(loaded, operations, BLOCK_SIZE, CacheSpec(num_blocks), num_threads=1)
    reason = settle(operations, transformer.set_rows_per_call, partial(why_not_bit_exact, loaded, transformer))
    info = ModelInfo(
        name=shape.name,
        fingerprint=fingerprint,
        model_type=str(shape.config["model_type"]),
        dtype=name,
        numerics=numerics_of("", operations, transformer.layout),
        vocab_size=shape.vocab,
        max_model_len=shape.max_tokens,
        eos_token_ids=frozenset(),
        bit_exact=reason is None,
        bit_exact_reason=reason or "",
        embedding_size=transformer.embedding_size,
        row_width=transformer.row_width,
        compute_paths=compute_paths(operations, transformer, weights, name),
        weight_bytes=weights.num_bytes,
    )
    fill_by_counter(transformer.kv_memory, "cache", deviation=1.0)
    return TorchModelRunner(info, transformer, sampler=made_sampler(device, shape.vocab))


def made_operations(device: torch.device) -> CudaOperations:
    """The operations of a GPU with Triton's kernels, also where Triton's interpreter runs them."""
    if device.type == "cuda":
        return CudaOperations(device, triton_kernels(), GpuRecorder())
    from triton.runtime import interpreter

    from tests.support.triton_interpreter import SMALL_TILES, mend_interpreter

    mend_interpreter(interpreter)
    return CudaOperations(device, triton_kernels(), tiles=SMALL_TILES)


def made_sampler(device: torch.device, vocab_size: int) -> Sampler:
    """The sampler of a GPU, also where Triton's interpreter runs its kernels."""
    if device.type == "cuda":
        return sampler_on(device, vocab_size)
    made_operations(device)
    return DeviceSampler(device, vocab_size)
