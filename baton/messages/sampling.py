"""Sampling parameters of a request, and log-probabilities of the tokens that were sampled."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple, get_args

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


ConstraintKind = Literal["json_schema", "regex", "choice", "grammar"]
CONSTRAINT_KINDS: tuple[ConstraintKind, ...] = get_args(ConstraintKind)
"""The fields of a request that say what the text of its output must be."""


class Constraint(NamedTuple):
    """What the text of an output must be."""

    text: str
    """A JSON schema, a regular expression or a grammar; of a choice, its texts as a JSON list."""
    kind: ConstraintKind = "json_schema"


@value(frozen=True, slots=True)
class SamplingParams:
    """The parameters by which tokens are sampled and the output ends. The router validates them; the engine does not.

    `seed` is always set by the time the engine sees it: the random number for output position i comes from
    (seed, i) alone, so any node draws the same token. temperature 0 means greedy. top_k -1 and top_p 1 mean off.
    """

    temperature: float = _number(1.0, 0.0, 2.0)
    top_k: int = -1
    top_p: float = _number(1.0, 0.0, 1.0, above_low=True)
    min_p: float = _number(0.0, 0.0, 1.0)
    top_n_sigma: float = _number(0.0, 0.0, 100.0)
    """Standard deviations of all logits by which a token's logit may lie below the largest one; 0: off."""
    seed: int = 0
    presence_penalty: float = _number(0.0, -2.0, 2.0)
    frequency_penalty: float = _number(0.0, -2.0, 2.0)
    repetition_penalty: float = _number(1.0, 0.0, 2.0, above_low=True)
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    """The only tokens that may be sampled; empty: any."""
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    """Tokens that the output must not have in a row: the spellings of a request's `bad_words`, by the router."""
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    """How many of the most likely tokens to report at each position of the prompt but the first, beside the prompt's
    token there; None: nothing is reported. Such a request computes its whole prompt and takes nothing of it from a
    cache."""
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    n: int = 1
    """Sequences to generate from the prompt, each with its own seed (`baton/engine/sequences/sequence_group.py`); for
    a beam search, how many of the best sequences to return."""
    beam_width: int = 0
    """Beams of a beam search (see `baton/engine/sequences/beams.py`), which is deterministic; 0: no beam search.
    """
    length_penalty: float = _number(1.0, -10.0, 10.0)
    early_stopping: bool = False
    json_schema: str = ""
    """The JSON schema that the output must satisfy, as text (see `baton/engine/constraints.py`); empty: none."""
    regex: str = ""
    """The regular expression that the whole output must match; empty: none."""
    choice: tuple[str, ...] = ()
    """The texts of which the output must be one; empty: any."""
    grammar: str = ""
    """The context-free grammar, in Lark's notation or in GBNF, that the output must follow; empty: none."""
    speculation: bool = True
    """Whether nodes that draft tokens draft this request's. The tokens are the same either way."""
    repetition_detection: RepetitionDetection | None = None
    """When an output that repeats itself ends with an error; None: never."""

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    def stops(self, eos_token_ids: frozenset[int]) -> frozenset[int]:
        """The tokens at which an output may stop. `eos_token_ids`: those with which the model ends a text."""
        return self.stop_token_ids if self.ignore_eos else self.stop_token_ids | eos_token_ids

    @property
    def has_grammar(self) -> bool:
        """Whether the output is constrained by a grammar."""
        return self.constraint_kind is not None

    @property
    def constraint_kind(self) -> ConstraintKind | None:
        """The field that constrains the output, if one does; requests with several are refused."""
        return next((kind for kind in CONSTRAINT_KINDS if getattr(self, kind)), None)

    @property
    def constraint(self) -> Constraint | None:
        """The constraint of the output, if it has one."""
        kind = self.constraint_kind
        if kind is None:
            return None
        value: str | Sequence[str] = getattr(self, kind)
        return Constraint(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), kind)


NUMBER_RANGES = {one.name: one.metadata[NumberRange] for one in fields(SamplingParams) if NumberRange in one.metadata}
"""The ranges of all parameters for which a range is the only check. Routers check them, and nodes check them again."""


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """A model's own values for fields that a request leaves unset; None: that of `SamplingParams`.

    The names are those of generation_config.json. As in vLLM, `do_sample` plays no role.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    """-1, or as many tokens as are sampled from; a vocabulary may be smaller."""
    min_p: float | None = None
    repetition_penalty: float | None = None

    def given(self) -> dict[str, float]:
        """The values by their names, without those that are None."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: number for name, number in values.items() if number is not None}


MAX_PATTERN_SIZE = 64
"""The largest `RepetitionDetection.max_pattern_size`, in tokens."""

MAX_REPETITIONS = 1024
"""The largest `RepetitionDetection.min_count`."""


@value(frozen=True, slots=True)
class RepetitionDetection:
    """The rule by which an output counts as repeating itself; names as in vLLM."""

    max_pattern_size: int
    """Length of the longest pattern that is looked for, in tokens."""
    min_pattern_size: int = 1
    """Length of the shortest pattern that is looked for, in tokens."""
    min_count: int = 2
    """The number of times in a row that the pattern has to occur."""

    @property
    def is_sound(self) -> bool:
        """Whether all three numbers are within their bounds and the longest pattern is no shorter than the shortest."""
        return (
            1 <= self.min_pattern_size <= self.max_pattern_size <= MAX_PATTERN_SIZE
            and 2 <= self.min_count <= MAX_REPETITIONS
        )


@value(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one output position: of the sampled token and of the most likely tokens."""

    token_id: int
    logprob: float
    rank: int
    """1 for the most likely token."""
    top: Sequence[tuple[int, float]]
    """(token id, log-probability) of the most likely tokens, most likely first."""
