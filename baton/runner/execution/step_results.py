"""The rows of a step that are computed together, and what the step has yielded so far."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from baton.engine.batch import Failure, SchedulerOutput
from baton.messages.sampling import TokenLogprobs
from baton.runner.execution.input_batch import FlatBatch
from baton.runner.execution.pooling import Pooler
from baton.runner.execution.prompt_logprobs import PromptChunk, chunks_of
from baton.runner.execution.request_table import RequestState, Scheduled


@dataclass(frozen=True, slots=True)
class PooledShare:
    """The rows of one request's share of a step from which its vector is made."""

    share: Scheduled
    pooler: Pooler
    start: int
    """The position of the first of them."""
    places: slice
    """Where they are among the rows that are wanted of the step."""

    @property
    def of_logits(self) -> bool:
        """Whether the head's outputs are wanted, and not the hidden states."""
        return self.pooler.takes_logits


@dataclass(frozen=True, slots=True)
class StepRows:
    """Rows of a step that are computed together: all of them, or a micro-batch."""

    scheduled: Sequence[Scheduled]
    batch: FlatBatch
    samplers: Sequence[Scheduled]
    """The shares from which tokens are sampled."""
    chunks: Sequence[PromptChunk]
    """The chunks of prompts whose log-probabilities are wanted."""
    pooled: Sequence[PooledShare]
    """The shares of which vectors are made."""
    logits_rows: npt.NDArray[np.int64] | None
    """The rows that are wanted: those that give logits, and behind them those that give hidden states alone. The first
    ones are those that sample, then come those of the chunks. None: the last rows of all shares that end."""
    sampled: slice | npt.NDArray[np.int64]
    """Where the rows that sample are among the wanted ones."""
    num_logits: int
    """How many of the wanted rows give logits: the first ones."""

    @classmethod
    def of(cls, scheduled: Sequence[Scheduled], batch: FlatBatch) -> StepRows:
        """The rows of these shares; `batch` has them in the same order."""
        chunks = chunks_of(scheduled)
        ending = [share for share in scheduled if share.samples]
        pooled = [share for share in scheduled if share.state.pooler is not None]
        samplers = [share for share in ending if share.state.pooler is None] if pooled else ending
        if not pooled:
            num_sampled = batch.logits_rows.size
            rows = np.concatenate([batch.logits_rows, *(chunk.rows for chunk in chunks)]) if chunks else None
            return cls(
                scheduled,
                batch,
                samplers,
                chunks,
                (),
                rows,
                slice(num_sampled),
                num_sampled if rows is None else rows.size,
            )
        if chunks or not all(_wants_its_end(share) for share in pooled):
            return cls._in_groups(scheduled, batch, samplers, chunks)
        places = dict(zip(map(id, ending), _places(share.num_sampled_rows for share in ending), strict=True))
        shares = [
            PooledShare(given, _pooler(given), given.stop - 1, places[id(given)]) for given in pooled if given.samples
        ]
        sampled = [np.arange(places[id(given)].start, places[id(given)].stop) for given in samplers]
        needs_head = samplers or any(given.of_logits for given in shares)
        return cls(
            scheduled,
            batch,
            samplers,
            chunks,
            shares,
            None,
            np.concatenate(sampled) if sampled else slice(0),
            batch.logits_rows.size if needs_head else 0,
        )

    @classmethod
    def _in_groups(
        cls,
        scheduled: Sequence[Scheduled],
        batch: FlatBatch,
        samplers: Sequence[Scheduled],
        chunks: Sequence[PromptChunk],
    ) -> StepRows:
        """The rows where the wanted ones are others than the last ones: first those with logits, then the others."""
        first_rows = dict(zip(map(id, scheduled), batch.query_start.tolist(), strict=False))
        sampled = [
            np.arange(
                first_rows[id(member)] + member.count - member.num_sampled_rows, first_rows[id(member)] + member.count
            )
            for member in samplers
        ]
        num_sampled = sum(map(len, sampled))
        groups = [*sampled, *(chunk.rows for chunk in chunks)]
        num_wanted = num_logits = sum(map(len, groups))
        pooled = [share for share in scheduled if share.state.pooler is not None]
        pooled.sort(key=lambda share: not _pooler(share).takes_logits)
        grouped = []
        for share in pooled:
            wanted, pooler = _wanted(share), _pooler(share)
            if not wanted and not share.samples:
                continue
            if pooler.takes_logits:
                num_logits += len(wanted)
            groups.append(np.arange(wanted.start, wanted.stop) - share.start + first_rows[id(share)])
            grouped.append(PooledShare(share, pooler, wanted.start, slice(num_wanted, num_wanted + len(wanted))))
            num_wanted += len(wanted)
        return cls(
            scheduled,
            batch,
            samplers,
            chunks,
            grouped,
            np.concatenate(groups) if groups else np.empty(0, dtype=np.int64),
            slice(num_sampled),
            num_logits,
        )

    @property
    def wants_hidden(self) -> bool:
        """Whether vectors are made of rows of this step."""
        return bool(self.pooled)


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
    failed: dict[str, Failure] = field(default_factory=dict)
    embeddings: dict[str, bytes] = field(default_factory=dict)
    prompt_logprobs: dict[str, Sequence[TokenLogprobs]] = field(default_factory=dict)


def _pooler(share: Scheduled) -> Pooler:
    assert share.state.pooler is not None
    return share.state.pooler


def _wanted(share: Scheduled) -> range:
    """The positions whose rows a share's pooler wants."""
    return _pooler(share).places(share.start, share.stop, share.state.num_tokens)


def _wants_its_end(share: Scheduled) -> bool:
    """Whether a share's pooler wants the row of the last token and no other; of one that does not end, no row."""
    return _wanted(share) == (range(share.stop - 1, share.stop) if share.samples else range(0))


def _places(counts: Iterable[int]) -> Iterator[slice]:
    """Where groups of so many rows are that follow each other."""
    end = 0
    for count in counts:
        yield slice(end, end + count)
        end += count
