"""The rows of a step that are computed together, and what the step has yielded so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from baton.engine.batch import SchedulerOutput
from baton.messages.sampling import TokenLogprobs
from baton.runner.execution.input_batch import FlatBatch, RequestState, Scheduled
from baton.runner.execution.prompt_logprobs import PromptChunk, chunks_of


@dataclass(frozen=True, slots=True)
class StepRows:
    """Rows of a step that are computed together: all of them, or a micro-batch."""

    scheduled: Sequence[Scheduled]
    batch: FlatBatch
    samplers: Sequence[Scheduled]
    """The shares from which tokens are sampled, or embeddings taken."""
    chunks: Sequence[PromptChunk]
    """The chunks of prompts whose log-probabilities are wanted."""
    logits_rows: npt.NDArray[np.int64] | None
    """The rows that give logits: those that sample, and behind them those of the chunks. None: those that sample."""

    @classmethod
    def of(cls, scheduled: Sequence[Scheduled], batch: FlatBatch) -> StepRows:
        """The rows of these shares; `batch` has them in the same order."""
        chunks = chunks_of(scheduled)
        rows = np.concatenate([batch.logits_rows, *(chunk.rows for chunk in chunks)]) if chunks else None
        return cls(scheduled, batch, [share for share in scheduled if share.samples], chunks, rows)

    @property
    def wants_hidden(self) -> bool:
        """Whether hidden states are wanted besides logits, for embeddings."""
        return any(share.state.embeds for share in self.samplers)


@dataclass(slots=True)
class StepResults:
    """What a step has yielded so far; see `ModelRunnerOutput` for what is not explained here."""

    decided: SchedulerOutput
    began_at: float
    """From when on the step takes time besides its copies (perf_counter)."""
    copy_seconds: float
    computed_at: float = 0.0
    """When the last rows so far were computed and sampled (perf_counter)."""
    tokens: dict[str, list[int]] = field(default_factory=dict)
    sampled: list[RequestState] = field(default_factory=list)
    """The requests of `tokens`, in their order in the step."""
    logprobs: dict[str, Sequence[TokenLogprobs]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    invalid: set[str] = field(default_factory=set)
    embeddings: dict[str, bytes] = field(default_factory=dict)
    prompt_logprobs: dict[str, Sequence[TokenLogprobs]] = field(default_factory=dict)
