"""Makes a request's vector of its prompt's hidden states, step by step as the prompt is computed.

The bits depend on the hidden states alone, whatever the chunks: a mean is summed in float64 in the order of positions,
squares of numbers are added exactly. Vectors are float32, little-endian, as they go over the wire and, base64-encoded,
to clients.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from baton.messages.pooling import Activation, Pooling, PoolingParams

Head = Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]]
"""A pooled hidden state to the outputs of a classification head."""


class Pooler:
    """The vector of one request, of which some hidden states are known."""

    __slots__ = ("_head", "_kind", "_num_taken", "_pooled", "params")

    def __init__(self, params: PoolingParams, head_pooling: Pooling | None = None, head: Head | None = None) -> None:
        """`head_pooling` and `head`: of a classification head that reads pooled hidden states, what it reads, and
        the head itself. Without them a classification is made of the outputs of the model's head at the last token.
        """
        self.params = params
        self._head = head
        self._kind = head_pooling if params.kind is Pooling.CLASSIFY and head_pooling is not None else params.kind
        self._pooled: npt.NDArray[np.float64] | None = None
        """The sum of the hidden states taken so far, or the one that is wanted."""
        self._num_taken = 0
        """For a mean, how many leading positions are in the sum."""

    @property
    def takes_logits(self) -> bool:
        """Whether the vector is made of the head's outputs, and not of hidden states."""
        return self._kind is Pooling.CLASSIFY

    def places(self, start: int, stop: int, num_tokens: int) -> range:
        """Which of the positions [start, stop) of a prompt of `num_tokens` are wanted."""
        match self._kind:
            case Pooling.MEAN:
                return range(start, stop)
            case Pooling.CLS:
                return range(min(stop, 1)) if start == 0 else range(0)
            case _:
                return range(max(start, num_tokens - 1), stop)

    def take(self, start: int, rows: npt.NDArray[np.float32]) -> None:
        """Take the hidden states (or the head's outputs) [n, size] at the positions from `start` on.

        A prompt that begins again replaces what was taken before. Raises ArithmeticError for a mean without the
        positions before.
        """
        if not rows.shape[0]:
            return
        if self._kind is not Pooling.MEAN:
            self._pooled = rows[-1].astype(np.float64)
            return
        if start == 0 or self._pooled is None:
            self._pooled, self._num_taken = np.zeros(rows.shape[1]), 0
        if start != self._num_taken:
            raise ArithmeticError(f"the hidden states of the positions before {start} are missing")
        self._pooled = add_in_order(self._pooled, rows)
        self._num_taken += rows.shape[0]

    def vector(self, activation: Activation = "softmax") -> bytes:
        """The vector of a prompt that is computed. Raises ArithmeticError for numbers that are not finite."""
        params, pooled = self.params, self._pooled
        if pooled is None:
            raise ArithmeticError("the hidden states of the prompt are missing")
        if not np.isfinite(pooled).all():
            raise ArithmeticError("the model produced a non-finite vector")
        if self._kind is Pooling.MEAN:
            pooled = pooled / self._num_taken
        if params.kind is Pooling.CLASSIFY:
            outputs = pooled if self._head is None else self._head(pooled)
            if not np.isfinite(outputs).all():
                raise ArithmeticError("the classification head produced non-finite numbers")
            return _as_bytes(activated(outputs, activation) if params.activate else outputs)
        if params.dimensions:
            pooled = pooled[: params.dimensions]
        return _as_bytes(normalized(pooled) if params.normalize else pooled)


def add_in_order(total: npt.NDArray[np.float64], rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """The sum of a row [size] and rows [n, size], added one after the other."""
    # Along the first axis numpy adds whole rows in their order; its pairwise sums are for the last axis alone.
    summed: npt.NDArray[np.float64] = np.add.reduce(np.vstack((total, rows)), axis=0)
    return summed


def normalized(vector: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The vector at length 1 (L2); zeros stay zeros."""
    length = math.sqrt(math.fsum((vector * vector).tolist()))
    return vector / length if length else vector


def activated(outputs: npt.NDArray[np.float64], activation: Activation) -> npt.NDArray[np.float64]:
    """The probabilities of a classification head's outputs."""
    match activation:
        case "softmax":
            powers = [math.exp(number) for number in (outputs - outputs.max()).tolist()]
            return np.array(powers) / math.fsum(powers)
        case "sigmoid":
            return np.array([_sigmoid(number) for number in outputs.tolist()])
        case "identity":
            return outputs


def _sigmoid(x: float) -> float:
    # exp of a positive number may overflow.
    return 1.0 / (1.0 + math.exp(-x)) if x >= 0 else math.exp(x) / (1.0 + math.exp(x))


def _as_bytes(vector: npt.NDArray[np.float64]) -> bytes:
    return vector.astype("<f4").tobytes()


def embedding_of_number(number: int, size: int, params: PoolingParams | None = None) -> bytes:
    """The vector that runners without a model return: a different one for each 64-bit number, cut and normalised."""
    words = np.arange(1, size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(number)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    row = (words >> np.uint64(40)).astype(np.float32) - np.float32(2.0**23)
    pooler = Pooler(PoolingParams() if params is None else params)
    pooler.take(0, row[np.newaxis])
    return pooler.vector()


class TextQueries(Pooler):
    """The queries of a transcript's tokens, of the heads that align: collected step by step as the prompt is computed.

    Queries are kept, and not scores: of 448 tokens and 8 heads they have 0.9 MB, where the scores have 21 MB.
    """

    __slots__ = ("_pieces", "_stop")

    def __init__(self, params: PoolingParams) -> None:
        super().__init__(params)
        self._pieces: list[npt.NDArray[np.float32]] = []
        self._stop = params.first_row
        """The position behind the last row that was taken."""

    def places(self, start: int, stop: int, num_tokens: int) -> range:
        """Which of the positions [start, stop) are wanted: from the token before the transcript on."""
        return range(max(start, self.params.first_row), stop)

    def take(self, start: int, rows: npt.NDArray[np.float32]) -> None:
        """Take the queries [n, heads, size] at the positions from `start` on.

        A prompt that begins again replaces what was taken before. Raises ArithmeticError if positions before are
        missing.
        """
        if not rows.shape[0]:
            return
        if start == self.params.first_row:
            self._pieces, self._stop = [], start
        if start != self._stop:
            raise ArithmeticError(f"the queries of the positions before {start} are missing")
        self._pieces.append(rows)
        self._stop += rows.shape[0]

    @property
    def queries(self) -> npt.NDArray[np.float32]:
        """All queries [tokens, heads, size] of a prompt that is computed, beginning with the token before the
        transcript."""
        return np.concatenate(self._pieces)
