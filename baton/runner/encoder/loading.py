"""Loads the model directory of an encoder."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from baton.engine.runner import ModelInfo
from baton.errors import ConfigError
from baton.messages.node_report import ComputePath
from baton.runner.backends.device import resolve_device
from baton.runner.backends.kernel_choice import choose_operations
from baton.runner.backends.operations import Operations
from baton.runner.compute_paths import products_path
from baton.runner.encoder.encoder import Encoder
from baton.runner.encoder.encoder_runner import EncoderRunner
from baton.runner.execution.input_batch import Rows, flatten_rows
from baton.runner.load_steps import named_errors, numerics_of, settle
from baton.runner.model import attention, layers
from baton.runner.model.pooling_files import read_pooling
from baton.runner.model.quantization.stored_weight import UnusableWeight
from baton.runner.model.weights import load_model_for
from baton.runner.spec import CacheSpec, TorchSpec
from baton.runner.torch_threads import elementwise_threads

_CHECKED_LENGTHS = (1, 9, 17, 5, 23)
"""The tokens of the texts with which the check at start compares bits."""


def load_encoder(spec: TorchSpec, operations: Operations | None = None) -> EncoderRunner:
    """Load an encoder; `operations` replaces the machine's kernels (tests). Raises ConfigError."""
    _check_settings(spec)
    device = resolve_device(spec.device)
    torch.set_num_threads(elementwise_threads(spec.num_threads))
    attention.register()
    layers.register()
    chosen = choose_operations(spec.num_threads, device) if operations is None else operations
    pooling = read_pooling(spec.model_dir)
    with named_errors(spec.model_dir):
        loaded = load_model_for(chosen, spec.model_dir, spec.dtype, device, None, dequantize=spec.dequantize)
        cache = CacheSpec(spec.num_blocks, spec.cache_bytes)
        encoder = Encoder(loaded, pooling, chosen, spec.block_size, cache, spec.num_threads)
        reason = settle(chosen, encoder.set_rows_per_call, partial(_why_not_bit_exact, encoder))
    info = ModelInfo(
        name=spec.name or spec.model_dir.resolve().name,
        fingerprint=loaded.fingerprint,
        architecture=loaded.architecture,
        dtype=loaded.dtype,
        numerics=numerics_of(loaded.weights.treatment, chosen, encoder.layout),
        vocab_size=encoder.vocab_size,
        max_model_len=pooling.max_length,
        eos_token_ids=frozenset(),
        bit_exact=reason is None,
        bit_exact_reason=reason or "",
        embedding_size=encoder.embedding_size,
        capabilities=pooling.capabilities,
        pooling=pooling,
        compute_paths=(
            ComputePath("weights", f"{loaded.dtype}, {loaded.weights.num_bytes >> 20} MiB"),
            products_path(chosen),
            ComputePath("encoder", "transformers' loop over the layers, several texts in a step"),
        ),
        weight_bytes=loaded.weights.num_bytes,
    )
    return EncoderRunner(info, encoder)


def _check_settings(spec: TorchSpec) -> None:
    """Raises ConfigError for settings that are of models that generate."""
    refused = {
        "--tp, --pp and --hosts": spec.tensor_parallel * spec.pipeline_parallel > 1,
        "--quantization": spec.quantization is not None,
        "--kv-cache-dtype": spec.cache_dtype != "auto",
        "--host-cache-memory": spec.host_cache_bytes > 0,
        "--speculative-config": spec.draft is not None,
    }
    for names, is_set in refused.items():
        if is_set:
            raise ConfigError(f"{spec.model_dir} is an encoder, which is computed plainly: leave {names} out")


def _why_not_bit_exact(encoder: Encoder) -> str | None:
    """Compute texts together and one by one, and compare the bits of their hidden states."""
    if encoder.missed_products:
        return f"computes {', '.join(sorted(encoder.missed_products))} outside of Baton's kernels"
    lengths = [min(length, encoder.max_length) for length in _CHECKED_LENGTHS]
    texts = [(np.arange(length) * 7919 + 13 * number) % encoder.vocab_size for number, length in enumerate(lengths)]
    size, first, sequences = encoder.layout.block_size, 1, []
    for text in texts:
        width = -(-text.size // size)
        sequences.append(Rows(text.astype(np.int64), 0, 1, np.arange(first, first + width, dtype=np.int32)))
        first += width
    if first > encoder.num_blocks:
        return "the cache is too small for the check at start"

    def hidden(some: list[Rows]) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
        batch = flatten_rows(some, encoder.layout, encoder.row_quantum)
        return encoder.compute(batch, np.zeros(batch.token_ids.size, dtype=np.int64))[: batch.query_start[-1]]

    together = hidden(sequences)
    if not np.isfinite(together).all():
        raise UnusableWeight("they give numbers that are not finite: they or config.json are damaged; copy them again")
    alone = np.concatenate([hidden([one]) for one in sequences])
    if not np.array_equal(together.view(np.uint32), alone.view(np.uint32)):
        return "the check at start found different bits for a text alone and beside others"
    return None
