"""What a sampler on a device is told of a step's rows, as arrays, and what it answers; in numpy.

What follows from a request's parameters alone is worked out once, and kept. A row whose token is simply the one with
the largest logit has nothing but a cell. All others have `Field`s and `Real`s. Lists of tokens (biases, tokens that
occurred, excluded ones) lie behind each other for all rows, each row's from one place to another; masks of allowed
tokens are rows of bits.

A *place* stands for a token and its logit in one int64: in the high half the bits of the float32, turned so that they
have the order of the numbers, in the low half what is left of 2^32 - 1 above the token's id. The largest place is that
of the largest logit, and of equal ones that of the lowest id.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum, auto
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from baton.messages.sampling import SamplingParams, TokenLogprobs
from baton.runner.execution.sampler import Sampled, SamplingState, has_penalties, no_token_left, not_finite
from baton.runner.execution.token_counts import TokenCounts
from baton.runner.execution.token_rules import TokenRules, has_rules

Array = npt.NDArray[Any]

NOTHING = -(2**63)
"""Stands for no place: a cell has it before, and after if no token is possible."""
NOT_FINITE = 2**63 - 1
"""Stands in the cell of a row with a logit that is not finite."""
ID_BITS = 0xFFFFFFFF
UNITS = 2**44
"""What the heaviest token weighs."""
MOST_TOKENS = 2**19 - 1
"""The largest vocabulary: all its weights together fit into an int64."""

_MOST_KNOWN = 1024
"""Requests whose parameters are kept; once there are more at the beginning of a step, all are worked out anew."""


class Field(IntEnum):
    """The int64 numbers of a row that is drawn."""

    ROW = 0
    SEED = auto()
    """Modulo 2^64."""
    POSITION = auto()
    TOP_K = auto()
    """0: off."""
    MASK = auto()
    """Its row of the masks; -1: every token is allowed."""
    BIASES = auto()
    BIASES_END = auto()
    OCCURRENCES = auto()
    OCCURRENCES_END = auto()
    EXCLUDED = auto()
    EXCLUDED_END = auto()
    IS_EDITED = auto()
    """Whether it has a mask or lists."""


class Real(IntEnum):
    """The float64 numbers of a row that is drawn, by the names of `SamplingParams`."""

    TEMPERATURE = 0
    MIN_P = auto()
    TOP_N_SIGMA = auto()
    TOP_P = auto()
    REPETITION = auto()
    FREQUENCY = auto()
    PRESENCE = auto()


class ReportField(IntEnum):
    """The int64 numbers of a row whose log-probabilities are wanted."""

    ROW = 0
    MASK = auto()
    """Its row of the masks; -1: every token is possible."""
    NUM_BEST = auto()
    RESULT = auto()
    """Where its report is among the results: the largest logit's place, the drawn token's, the sum of all weights, the
    drawn token's rank, and the places of the best tokens, best first."""


REPORT_HEAD = 4
"""How many numbers a report has before the places of the best tokens."""


class Drawing(NamedTuple):
    """What `draw` takes, in numpy or on a device."""

    fields: Any
    reals: Any
    biased: Any
    """int32: tokens with a bias."""
    biases: Any
    """float32"""
    occurring: Any
    """int32: tokens with penalties."""
    times: Any
    """int32: how often they occur in the output."""
    excluded: Any
    """int32: tokens that may not be drawn."""
    masks: Any
    """int32 [masks, words], lowest bit of the first word first."""


class StepArrays(NamedTuple):
    """What a device is told of a step."""

    results: Array
    """int64: the cells of all rows, and behind them the reports."""
    drawing: Drawing
    reports: Array
    """int64 [reported rows, ReportField]"""


@dataclass(slots=True)
class _Known:
    """What follows from the parameters of a request."""

    params: SamplingParams
    """Kept, so that no other object has its id."""
    fields: list[int]
    reals: list[float]
    rules: TokenRules | None
    biased: Array
    biases: Array
    allowed: Array | None
    """A row of bits."""
    has_penalties: bool
    is_simple: bool
    """Whether the largest logit decides unless there are a grammar or min_tokens."""


class SamplingArrays:
    """Makes the arrays of steps for one size of vocabulary, and results of the answers."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._num_words = -(-vocab_size // 32)
        self._known: dict[int, _Known] = {}

    def of_step(self, states: Sequence[SamplingState]) -> StepArrays:
        """The arrays of a step with a row for each state."""
        if len(self._known) > _MOST_KNOWN:
            self._known.clear()
        lists = _Lists(self._num_words)
        fields: list[list[int]] = []
        reals: list[list[float]] = []
        reports: list[list[int]] = []
        num_results = len(states)
        for row, state in enumerate(states):
            params = state.params
            known = self._known.get(id(params)) or self._learn(params)
            position = state.num_output_tokens
            has_minimum = position < params.min_tokens
            if not known.is_simple or has_minimum or state.mask is not None:
                own = known.fields.copy()
                own[Field.ROW], own[Field.POSITION] = row, position
                self._edit(own, known, state, lists, has_minimum)
                fields.append(own)
                reals.append(known.reals)
            if params.logprobs is not None:
                num_best = min(params.logprobs, self.vocab_size)
                mask = -1 if state.mask is None else lists.add_mask(state.mask)
                reports.append([row, mask, num_best, num_results])
                num_results += REPORT_HEAD + num_best
        results = np.full(num_results, NOTHING, dtype=np.int64)
        drawing = lists.drawing(
            np.array(fields, dtype=np.int64).reshape(-1, len(Field)),
            np.array(reals, dtype=np.float64).reshape(-1, len(Real)),
        )
        return StepArrays(results, drawing, np.array(reports, dtype=np.int64).reshape(-1, len(ReportField)))

    def _learn(self, params: SamplingParams) -> _Known:
        seed = params.seed % 2**64
        fields = [0] * len(Field)
        fields[Field.SEED] = seed - 2**64 if seed >> 63 else seed
        fields[Field.TOP_K] = params.top_k if 0 < params.top_k < self.vocab_size else 0
        fields[Field.MASK] = -1
        rules = TokenRules(params) if has_rules(params) else None
        with np.errstate(over="ignore"):
            biases = np.array(list(params.logit_bias.values()), dtype=np.float64).astype(np.float32)
        known = _Known(
            params,
            fields,
            [
                params.temperature,
                params.min_p,
                params.top_n_sigma,
                params.top_p,
                max(params.repetition_penalty, float(np.finfo(np.float32).tiny)),
                params.frequency_penalty,
                params.presence_penalty,
            ],
            rules,
            np.array(list(params.logit_bias), dtype=np.int32),
            biases,
            self._bits_of(rules.allowed) if rules is not None and rules.allowed.size else None,
            has_penalties(params),
            params.is_greedy and not (params.logit_bias or rules or has_penalties(params)),
        )
        self._known[id(params)] = known
        return known

    def _bits_of(self, token_ids: npt.NDArray[np.int64]) -> Array:
        allowed = np.zeros(self._num_words * 32, dtype=np.bool_)
        allowed[token_ids] = True
        return np.packbits(allowed, bitorder="little").view(np.int32)

    def _edit(self, fields: list[int], known: _Known, state: SamplingState, lists: _Lists, has_minimum: bool) -> None:
        """Add what is done to a row's logits to the lists."""
        params = known.params
        mask = known.allowed
        if state.mask is not None:
            mask = state.mask if mask is None else state.mask & mask
        if mask is not None:
            fields[Field.MASK] = lists.add_mask(mask)
        if known.biased.size:
            fields[Field.BIASES], fields[Field.BIASES_END] = lists.biases.add(known.biased, known.biases)
        if known.has_penalties:
            counts = state.counts or TokenCounts(state.token_ids, state.num_prompt_tokens)
            occurring = counts.occurrences() if params.repetition_penalty != 1.0 else counts.in_output()
            fields[Field.OCCURRENCES], fields[Field.OCCURRENCES_END] = lists.occurrences.add(*occurring)
        excluded: list[int] = []
        if has_minimum:
            excluded += [one for one in params.stops(state.eos_token_ids) if 0 <= one < self.vocab_size]
        if known.rules is not None:
            excluded += known.rules.excluded(state.token_ids, state.num_prompt_tokens).tolist()
        if excluded:
            fields[Field.EXCLUDED], fields[Field.EXCLUDED_END] = lists.excluded.add(np.array(excluded, dtype=np.int32))
        fields[Field.IS_EDITED] = fields[Field.MASK] >= 0 or any(fields[Field.BIASES : Field.IS_EDITED])

    def sampled(self, states: Sequence[SamplingState], step: StepArrays, results: Array) -> list[Sampled]:
        """What follows from the results that a device wrote for a step."""
        cells = results[: len(states)]
        drawn = [Sampled(token_id) for token_id in _tokens(cells).tolist()]
        for row in np.flatnonzero((cells == NOTHING) | (cells == NOT_FINITE)).tolist():
            error = not_finite() if cells[row] == NOT_FINITE else no_token_left(states[row].params)
            drawn[row] = Sampled(-1, error=error)
        if step.reports.size:
            tokens, logits, numbers = _tokens(results).tolist(), _logits(results).tolist(), results.tolist()
            for row, _, num_best, at in step.reports.tolist():
                if drawn[row].error is None:
                    best = slice(at + REPORT_HEAD, at + REPORT_HEAD + num_best)
                    norm = logits[at] + math.log(numbers[at + 2] / UNITS)
                    likely = zip(tokens[best], logits[best], strict=True)
                    top = tuple((one, logit - norm) for one, logit in likely if logit > -math.inf)
                    token_id = drawn[row].token_id
                    logprobs = TokenLogprobs(token_id, logits[at + 1] - norm, numbers[at + 3], top)
                    drawn[row] = Sampled(token_id, logprobs)
        return drawn


class _List:
    """The lists of one kind of all rows, one behind the other."""

    def __init__(self, *dtypes: Any) -> None:
        self._dtypes = dtypes
        self._parts: list[list[Array]] = [[] for _ in dtypes]
        self._size = 0

    def add(self, *columns: Array) -> tuple[int, int]:
        """Append a row's list; returns where it begins and ends."""
        start = self._size
        self._size += columns[0].size
        for parts, column in zip(self._parts, columns, strict=True):
            parts.append(column)
        return start, self._size

    def joined(self) -> Iterator[Array]:
        for parts, dtype in zip(self._parts, self._dtypes, strict=True):
            yield np.concatenate(parts, dtype=dtype) if parts else np.empty(0, dtype=dtype)


class _Lists:
    """The lists and masks of a step."""

    def __init__(self, num_words: int) -> None:
        self._num_words = num_words
        self.biases = _List(np.int32, np.float32)
        self.occurrences = _List(np.int32, np.int32)
        self.excluded = _List(np.int32)
        self._masks: list[Array] = []

    def add_mask(self, bits: Array) -> int:
        """Append a row of bits; returns its place, also of one that was just appended."""
        if not self._masks or self._masks[-1] is not bits:
            self._masks.append(bits)
        return len(self._masks) - 1

    def drawing(self, fields: Array, reals: Array) -> Drawing:
        """All of it, with the rows' numbers."""
        masks = np.array(self._masks, dtype=np.int32).reshape(-1, self._num_words)
        biased, biases = self.biases.joined()
        occurring, times = self.occurrences.joined()
        (excluded,) = self.excluded.joined()
        return Drawing(fields, reals, biased, biases, occurring, times, excluded, masks)


def _tokens(places: Array) -> npt.NDArray[np.int64]:
    ids: npt.NDArray[np.int64] = ID_BITS - (places & ID_BITS)
    return ids


def _logits(places: Array) -> npt.NDArray[np.float64]:
    order = (places >> 32).astype(np.int32)
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).view(np.float32).astype(np.float64)
