"""Nodes of several ranks: what a step takes and what fits into memory, from the figures of one rank.

A rank is a device, or a process with cores of its own. Ranks divide the arithmetic and the reading of weights and KV
evenly. What they lose is an exchange for each layer, and with stages the time until the last stage is busy:

1. `tp` ranks compute each layer together. They lose `exchange_ms` in a step and `exchange_token_ms` for each token.
2. `pp` stages divide the layers. The rows of a step are divided into as many micro-batches, at most one for each row,
   which follow each other through the stages. Each micro-batch reads all weights of a stage, and takes `stage_ms` more
   from one stage to the next. A step after an idle time has to fill the stages. With asynchronous scheduling, the
   default with stages, the first micro-batches of the next step follow the last ones of this step; but a sequence
   passes through all stages before it begins anew.
3. The weights are in memory once. All that is left in the memory of the ranks is the KV cache of the node.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from baton.bench.flag import Flag
from baton.bench.simulator.config import NodeSizes
from baton.bench.simulator.step_times import StepTimes
from baton.errors import InvalidRequest
from baton.messages.node_model import NodeShape


@dataclass(frozen=True, slots=True)
class RankFigures:
    """What a division into ranks costs. Defaults: OPT-13B on A100 with NVLink.

    The exchange is what DistServe's profiles of 2 and 4 GPUs take beyond a half and a quarter of those of one
    (simdistserve, profiler-a100-80g.distserve.json): 3.3 and 5.3 ms of a decode step, 5.2 and 6.9 ms of a step with
    prompts, and 0.016 and 0.012 ms of a prompt token. The time from stage to stage is an estimate.
    """

    exchange_ms: Annotated[
        float,
        Flag(
            "Time of a step in which --tp ranks exchange what they computed. Default: that of OPT-13B on A100, or 0 "
            "with --step-times.",
            min=0,
        ),
    ] = 4.5
    exchange_token_ms: Annotated[float, Flag("The same for each token of a step, in milliseconds.", min=0)] = 0.014
    stage_ms: Annotated[float, Flag("Time until a stage has what the stage before it computed.", min=0)] = 0.05
    weight_bytes: Annotated[
        float,
        Flag(
            "Size of the weights, which the ranks of a node divide: each further rank has so much more room for KV. "
            "Default: that of OPT-13B, or 0 with --step-times.",
            "--weights-gb",
            min=0,
            convert=lambda gigabytes: gigabytes * 1e9,
        ),
    ] = 26e9
    rank_bytes: Annotated[
        float | None,
        Flag(
            "Memory of a rank for weights and KV, instead of --cache-tokens.",
            "--rank-memory-gb",
            min=0.001,
            convert=lambda gigabytes: gigabytes * 1e9,
        ),
    ] = None
    """None: as much as one rank needs for the weights and its KV cache."""

    def sizes_of(self, sizes: NodeSizes, shape: NodeShape) -> NodeSizes:
        """The sizes of a node of this shape; `sizes` are those of a node of one rank.

        Raises InvalidRequest if its memory does not hold the weights and one block.
        """
        return replace(
            sizes,
            shape=shape,
            times=sizes.times if shape.num_ranks == 1 else ShapedTimes(sizes.times, shape, self),
            cache_tokens=self._cache_tokens(sizes, shape),
        )

    def _cache_tokens(self, sizes: NodeSizes, shape: NodeShape) -> int:
        per_token, ranks = sizes.kv_bytes_per_token, shape.num_ranks
        if self.rank_bytes is None:
            # Each further rank has room for a cache like the first one's, and for weights that are there already.
            more = self.weight_bytes / per_token if per_token else 0.0
            return ranks * sizes.cache_tokens + int((ranks - 1) * more)
        if not per_token:
            raise InvalidRequest("--rank-memory-gb", "needs --kv-bytes-per-token above 0")
        left = ranks * self.rank_bytes - self.weight_bytes
        if left < sizes.block_size * per_token:
            raise InvalidRequest(
                "--rank-memory-gb",
                f"{ranks} x {self.rank_bytes / 1e9:g} GB ({shape}) do not hold {self.weight_bytes / 1e9:g} GB of "
                "weights and a KV block",
            )
        return int(left / per_token)


class ShapedTimes:
    """The step times of a node of several ranks, from those of one rank."""

    def __init__(self, times: StepTimes, shape: NodeShape, figures: RankFigures) -> None:
        self._times = times
        self._num_ranks = shape.num_ranks
        self._pp = shape.pp
        # A stage has its share of the layers, and so of the exchanges.
        divides_layers = shape.tp > 1
        self._turn_s = (figures.exchange_ms / shape.pp * divides_layers + figures.stage_ms * (shape.pp > 1)) / 1e3
        self._token_s = figures.exchange_token_ms / shape.pp * divides_layers / 1e3

    def step_s(
        self, chunks: Iterable[tuple[int, int]], batch: float, context: float, *, follows: bool = False
    ) -> float:
        chunks = list(chunks)
        rows = sum(end - begin for begin, end in chunks) + batch
        count = max(1, min(self._pp, int(rows)))
        turns = []
        for part, decodes in _micro_batches(chunks, batch, count):
            share = context * decodes / batch if batch else 0.0
            alone_s = self._times.step_s(part, decodes, share) if part else self._times.decode_s(decodes, share)
            turns.append(self._in_turn_s(alone_s, sum(end - begin for begin, end in part) + decodes))
        if follows:
            return max(sum(turns), self._pp * max(turns))
        return sum(turns) + (self._pp - 1) * max(turns)

    def decode_s(self, batch: float, context: float, *, follows: bool = False) -> float:
        count = max(1, min(self._pp, int(batch)))
        alone_s = self._times.decode_s(batch / count, context / count)
        num_turns = self._pp if follows else count + self._pp - 1
        return num_turns * self._in_turn_s(alone_s, batch / count)

    def _in_turn_s(self, alone_s: float, rows: float) -> float:
        """Time of one stage for a micro-batch that a node of one rank computes in `alone_s`."""
        return alone_s / self._num_ranks + self._turn_s + self._token_s * rows


def _micro_batches(
    chunks: Sequence[tuple[int, int]], batch: float, count: int
) -> list[tuple[list[tuple[int, int]], float]]:
    """Divides the rows of prompts, and then those of decodes, into parts that are as even as whole rows permit."""
    num_tokens = sum(end - begin for begin, end in chunks)
    rows = num_tokens + batch
    edges = [int(rows * number / count) for number in range(count)] + [rows]
    parts = []
    for first, last in itertools.pairwise(edges):
        part, at = [], 0
        for begin, end in chunks:
            low, high = max(begin, begin + int(first) - at), min(end, begin + int(min(last, num_tokens)) - at)
            if low < high:
                part.append((low, high))
            at += end - begin
        parts.append((part, max(0.0, last - max(first, num_tokens))))
    return parts
