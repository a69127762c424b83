"""Step times: from a formula with published coefficients, or from measurements of `baton bench engine`.

A step reads the weights once, whatever it computes. Therefore a step with prompts and decodes has only the larger of
the two constants. The attention of a chunk grows with its position in the prompt: its square term is that of its end
minus that of its start, so a prompt costs the same in one chunk or in many, except for the constant of each chunk.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from baton.errors import InvalidRequest


class StepTimes(Protocol):
    """Computes the time of a step in seconds."""

    def step_s(
        self, chunks: Iterable[tuple[int, int]], batch: float, context: float, *, follows: bool = False
    ) -> float:
        """Time of any step. `chunks`: start and end position of each prompt's chunk, the end is exclusive. `batch`
        sequences decode, with `context` tokens of context in total; both may be averages. `follows`: the node
        computed another step until now, so its stages are busy."""
        ...

    def decode_s(self, batch: float, context: float, *, follows: bool = False) -> float:
        """Time of a step without prompts."""
        ...


@dataclass(frozen=True, slots=True)
class FormulaTimes:
    """Coefficients in milliseconds. Defaults: an A100 with OPT-13B, from DistServe's simulator."""

    prefill_ms: float = 18.10
    prefill_token_ms: float = 0.1019
    prefill_square_ms: float = 7.12e-6
    decode_ms: float = 19.93
    decode_context_ms: float = 6.27e-4
    """For each token of context."""
    decode_sequence_ms: float = 0.0385

    def step_s(
        self, chunks: Iterable[tuple[int, int]], batch: float, context: float, *, follows: bool = False
    ) -> float:
        tokens = squares = 0
        for begin, end in chunks:
            tokens += end - begin
            squares += end * end - begin * begin
        ms = self.prefill_ms if tokens else 0.0
        if batch:
            ms = max(ms, self.decode_ms) + self.decode_context_ms * context + self.decode_sequence_ms * batch
        return (ms + self.prefill_token_ms * tokens + self.prefill_square_ms * squares) / 1e3

    def decode_s(self, batch: float, context: float, *, follows: bool = False) -> float:
        return (self.decode_ms + self.decode_context_ms * context + self.decode_sequence_ms * batch) / 1e3


@dataclass(frozen=True, slots=True)
class TableTimes:
    """Linear interpolation between measured points, and extrapolation outside of them."""

    prefill: Sequence[tuple[float, float]]
    """Tokens of a chunk and seconds, in rising order."""
    decode: Sequence[tuple[float, float]]
    """Number of sequences, each with `context_tokens`, and seconds, in rising order."""
    context_tokens: int
    context_token_s: float = 0.0
    """Time for each token of context more than that; less context takes less time."""

    def step_s(
        self, chunks: Iterable[tuple[int, int]], batch: float, context: float, *, follows: bool = False
    ) -> float:
        tokens = sum(end - begin for begin, end in chunks)
        if not tokens:
            return self.decode_s(batch, context)
        if not batch:
            return interpolate(self.prefill, tokens)
        # Decodes add only their time beyond that of the smallest step, which reads the weights.
        alone = self.decode_s(1, self.context_tokens)
        return interpolate(self.prefill, tokens) + max(0.0, self.decode_s(batch, context) - alone)

    def decode_s(self, batch: float, context: float, *, follows: bool = False) -> float:
        measured = interpolate(self.decode, batch)
        return max(measured / 4, measured + self.context_token_s * (context - batch * self.context_tokens))


def interpolate(points: Sequence[tuple[float, float]], x: float) -> float:
    """The value at `x` of the piecewise linear function through the points, at least 0."""
    if len(points) == 1:
        return points[0][1]
    position = min(max(bisect.bisect(points, (x,)), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[position - 1], points[position]
    return max(0.0, y0 + (y1 - y0) * (x - x0) / (x1 - x0))


def read_step_times(path: Path) -> StepTimes:
    """Reads step times from a JSON file; raises InvalidRequest and OSError.

    The file is the output of `baton bench engine -o json`, or a table `{"prefill": [[tokens, ms], ...], "decode":
    [[batch, ms], ...], "context_tokens": N, "context_token_ms": X}`, or has the fields of `FormulaTimes`.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InvalidRequest(str(path), f"not JSON: {error}") from None
    if not isinstance(values, dict):
        raise InvalidRequest(str(path), "not a JSON object")
    try:
        if "prefill_ms" in values and "decode_ms" in values:
            return FormulaTimes(**{name: _not_negative(value) for name, value in values.items()})
        if "prefill_tokens_per_s" in values:
            return _of_engine_report(values)
        return TableTimes(
            _points(values["prefill"]),
            _points(values["decode"]),
            int(values.get("context_tokens", 0)),
            float(values.get("context_token_ms", 0.0)) / 1e3,
        )
    except KeyError as error:
        raise InvalidRequest(str(path), f"not a table of step times: it has no field {error}") from None
    except (TypeError, ValueError) as error:
        raise InvalidRequest(str(path), f"not a table of step times: {error!r}") from None


def _of_engine_report(values: dict[str, object]) -> TableTimes:
    """Only one prompt length was measured: shorter chunks take their share of it, but at least a decode step's time."""
    decode = values["decode"]
    context, prefill_ms = values["context_tokens"], values["prefill_ms"]
    if not isinstance(decode, list) or not isinstance(context, int) or not isinstance(prefill_ms, int | float):
        raise ValueError("decode, context_tokens or prefill_ms is not what `baton bench engine` writes")
    points = _points([(step["batch"], step["step_ms"]) for step in decode])
    least = points[0][1]
    return TableTimes([(1.0, least), (float(context), max(least, prefill_ms / 1e3))], points, context)


def _points(pairs: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Points in rising order, in seconds; raises ValueError without points, or with two of the same size."""
    points = sorted((_not_negative(size), _not_negative(ms) / 1e3) for size, ms in pairs)
    if not points or len({size for size, _ in points}) < len(points):
        raise ValueError("there are no points, or two points of the same size")
    return points


def _not_negative(value: float) -> float:
    number = float(value)
    if not 0 <= number < float("inf"):
        raise ValueError(f"{value!r} is not a duration")
    return number
