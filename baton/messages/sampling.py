"""How tokens are to be drawn and when an output ends; and what is known of a token that was drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from baton.values import value


@dataclass(frozen=True, slots=True)
class NumberRange:
    """The numbers that a parameter may have: up to `high`, and from `low` on or, where `above_low` is set, above it."""

    low: float
    high: float
    above_low: bool = False

    def __contains__(self, number: float) -> bool:
        # Written so that NaN is in no range.
        return self.low < number <= self.high if self.above_low else self.low <= number <= self.high

    def __str__(self) -> str:
        return f"{'(' if self.above_low else '['}{self.low:g}, {self.high:g}]"


def _number(default: float, low: float, high: float, *, above_low: bool = False) -> Any:
    return field(default=default, metadata={NumberRange: NumberRange(low, high, above_low)})


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn and when to stop. Validated by the router; the engine trusts it.

    `seed` is always set by the time the engine sees it: the random number for output position i comes from
    (seed, i) alone, so any node draws the same token. temperature 0 means greedy. top_k -1 and top_p 1 mean off.
    """

    temperature: float = _number(1.0, 0.0, 2.0)
    top_k: int = -1
    top_p: float = _number(1.0, 0.0, 1.0, above_low=True)
    min_p: float = _number(0.0, 0.0, 1.0)
    seed: int = 0
    presence_penalty: float = _number(0.0, -2.0, 2.0)
    frequency_penalty: float = _number(0.0, -2.0, 2.0)
    repetition_penalty: float = _number(1.0, 0.0, 2.0, above_low=True)
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    n: int = 1
    """Sequences to generate from the prompt, each with a seed of its own
    (`baton/engine/sequences/sequence_group.py`); of a beam search, the best ones."""
    beam_width: int = 0
    """Beams of a beam search (see `baton/engine/sequences/beam_search.py`), which draws nothing; 0: none."""
    length_penalty: float = _number(1.0, -10.0, 10.0)
    early_stopping: bool = False
    json_schema: str = ""
    """What the output must fit, as text (see `baton/engine/sampling/grammar.py`); empty: anything."""
    repetition_detection: RepetitionDetection | None = None
    """An output that repeats itself so ends with an error; None: it may."""

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_grammar(self) -> bool:
        """Whether not every output will do."""
        return bool(self.json_schema)


NUMBER_RANGES = {one.name: one.metadata[NumberRange] for one in fields(SamplingParams) if NumberRange in one.metadata}
"""The ranges of all parameters that are checked by nothing but a range: by routers, and once more by nodes."""

MAX_PATTERN_SIZE = 64

MAX_REPETITIONS = 1024


@value(frozen=True, slots=True)
class RepetitionDetection:
    """When an output repeats itself too often; names as in vLLM."""

    max_pattern_size: int
    """Tokens of the longest pattern that is looked for."""
    min_pattern_size: int = 1
    """And of the shortest one."""
    min_count: int = 2
    """So often in a row the pattern has to come."""

    @property
    def is_sound(self) -> bool:
        """Whether it is within bounds and can be met at all."""
        return (
            1 <= self.min_pattern_size <= self.max_pattern_size <= MAX_PATTERN_SIZE
            and 2 <= self.min_count <= MAX_REPETITIONS
        )


@value(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one output position: of the token drawn and of the `top` most likely ones, best first."""

    token_id: int
    logprob: float
    rank: int
    """1 for the most likely token."""
    top: Sequence[tuple[int, float]]
