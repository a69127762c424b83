"""Loads the model directory of a model with an encoder and a decoder."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt

from baton.engine.batch import NewRequestData
from baton.messages.node_model import GENERATES, TRANSCRIBES, Capability
from baton.messages.node_report import ComputePath
from baton.messages.sampling import SamplingParams
from baton.messages.spans import source_spans
from baton.model_formats.encoder_decoders import EncoderDecoder, aligned, encoder_decoder
from baton.runner.backends.device import resolve_device
from baton.runner.backends.operations import Operations
from baton.runner.compute_paths import compute_paths
from baton.runner.encoder_decoder import attention
from baton.runner.encoder_decoder.decoder_steps import DecoderSteps
from baton.runner.encoder_decoder.source_inputs import SourceInputs
from baton.runner.execution.encoded_rows import EncodedRows
from baton.runner.execution.input_batch import flatten, with_given_rows, with_sources
from baton.runner.execution.request_table import RequestState
from baton.runner.model.weights import LoadedModel, load_model_for
from baton.runner.model_runner import TorchModelRunner
from baton.runner.self_check import DIFFERENT_IN_CHUNKS, TOO_SMALL, check_tokens, require_finite, why_missed
from baton.runner.shared_by_loaders import (
    model_info,
    named_errors,
    prepared_operations,
    refuse_settings,
    row_numerics_of,
    settle,
)
from baton.runner.spec import TorchSpec

_CHUNKS = (40, 24, 3, 1, 1)
"""Tokens of the steps in which the check at start computes one of two equal sequences: the input's come first."""
_ROWS, _TOKENS = 50, 5


def load_encoder_decoder(spec: TorchSpec, operations: Operations | None = None) -> TorchModelRunner:
    """Load a model with an encoder and a decoder; `operations` replaces the machine's kernels (tests).

    Raises ConfigError.
    """
    refuse_settings(
        spec,
        "has an encoder and a decoder, which don't go with {}: leave it out",
        {
            "--tp, --pp and --hosts": spec.is_divided,
            "--quantization": spec.quantization is not None,
            "--kv-cache-dtype": spec.cache_dtype != "auto",
            "--speculative-config": spec.draft is not None,
        },
    )
    shape = encoder_decoder(spec.model_dir)
    assert shape is not None
    device = resolve_device(spec.device)
    chosen = prepared_operations(spec, device, operations)
    attention.register()
    with named_errors(spec.model_dir):
        loaded = load_model_for(chosen, spec.model_dir, spec.weights, device)
        decoder = DecoderSteps(loaded, shape, chosen, spec.block_size, spec.cache, spec.num_threads)
        inputs = SourceInputs(loaded, shape)
        reason = settle(chosen, decoder.set_rows_per_call, partial(_why_not_bit_exact, loaded, decoder))
    info = model_info(spec, loaded, chosen, decoder.layout, decoder.max_model_len, reason)
    source = ComputePath("encoder", f"transformers' loop over the layers, one {shape.source} at a time")
    info = replace(
        info,
        numerics=f"{info.numerics}/{inputs.numerics}",
        row_numerics=f"{row_numerics_of(loaded.weights.treatment, chosen)}/{inputs.numerics}",
        embedding_size=decoder.embedding_size,
        row_width=decoder.row_width,
        capabilities=_capabilities(shape, decoder),
        most_source_rows=aligned(shape.most_rows),
        compute_paths=(*compute_paths(chosen, decoder, loaded.weights, loaded.dtype), source),
    )
    aligner = decoder if decoder.heads else None
    return TorchModelRunner(info, decoder, spec.host_cache_bytes, inputs=inputs, source=shape, aligner=aligner)


def _capabilities(shape: EncoderDecoder, decoder: DecoderSteps) -> frozenset[Capability]:
    if shape.source != "speech":
        return GENERATES
    return TRANSCRIBES | {Capability.ALIGN} if decoder.heads else TRANSCRIBES


def _why_not_bit_exact(loaded: LoadedModel, decoder: DecoderSteps) -> str | None:
    """None if a sequence has the same bits at once and in chunks beside another one; otherwise a reason."""
    if (why := why_missed(decoder.missed_products)) is not None:
        return why
    spans = source_spans("check", _ROWS)
    begin = spans[-1].stop
    blocks = -(-(begin + _TOKENS) // decoder.layout.block_size)
    if decoder.num_blocks < 1 + 2 * blocks:
        return TOO_SMALL
    rows = np.zeros((begin, decoder.row_width), dtype=np.float32)
    rows[:_ROWS] = np.random.default_rng(0).standard_normal((_ROWS, decoder.row_width))
    encoded = EncodedRows()
    encoded.put("check", rows)
    tokens = [0] * begin + check_tokens(_TOKENS, loaded.config.vocab_size)

    def state(number: int) -> RequestState:
        own = range(1 + number * blocks, 1 + (number + 1) * blocks)
        return RequestState(NewRequestData(f"{number}", tokens, (), SamplingParams(), own, 0, spans=spans))

    def advance(*shares: tuple[RequestState, int]) -> npt.NDArray[np.float32]:
        scheduled = [state.share(count) for state, count in shares if count]
        batch = flatten(scheduled, decoder.layout, decoder.row_quantum)
        batch = with_sources(with_given_rows(batch, scheduled, loaded.dtype, decoder.row_width, encoded), scheduled)
        logits: npt.NDArray[np.float32] = decoder.compute(batch, batch.query_start[-1:].astype(np.int64) - 1)[0]
        for share in scheduled:
            share.state.num_computed_tokens = share.stop
        return logits

    at_once, parts = state(0), state(1)
    expected = advance((at_once, begin + _TOKENS))
    require_finite(expected, "logits")
    mate = state(0)
    logits = expected
    for count in _CHUNKS:
        logits = advance((mate, min(count + 7, begin + _TOKENS - mate.num_computed_tokens)), (parts, count))
    decoder.clear_blocks(1 + 2 * blocks)
    if not np.array_equal(expected.view(np.uint32), logits.view(np.uint32)):
        return DIFFERENT_IN_CHUNKS
    return None
