"""The rates of all nodes: each node's own while they are fresh, and those of nodes like it. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from baton.messages.node import NodeDescription, StageTimings, StepFigures
from baton.messages.node_model import ONE_RANK, NodeShape
from baton.values import value
from router.placement.rates import AT_ONCE, GUESS, StepLearner, StepRates, TransferLearner


@dataclass(frozen=True, slots=True)
class ComputeClass:
    """What nodes have in common that are assumed to compute equally fast until their steps show otherwise."""

    model_fingerprint: str = ""
    numerics: str = ""
    shape: NodeShape = ONE_RANK
    num_threads: int = 0
    """Threads that compute the model; 0: not known."""

    @classmethod
    def of(cls, node: NodeDescription) -> ComputeClass:
        """The class of a node."""
        return cls(node.model_fingerprint, node.numerics, node.shape, node.num_threads)

    def is_like(self, other: ComputeClass) -> bool:
        """Whether both compute the same model by the same kernels, so that only their sizes differ."""
        return (self.model_fingerprint, self.numerics) == (other.model_fingerprint, other.numerics)

    def assumed(self, known: StepRates, of: ComputeClass) -> StepRates:
        """The rates that this class is assumed to have, from those of another one.

        Work is divided among threads, which the ranks of a node share; where their number is not known, each rank
        counts as much. A step of several stages is computed in as many micro-batches, each of which reads all weights.
        """
        if not self.is_like(of):
            return known
        if self.num_threads and of.num_threads:
            slower = of.num_threads / self.num_threads
        else:
            slower = of.shape.num_ranks / self.shape.num_ranks
        return replace(
            known,
            step_ms=known.step_ms * slower * self.shape.pp / of.shape.pp,
            token_ms=known.token_ms * slower,
            sequence_ms=known.sequence_ms * slower,
            context_ms=known.context_ms * slower,
        )


_STREAM_TOKENS = 128
"""The tokens of a usual stream, whose duration is that for which a node's work on prompts counts as slowing it."""
_SHORTEST_STEP_MS = 0.01
_CLASS_SHARE = 8
"""One in so many steps contributes to the rates of its node's class."""
_MAX_CLASSES = 64
"""With so many classes, those without an attached node are forgotten before another one is added."""
_HALF_LIFE_S = 5.0
"""The half-life of a node's own rates while it reports no steps."""
_AGES_PER_S = 4.0
"""Own rates fade in so many steps a second, between which nothing has to be computed again."""
_NEVER = 1 << 30
_UNKNOWN = ComputeClass()
"""The class of a node that was never attached."""


@value(frozen=True, slots=True)
class MixedWork:
    """What a node that computes prompts beside its streams has reported of both."""

    sequences: int = 0
    """Sequences that decoded in its last step."""
    context_tokens: int = 0
    """The tokens before theirs."""
    prompt_ms: float = 0.0
    """The time that prompts have taken of late at `at`; what lies back by a stream's duration counts for 1/e of it."""
    at: float = 0.0


NO_WORK = MixedWork()


@value(frozen=True, slots=True)
class UsualRates:
    """The rates of the nodes of one class, and how many of their steps these were learnt from."""

    rates: StepRates
    num_steps: int
    num_prompt_steps: int
    """The number of steps that computed prompts."""
    num_decode_steps: int


class _Node:
    """The rates of one node, and when it reported steps last."""

    def __init__(self, prior: StepRates) -> None:
        self.learner = StepLearner(prior)
        self.step_at = self.prompt_at = 0.0
        self.work = NO_WORK
        self._blended: tuple[StepRates, StepRates, int, int, StepRates] | None = None
        """The four inputs of `blended_with`, and its result for them."""

    def note_work(self, step: StepFigures, now: float) -> None:
        """Count the time that the prompts of a step have taken."""
        rates, work = self.learner.rates, self.work
        sequences, context = step.decode_sequences, step.decode_context_tokens
        prompt_ms, at = work.prompt_ms, work.at
        if step.prefill_tokens:
            usual_ms = stream_ms(rates.overhead_ms(sequences, context), rates)
            prompt_ms = prompt_ms * decay((now - at) * 1e3, usual_ms) + step.prefill_tokens * rates.token_ms
            at = now
        self.work = MixedWork(sequences, context, prompt_ms, at)

    def blended_with(self, others: StepRates, now: float) -> StepRates:
        """The node's own rates as far as they are fresh, blended with those of its class."""
        learner = self.learner
        own, age = learner.rates, int((now - self.step_at) * _AGES_PER_S)
        prompt_age = int((now - self.prompt_at) * _AGES_PER_S) if learner.num_prompt_steps else _NEVER
        if age <= 0 and prompt_age <= 0:
            return own
        known = self._blended
        # A new fit is a new object, so identity is enough and cheaper than equality.
        if known is None or known[0] is not own or known[1] is not others or known[2] != age or known[3] != prompt_age:
            fresh, prompts = _freshness(age / _AGES_PER_S), _freshness(prompt_age / _AGES_PER_S)
            blend = StepRates(
                _between(others.step_ms, own.step_ms, fresh),
                _between(others.token_ms, own.token_ms, prompts),
                _between(others.sequence_ms, own.sequence_ms, fresh),
                _between(others.context_ms, own.context_ms, fresh),
                _between(others.rows, own.rows, fresh),
                _between(others.tokens, own.tokens, fresh),
            )
            known = self._blended = (own, others, age, prompt_age, blend)
        return known[4]


class _Class:
    """The rates of the nodes of one class."""

    def __init__(self, key: ComputeClass, prior: StepRates) -> None:
        self.key = key
        self.learner = StepLearner(prior)
        self.num_seen = 0
        """Number of steps of its nodes, of which the learner gets a part."""
        self.rates = prior
        """What a node of this class is assumed to have, until it has shown something else."""


class FleetRates:
    """The rates of all nodes, by incarnation. Seconds on the caller's clock.

    Nodes of one class (`ComputeClass`) are assumed to be equally fast. What no node of a class has done is assumed from
    the class that has done most of it.

    A node that looks slow gets no work, so it could never show that it has become faster. Therefore the rates of a node
    that reports no steps fade into those of its class, until it gets work again.
    """

    def __init__(self) -> None:
        self._classes: dict[ComputeClass, _Class] = {}
        self._class_of: dict[str, _Class] = {}
        """The class of each attached node, by incarnation."""
        self._fleet_transfer = TransferLearner()
        self._nodes: dict[str, _Node] = {}
        self._transfers: dict[str, tuple[TransferLearner, float]] = {}

    @property
    def num_classes(self) -> int:
        """Number of classes that are remembered."""
        return len(self._classes)

    def attach(self, node: NodeDescription) -> None:
        """A node is attached: from now on it has the rates of its class until it shows its own. Idempotent."""
        self._class_of[node.incarnation] = self._class(ComputeClass.of(node))

    def _class(self, key: ComputeClass) -> _Class:
        compute_class = self._classes.get(key)
        if compute_class is None:
            if len(self._classes) >= _MAX_CLASSES:
                used = set(map(id, self._class_of.values()))
                self._classes = {key: known for key, known in self._classes.items() if id(known) in used}
            compute_class = self._classes[key] = _Class(key, GUESS)
            self._assume()
        return compute_class

    def _assume(self) -> None:
        """Compute the rates that each class is assumed to have."""
        for kind in self._classes.values():
            own = kind.learner
            prompts = kind if own.num_prompt_steps else self._most_like(kind, lambda source: source.num_prompt_steps)
            decodes = kind if own.num_decode_steps else self._most_like(kind, lambda source: source.num_decode_steps)
            if prompts is kind and decodes is kind:
                kind.rates = own.rates
                continue
            of_prompts, of_decodes = (
                own.rates if source is kind or source is None else kind.key.assumed(source.learner.rates, source.key)
                for source in (prompts, decodes)
            )
            step_ms = own.rates.step_ms if own.num_steps else max(of_prompts.step_ms, of_decodes.step_ms)
            kind.rates = replace(of_decodes, step_ms=step_ms, token_ms=of_prompts.token_ms)

    def _most_like(self, kind: _Class, num_steps: Callable[[StepLearner], int]) -> _Class | None:
        """The class that has most of these steps: one that differs in its size only, if there is any such class."""
        able = [candidate for candidate in self._classes.values() if num_steps(candidate.learner)]
        return max(
            able, key=lambda candidate: (kind.key.is_like(candidate.key), num_steps(candidate.learner)), default=None
        )

    def add_step(self, incarnation: str, step: StepFigures, now: float) -> None:
        """Take a step of a node."""
        its_class = self._class_of.get(incarnation) or self._class(_UNKNOWN)
        its_class.num_seen += 1
        if its_class.num_seen % _CLASS_SHARE == 0 or its_class.num_seen < AT_ONCE:
            fitted = its_class.learner.rates
            its_class.learner.observe(step)
            if its_class.learner.rates is not fitted:
                self._assume()
        node = self._nodes.get(incarnation)
        if node is None:
            node = self._nodes[incarnation] = _Node(its_class.rates)
        node.learner.observe(step)
        node.note_work(step, now)
        node.step_at = now
        if step.prefill_tokens:
            node.prompt_at = now

    def add_transfer(self, incarnation: str, timings: StageTimings, now: float) -> None:
        """Take a transfer into a node that ended."""
        self._fleet_transfer.observe(timings)
        learner, _ = self._transfers.get(incarnation, (None, 0.0))
        learner = learner or TransferLearner(self._fleet_transfer.ms_per_byte)
        learner.observe(timings)
        self._transfers[incarnation] = (learner, now)

    def forget(self, incarnation: str) -> None:
        """The node is gone."""
        self._class_of.pop(incarnation, None)
        self._nodes.pop(incarnation, None)
        self._transfers.pop(incarnation, None)

    def steps(self, incarnation: str, now: float) -> StepRates:
        """A node's rates; those of its class for what it has not done for long, or has never done."""
        return self.steps_and_work(incarnation, now)[0]

    def steps_and_work(self, incarnation: str, now: float) -> tuple[StepRates, MixedWork]:
        """The same, and what the node has reported of its latest steps."""
        its_class = self._class_of.get(incarnation) or self._class(_UNKNOWN)
        node = self._nodes.get(incarnation)
        return (its_class.rates, NO_WORK) if node is None else (node.blended_with(its_class.rates, now), node.work)

    def usual(self, incarnation: str) -> UsualRates:
        """The rates of the nodes of this one's class."""
        its_class = self._class_of.get(incarnation) or self._class(_UNKNOWN)
        own = its_class.learner
        return UsualRates(its_class.rates, own.num_steps, own.num_prompt_steps, own.num_decode_steps)

    def ms_per_byte(self, incarnation: str, now: float) -> float:
        """The time per byte of transfers into a node, in milliseconds."""
        fleet = self._fleet_transfer.ms_per_byte
        if incarnation not in self._transfers:
            return fleet
        learner, at = self._transfers[incarnation]
        return _between(fleet, learner.ms_per_byte, _freshness(now - at))


def stream_ms(step_ms: float, rates: StepRates) -> float:
    """The duration of a usual stream in milliseconds, if its steps have no prompts and take `step_ms`."""
    return _STREAM_TOKENS * max(step_ms, _SHORTEST_STEP_MS) / rates.tokens


def decay(age_ms: float, duration_ms: float) -> float:
    """The share that is left of work after `age_ms`: 1/e after the duration, which is not 0."""
    return math.exp(-max(0.0, age_ms) / duration_ms)


def _freshness(age_s: float) -> float:
    """The weight of rates that were learnt so long ago, 1 to 0."""
    return float(0.5 ** (max(0.0, age_s) / _HALF_LIFE_S))


def _between(others: float, own: float, freshness: float) -> float:
    return others + (own - others) * freshness
