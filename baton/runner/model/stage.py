"""Stages of a model: which layers each one has, and what it must know of the others (pipeline parallelism)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from baton.engine.runner import LayerGeometry
from baton.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Stage:
    """One of `count` stages, each of which has consecutive layers; by default the only one."""

    index: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        """Whether it has the embedding."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether it has the head."""
        return self.index == self.count - 1

    def layers(self, num_layers: int) -> range:
        """The indices of its layers; the first stages have what is left over. Raises ConfigError for too few layers.

        The last stage has the head besides, so it is not among those with one layer more.
        """
        if num_layers < self.count:
            raise ConfigError(
                f"{num_layers} layers can't be divided among {self.count} stages; at most {num_layers} would do"
            )
        least, more = divmod(num_layers, self.count)
        first = self.index * least + min(self.index, more)
        return range(first, first + least + (self.index < more))


@dataclass(frozen=True, slots=True)
class LayerReport:
    """What a stage has found out of one of its layers."""

    geometry: LayerGeometry
    window: int | None


@dataclass(frozen=True, slots=True)
class StageReport:
    """What a stage has found out of its part of the model."""

    layers: Mapping[int, LayerReport]
    missed_products: Sequence[str]
    """The products outside of Baton's kernels."""
    why_no_own_loop: str
    """Why transformers' loop over the layers runs; empty when Baton's loop replaces it."""
    why_not_fused: str
    """Why torch computes more than copies, so that rows have to be padded; empty when it does not."""
    embedding_size: int
    """The width of the head's input; 0: it can't be observed, or another stage has the head."""
    num_logits: int
    """The width of the head's output; 0: another stage has the head."""
    row_width: int = 0
    """The width of rows that may be given in place of tokens; 0: none may be, or another stage has the embedding."""
    why_no_given_rows: str = ""
    """Why none may be."""

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, text: bytes | bytearray) -> StageReport:
        """The report that `to_json` wrote. Raises ValueError."""
        try:
            read = json.loads(text)
            layers = {
                int(index): LayerReport(LayerGeometry(**layer["geometry"]), layer["window"])
                for index, layer in read.pop("layers").items()
            }
            report = cls(layers=layers, **read)
            texts = (*report.missed_products, report.why_no_own_loop, report.why_not_fused, report.why_no_given_rows)
            numbers = (report.embedding_size, report.num_logits, report.row_width)
            if not all(isinstance(text, str) for text in texts) or not all(isinstance(n, int) for n in numbers):
                raise TypeError(f"{texts} are not texts, or {numbers} not numbers")
            return report
        except (TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"this is no report of a stage ({error!r})") from error


class Stages(Protocol):
    """One stage's view of all stages of a model."""

    @property
    def stage(self) -> Stage:
        """This stage."""
        ...

    @property
    def has_own_cache(self) -> bool:
        """Whether this stage's cache holds its own layers only; otherwise all stages share one with all layers."""
        ...

    def exchange(self, own: StageReport) -> list[StageReport]:
        """The reports of all stages in order, once all have called this. Raises RankLost."""
        ...


class OneStage:
    """The only stage of a model."""

    stage = Stage()
    has_own_cache = False

    def exchange(self, own: StageReport) -> list[StageReport]:
        return [own]


ONE_STAGE = OneStage()
