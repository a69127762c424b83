"""Loads an encoder, and executes steps on it: the implementation of `ModelRunner` for models that generate nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt

from baton.engine.batch import ModelRunnerOutput, SchedulerOutput
from baton.engine.runner import ModelInfo, OneProcessRunner, RefusedAdapters
from baton.errors import InvalidRequest
from baton.messages.node_report import ComputePath
from baton.messages.pooling import PoolingParams
from baton.messages.spans import EncoderContent
from baton.runner.backends.device import resolve_device
from baton.runner.backends.operations import Operations
from baton.runner.compute_paths import products_path
from baton.runner.execution.input_batch import Rows, flatten, flatten_rows
from baton.runner.execution.pooling import Pooler
from baton.runner.execution.request_table import RequestTable, Scheduled
from baton.runner.model.pooling_files import read_pooling
from baton.runner.model.weights import load_model_for
from baton.runner.self_check import TOO_SMALL, require_finite, why_missed
from baton.runner.shared_by_loaders import model_info, named_errors, prepared_operations, refuse_settings, settle
from baton.runner.spec import TorchSpec
from baton.runner.text_encoder.encoder import Encoder


class OnlyTexts:
    """The `RowEncoder` of a model that takes no other inputs."""

    def __init__(self, model_name: str) -> None:
        self._reason = f"{model_name} takes only texts"

    def encode(self, content: EncoderContent, num_rows: int) -> None:
        """Raises InvalidRequest."""
        raise InvalidRequest(content.kind.field, f"can't be encoded: {self._reason}")

    def bytes_of(self, digest: str) -> memoryview | None:
        """There are no rows of any input."""
        return None

    def keep(self, digest: str, num_rows: int, rows: bytes) -> None:
        """Raises ValueError: no step would use them."""
        raise ValueError(self._reason)

    def release(self, digests: Sequence[str] | None) -> None:
        """No input is ever encoded."""


class EncoderRunner(OneProcessRunner):
    """One encoder on one device of this machine. Called from one thread.

    Each prompt is computed by one step. Its blocks hold keys and values during the step alone.
    """

    def __init__(self, model: ModelInfo, encoder: Encoder) -> None:
        self.model = model
        self.layout = encoder.layout
        self.memory = encoder.memory
        self.num_host_blocks = 0
        self.adapters = RefusedAdapters(f"{model.name} is an encoder, which takes no adapters")
        self.encoder = OnlyTexts(model.name)
        self._encoder = encoder
        self._requests = RequestTable(
            encoder.layout, encoder.num_blocks, model.vocab_size, model.max_model_len, adapters=(), row_width=0
        )

    @property
    def num_requests(self) -> int:
        """Requests that the runner has not forgotten."""
        return len(self._requests)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute one step. A failure of one request is reported in `failed`, never raised."""
        started = time.perf_counter()
        self._requests.update(scheduler_output)
        begun, failed = self._requests.begin(scheduler_output.num_scheduled_tokens.items(), {})
        scheduled = []
        for share in begun:
            if share.start == 0 and share.samples and share.state.pooler is not None:
                scheduled.append(share)
            else:
                failed[share.state.request_id] = "an encoder computes whole prompts, and makes vectors of them"
        vectors: dict[str, bytes] = {}
        if scheduled:
            batch = flatten(scheduled, self.layout, self._encoder.row_quantum)
            hidden = self._encoder.compute(batch, _token_types(scheduled, batch.token_ids.size))
            first = 0
            for share in scheduled:
                try:
                    vectors[share.state.request_id] = self._vector(share, hidden[first : first + share.count])
                except ArithmeticError as error:
                    failed[share.state.request_id] = str(error)
                first += share.count
        return ModelRunnerOutput({}, failed=failed, embeddings=vectors, compute_seconds=time.perf_counter() - started)

    def _vector(self, share: Scheduled, rows: npt.NDArray[np.float32]) -> bytes:
        assert share.state.pooler is not None
        return vector_of(share.state.pooler.params, rows, self._encoder, self.model)


def vector_of(params: PoolingParams, rows: npt.NDArray[np.float32], encoder: Encoder, model: ModelInfo) -> bytes:
    """The vector of a text's hidden states [tokens, size]; raises ArithmeticError for numbers that are not finite."""
    pooler = Pooler(params, encoder.head_pooling, encoder.classify)
    wanted = pooler.places(0, len(rows), len(rows))
    pooler.take(wanted.start, rows[wanted.start : wanted.stop])
    return pooler.vector(model.pooling.activation)


def _token_types(scheduled: Sequence[Scheduled], num_rows: int) -> npt.NDArray[np.int64]:
    """The token type of each row: 1 for those of the second text of a pair."""
    types, first = np.zeros(num_rows, dtype=np.int64), 0
    for share in scheduled:
        second = share.state.pooler.params.second_start if share.state.pooler is not None else 0
        if second:
            types[first + second : first + share.count] = 1
        first += share.count
    return types


_CHECKED_LENGTHS = (1, 9, 17, 5, 23)
"""The tokens of the texts with which the check at start compares bits."""


def load_encoder(spec: TorchSpec, operations: Operations | None = None) -> EncoderRunner:
    """Load an encoder; `operations` replaces the machine's kernels (tests). Raises ConfigError."""
    refuse_settings(
        spec,
        "is an encoder, which is computed plainly: leave {} out",
        {
            "--tp, --pp and --hosts": spec.is_divided,
            "--quantization": spec.quantization is not None,
            "--kv-cache-dtype": spec.cache_dtype != "auto",
            "--host-cache-memory": spec.host_cache_bytes > 0,
            "--speculative-config": spec.draft is not None,
        },
    )
    device = resolve_device(spec.device)
    chosen = prepared_operations(spec, device, operations)
    pooling = read_pooling(spec.model_dir)
    with named_errors(spec.model_dir):
        loaded = load_model_for(chosen, spec.model_dir, spec.weights, device)
        encoder = Encoder(loaded, pooling, chosen, spec.block_size, spec.cache, spec.num_threads)
        reason = settle(chosen, encoder.set_rows_per_call, partial(_why_not_bit_exact, encoder))
    info = replace(
        model_info(spec, loaded, chosen, encoder.layout, pooling.max_length, reason),
        # An encoder generates nothing that could end.
        eos_token_ids=frozenset(),
        embedding_size=encoder.embedding_size,
        capabilities=pooling.capabilities,
        pooling=pooling,
        compute_paths=(
            ComputePath("weights", f"{loaded.dtype}, {loaded.weights.num_bytes >> 20} MiB"),
            products_path(chosen),
            ComputePath("encoder", "transformers' loop over the layers, several texts in a step"),
        ),
    )
    return EncoderRunner(info, encoder)


def _why_not_bit_exact(encoder: Encoder) -> str | None:
    """Compute texts together and one by one, and compare the bits of their hidden states."""
    if (why := why_missed(encoder.missed_products)) is not None:
        return why
    lengths = [min(length, encoder.max_length) for length in _CHECKED_LENGTHS]
    texts = [(np.arange(length) * 7919 + 13 * number) % encoder.vocab_size for number, length in enumerate(lengths)]
    size, first, sequences = encoder.layout.block_size, 1, []
    for text in texts:
        width = -(-text.size // size)
        sequences.append(Rows(text.astype(np.int64), 0, 1, np.arange(first, first + width, dtype=np.int32)))
        first += width
    if first > encoder.num_blocks:
        return TOO_SMALL

    def hidden(some: list[Rows]) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
        batch = flatten_rows(some, encoder.layout, encoder.row_quantum)
        return encoder.compute(batch, np.zeros(batch.token_ids.size, dtype=np.int64))[: batch.query_start[-1]]

    together = hidden(sequences)
    require_finite(together, "numbers")
    alone = np.concatenate([hidden([sequence]) for sequence in sequences])
    if not np.array_equal(together.view(np.uint32), alone.view(np.uint32)):
        return "the check at start found different bits for a text alone and beside others"
    return None
