"""Outcomes of requests: one as a value, many as columns.

All times are seconds on one monotonic clock: the client's, or the simulator's virtual clock. Times of other processes
are never mixed in.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from baton.bench.results.gaps import Gaps

Column = NDArray[np.float64]


@dataclass(slots=True)
class Outcome:
    """The outcome of one request. Treat it as frozen; it is not, because frozen dataclasses are slow to make."""

    index: int
    planned_s: float
    """When the request was due. Latencies count from here, so that a late generator hides no latency."""
    sent_s: float
    first_token_s: float | None
    """None: no token arrived."""
    finished_s: float
    input_length: int
    """Tokens of the prompt."""
    output_length: int
    """Tokens that arrived."""
    gaps: Sequence[float] = ()
    """Seconds between messages with tokens; one less than there were messages."""
    cached_tokens: int = 0
    attempts: int = 1
    error: str | None = None
    """One line; None: the request succeeded."""
    prefill_node: str = ""
    decode_node: str = ""
    queue_s: float = 0.0
    """Durations as the cluster reported them, each measured on one clock, so they can be added to others."""
    prefill_s: float = 0.0
    retry_after_s: float | None = None
    """Seconds after which to retry, as a refusal said; None for everything else."""


class Outcomes:
    """Many outcomes as columns: about 90 bytes each, whatever their lengths."""

    def __init__(self) -> None:
        self._index = array("q")
        self._planned = array("d")
        self._sent = array("d")
        self._first = array("d")
        self._finished = array("d")
        self._input = array("q")
        self._output = array("q")
        self._largest_gap = array("f")
        self._cached = array("q")
        self._attempts = array("B")
        self._queue = array("f")
        self._prefill = array("f")
        self._retry_after = array("f")
        self._error = array("i")
        self._nodes = array("i")
        self._names: dict[str, int] = {"": 0}
        self.gaps = Gaps()
        """Gaps between tokens of all requests that did not fail."""
        self.errors: dict[str, int] = {}
        """How often each error occurred."""

    def __len__(self) -> int:
        return len(self._index)

    def append(self, outcome: Outcome) -> None:
        """Adds one outcome."""
        self._index.append(outcome.index)
        self._planned.append(outcome.planned_s)
        self._sent.append(outcome.sent_s)
        self._first.append(float("nan") if outcome.first_token_s is None else outcome.first_token_s)
        self._finished.append(outcome.finished_s)
        self._input.append(outcome.input_length)
        self._output.append(outcome.output_length)
        self._cached.append(outcome.cached_tokens)
        self._attempts.append(min(255, outcome.attempts))
        self._queue.append(outcome.queue_s)
        self._prefill.append(outcome.prefill_s)
        self._retry_after.append(float("nan") if outcome.retry_after_s is None else outcome.retry_after_s)
        self._error.append(0 if outcome.error is None else self._name(outcome.error or "failed"))
        self._nodes.append(self._name(outcome.prefill_node))
        self._nodes.append(self._name(outcome.decode_node))
        self._largest_gap.append(max(outcome.gaps, default=0.0))
        if outcome.error is None:
            self.gaps.add(outcome.gaps)
        else:
            error = outcome.error or "failed"
            self.errors[error] = self.errors.get(error, 0) + 1

    def extend(self, other: Outcomes) -> None:
        """Adds all outcomes of another."""
        for mine, theirs in zip(self._plain(), other._plain(), strict=True):
            mine.extend(theirs)
        number = {theirs: self._name(name) for name, theirs in other._names.items()}
        self._error.extend(number[name] for name in other._error)
        self._nodes.extend(number[name] for name in other._nodes)
        self.gaps.merge(other.gaps)
        for error, count in other.errors.items():
            self.errors[error] = self.errors.get(error, 0) + count

    def _plain(self) -> tuple[array[Any], ...]:
        return (
            *(self._index, self._planned, self._sent, self._first, self._finished),
            *(self._input, self._output, self._largest_gap, self._cached, self._attempts),
            *(self._queue, self._prefill, self._retry_after),
        )

    def _name(self, name: str) -> int:
        return self._names.setdefault(name, len(self._names))

    # Columns, in the order in which outcomes were added.

    @property
    def index(self) -> NDArray[np.int64]:
        return np.array(self._index, dtype=np.int64)

    @property
    def planned_s(self) -> Column:
        return np.array(self._planned)

    @property
    def sent_s(self) -> Column:
        return np.array(self._sent)

    @property
    def first_token_s(self) -> Column:
        """NaN where no token arrived."""
        return np.array(self._first)

    @property
    def finished_s(self) -> Column:
        return np.array(self._finished)

    @property
    def input_length(self) -> NDArray[np.int64]:
        return np.array(self._input, dtype=np.int64)

    @property
    def output_length(self) -> NDArray[np.int64]:
        return np.array(self._output, dtype=np.int64)

    @property
    def cached_tokens(self) -> NDArray[np.int64]:
        return np.array(self._cached, dtype=np.int64)

    @property
    def attempts(self) -> NDArray[np.int64]:
        return np.array(self._attempts, dtype=np.int64)

    @property
    def largest_gap_s(self) -> Column:
        return np.array(self._largest_gap, dtype=np.float64)

    @property
    def queue_s(self) -> Column:
        return np.array(self._queue, dtype=np.float64)

    @property
    def prefill_s(self) -> Column:
        return np.array(self._prefill, dtype=np.float64)

    @property
    def retry_after_s(self) -> Column:
        """NaN where the endpoint gave no time."""
        return np.array(self._retry_after, dtype=np.float64)

    @property
    def is_complete(self) -> NDArray[np.bool_]:
        """Where the request succeeded and a token arrived."""
        is_complete: NDArray[np.bool_] = np.array(self._error, dtype=np.int64) == 0
        is_complete &= ~np.isnan(self.first_token_s)
        return is_complete

    @property
    def ttft_s(self) -> Column:
        return self.first_token_s - self.planned_s

    @property
    def e2el_s(self) -> Column:
        return self.finished_s - self.planned_s

    @property
    def tpot_s(self) -> Column:
        """Time per output token after the first; 0 for a single token, as in vLLM."""
        behind = self.output_length - 1
        return np.where(behind > 0, (self.finished_s - self.first_token_s) / np.maximum(behind, 1), 0.0)

    def error_texts(self) -> Iterator[str | None]:
        """The error of each request; None where it succeeded."""
        names = list(self._names)
        return (names[number] if number else None for number in self._error)

    def node_names(self) -> Iterator[tuple[str, str]]:
        """Prefill and decode node of each request."""
        names = list(self._names)
        return ((names[self._nodes[at]], names[self._nodes[at + 1]]) for at in range(0, len(self._nodes), 2))

    def to_bytes(self) -> bytes:
        """Encodes all outcomes for `from_bytes` in another process, in numpy's format without pickle."""
        file = BytesIO()
        columns: dict[str, Any] = {f"column{at}": np.array(column) for at, column in enumerate(self._plain())}
        names = np.frombuffer(json.dumps([list(self._names), self.errors]).encode(), np.uint8)
        gaps = np.frombuffer(self.gaps.to_bytes(), np.uint8)
        errors, nodes = np.array(self._error), np.array(self._nodes)
        np.savez(file, names=names, gaps=gaps, error=errors, nodes=nodes, **columns)
        return file.getvalue()

    @staticmethod
    def from_bytes(data: bytes) -> Outcomes:
        """Decodes what `to_bytes` returned; raises ValueError."""
        outcomes = Outcomes()
        with np.load(BytesIO(data), allow_pickle=False) as file:
            for number, column in enumerate(outcomes._plain()):
                _unpacked(column, file[f"column{number}"])
            _unpacked(outcomes._error, file["error"])
            _unpacked(outcomes._nodes, file["nodes"])
            names, outcomes.errors = json.loads(file["names"].tobytes())
            outcomes.gaps = Gaps.from_bytes(file["gaps"].tobytes())
        outcomes._names = {name: number for number, name in enumerate(names)}
        return outcomes

    def columns(self, origin_s: float) -> dict[str, list[Any]]:
        """The columns of a result file, as JSON values; times count from `origin_s` and are rounded to microseconds."""
        nodes = list(self.node_names())
        return {
            "index": self.index.tolist(),
            "planned_s": _rounded(self.planned_s - origin_s),
            "sent_s": _rounded(self.sent_s - origin_s),
            "first_token_s": _rounded(self.first_token_s - origin_s),
            "finished_s": _rounded(self.finished_s - origin_s),
            "input_length": self.input_length.tolist(),
            "output_length": self.output_length.tolist(),
            "largest_gap_s": _rounded(self.largest_gap_s),
            "cached_tokens": self.cached_tokens.tolist(),
            "attempts": self.attempts.tolist(),
            "error": list(self.error_texts()),
            "prefill_node": [prefill for prefill, _ in nodes],
            "decode_node": [decode for _, decode in nodes],
        }


def _unpacked(mine: array[Any], values: NDArray[Any]) -> None:
    mine.frombytes(values.astype(mine.typecode).tobytes())


def _rounded(column: Column) -> list[float | None]:
    return [None if value != value else round(value, 6) for value in column.tolist()]
