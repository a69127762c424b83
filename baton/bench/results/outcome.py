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
from typing import Any, Generic, TypeVar

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


_AS_THEY_ARE = (
    *("index", "planned_s", "sent_s", "finished_s", "input_length", "output_length", "cached_tokens"),
    *("queue_s", "prefill_s"),
)
"""Fields whose columns have their values unchanged."""
_NOT_IN_FILES = ("queue_s", "prefill_s", "retry_after_s")

N = TypeVar("N", np.int64, np.float64)


class _Numbers(Generic[N]):
    """A column of `Outcomes`: one field, kept as numbers of `typecode` and read as an array of `dtype`."""

    def __init__(self, typecode: str, dtype: type[N]) -> None:
        self.typecode = typecode
        self._dtype: type[N] = dtype
        self._name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, outcomes: Outcomes, owner: type) -> NDArray[N]:
        return np.array(outcomes._columns[self._name], dtype=self._dtype)


class Outcomes:
    """Many outcomes as columns, in the order in which they were added: about 90 bytes each, whatever their lengths."""

    index = _Numbers("q", np.int64)
    planned_s = _Numbers("d", np.float64)
    sent_s = _Numbers("d", np.float64)
    first_token_s = _Numbers("d", np.float64)
    """NaN where no token arrived."""
    finished_s = _Numbers("d", np.float64)
    input_length = _Numbers("q", np.int64)
    output_length = _Numbers("q", np.int64)
    largest_gap_s = _Numbers("f", np.float64)
    cached_tokens = _Numbers("q", np.int64)
    attempts = _Numbers("B", np.int64)
    queue_s = _Numbers("f", np.float64)
    prefill_s = _Numbers("f", np.float64)
    retry_after_s = _Numbers("f", np.float64)
    """NaN where the endpoint gave no time."""

    def __init__(self) -> None:
        self._columns: dict[str, array[Any]] = {
            name: array(column.typecode) for name, column in vars(Outcomes).items() if isinstance(column, _Numbers)
        }
        self._error = array("i")
        self._nodes = array("i")
        self._names: dict[str, int] = {"": 0}
        self.gaps = Gaps()
        """Gaps between tokens of all requests that did not fail."""
        self.errors: dict[str, int] = {}
        """How often each error occurred."""

    def __len__(self) -> int:
        return len(self._error)

    def append(self, outcome: Outcome) -> None:
        """Adds one outcome."""
        columns = self._columns
        for name in _AS_THEY_ARE:
            columns[name].append(getattr(outcome, name))
        columns["first_token_s"].append(float("nan") if outcome.first_token_s is None else outcome.first_token_s)
        columns["largest_gap_s"].append(max(outcome.gaps, default=0.0))
        columns["attempts"].append(min(255, outcome.attempts))
        columns["retry_after_s"].append(float("nan") if outcome.retry_after_s is None else outcome.retry_after_s)
        self._error.append(0 if outcome.error is None else self._name(outcome.error or "failed"))
        self._nodes.append(self._name(outcome.prefill_node))
        self._nodes.append(self._name(outcome.decode_node))
        if outcome.error is None:
            self.gaps.add(outcome.gaps)
        else:
            error = outcome.error or "failed"
            self.errors[error] = self.errors.get(error, 0) + 1

    def extend(self, other: Outcomes) -> None:
        """Adds all outcomes of another."""
        for name, column in self._columns.items():
            column.extend(other._columns[name])
        number = {theirs: self._name(name) for name, theirs in other._names.items()}
        self._error.extend(number[theirs] for theirs in other._error)
        self._nodes.extend(number[theirs] for theirs in other._nodes)
        self.gaps.merge(other.gaps)
        for error, count in other.errors.items():
            self.errors[error] = self.errors.get(error, 0) + count

    def _name(self, name: str) -> int:
        return self._names.setdefault(name, len(self._names))

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
        columns: dict[str, Any] = {name: np.array(column) for name, column in self._columns.items()}
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
            for name, column in outcomes._columns.items():
                _unpacked(column, file[name])
            _unpacked(outcomes._error, file["error"])
            _unpacked(outcomes._nodes, file["nodes"])
            names, outcomes.errors = json.loads(file["names"].tobytes())
            outcomes.gaps = Gaps.from_bytes(file["gaps"].tobytes())
        outcomes._names = {name: number for number, name in enumerate(names)}
        return outcomes

    def columns(self) -> dict[str, list[Any]]:
        """The columns of a result file, as JSON values; times are rounded to microseconds."""
        nodes = list(self.node_names())
        return {
            **{name: _json_values(getattr(self, name)) for name in self._columns if name not in _NOT_IN_FILES},
            "error": list(self.error_texts()),
            "prefill_node": [prefill for prefill, _ in nodes],
            "decode_node": [decode for _, decode in nodes],
        }


def _unpacked(mine: array[Any], values: NDArray[Any]) -> None:
    mine.frombytes(values.astype(mine.typecode).tobytes())


def _json_values(column: NDArray[Any]) -> list[float | None]:
    values: list[float | None] = column.tolist()
    if column.dtype == np.int64:
        return values
    return [None if value is None or value != value else round(value, 6) for value in values]
