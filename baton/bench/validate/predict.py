"""Simulates each load with what was measured at the other loads.

A prediction uses no measurement of its own load. Step times, and how much nodes of one machine slow each other down,
are fitted to single requests and the other loads. So are the latency of messages (the part of the time to first token
that was neither queueing nor computing), the time that a hand-off takes beyond moving its bytes and, where nodes draft
tokens, how often they do, and how long and how right the drafts are on average. When a request is computed, in which
batch, and how long it waits is decided by the simulated scheduler, placement and hand-offs. A second simulation uses
step times that were fitted to the load itself: it shows errors of queueing apart from errors of the formula.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from baton.bench.arrangement import Arrangement
from baton.bench.nodes.run import NodesRun
from baton.bench.results.outcome import Column, Outcomes
from baton.bench.simulator.config import NodeSizes, SimulatedSpeculation, SimulationConfig
from baton.bench.simulator.drafts import DraftTotals
from baton.bench.simulator.simulation import Simulated, simulate
from baton.bench.simulator.step_times import FormulaTimes
from baton.bench.validate.fit import Fitted, StepCost, costs_of, fit
from baton.bench.workloads.spec import WorkloadSpec
from baton.errors import BatonError
from baton.messages.node import NodeDescription, StepFigures
from baton.messages.speculation import MAX_DRAFTS

# The drafts of real nodes, as the simulator's parameters.


_HALVINGS = 50
"""Halvings of an interval of shares, after which it is as narrow as a float."""


def observed_speculation(steps: Iterable[StepFigures]) -> SimulatedSpeculation | None:
    """Drafts as frequent, as long and as often right as in these steps on average; None: nothing was drafted.

    A real text repeats itself in places, and drafts adapt to it. The simulator only knows averages: all its drafts have
    the mean length, come with the mean frequency, and yield the mean number of tokens.
    """
    totals = DraftTotals()
    for step in steps:
        totals.add(DraftTotals(step.decode_sequences, step.drafts, step.draft_tokens, step.accepted_tokens))
    if not totals.num_drafts or not totals.num_decodes:
        return None
    length = min(MAX_DRAFTS, max(1, round(totals.num_draft_tokens / totals.num_drafts)))
    share = share_of(totals.num_accepted_tokens / totals.num_drafts, length)
    coverage = min(1.0, totals.num_drafts / totals.num_decodes)
    return SimulatedSpeculation(share, length, coverage=coverage, adapts=False)


def share_of(num_accepted: float, length: int) -> float:
    """The share of right tokens with which a draft of this length yields so many on average: share + share^2 + …."""
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if sum(middle**power for power in range(1, length + 1)) < num_accepted:
            low = middle
        else:
            high = middle
    return (low + high) / 2


MAX_BACKGROUND_SHARE = 0.08
"""Share of all cores that other processes may use without disturbing a measurement."""
_IDLE_PERCENTILE = 25
"""Percentile of queueing time at which requests are taken to have found an idle node."""
_LOCAL_BYTES_PER_S = 5e9
"""Bandwidth of a hand-off through shared memory. Its time beyond that is measured."""


@dataclass(frozen=True, slots=True)
class Overheads:
    """Latency of a request outside of steps, seconds."""

    message_s: float
    """Latency of a message between client and node, in each direction."""
    handoff_s: float
    """Time of a hand-off beyond moving its bytes."""


@dataclass(frozen=True, slots=True)
class Means:
    """Mean latencies in milliseconds."""

    ttft_ms: float
    tpot_ms: float

    @staticmethod
    def of(*runs: Outcomes) -> Means:
        """The means over the requests of all runs; raises BatonError if none was answered."""
        ttft_s = np.concatenate([run.ttft_s[run.is_complete] for run in runs])
        if not len(ttft_s):
            errors = [error for run in runs for error in run.errors]
            raise BatonError(f"no request was answered: {next(iter(errors), 'none ended in time')}")
        tpot_s = np.concatenate([run.tpot_s[_several(run)] for run in runs])
        return Means(float(ttft_s.mean()) * 1e3, float(tpot_s.mean()) * 1e3 if len(tpot_s) else 0.0)


@dataclass(frozen=True, slots=True)
class Segment:
    """A short run of a load on real nodes; the segments of several loads are interleaved."""

    workload: WorkloadSpec
    live: NodesRun
    background_share: float
    """Share of the cores that other processes used meanwhile."""
    max_concurrency: int | None = None

    @property
    def outcomes(self) -> Outcomes:
        return self.live.run.outcomes

    @property
    def is_undisturbed(self) -> bool:
        return self.background_share <= MAX_BACKGROUND_SHARE

    def costs(self) -> list[StepCost]:
        """The costs of all steps of all nodes."""
        return costs_of({name: timeline.steps for name, timeline in self.live.timelines.items()})

    def figures(self) -> list[StepFigures]:
        """The figures of all steps of all nodes."""
        return [step.figures for timeline in self.live.timelines.values() for step in timeline.steps]


@dataclass(frozen=True, slots=True)
class LoadPair:
    """One load, live and simulated, segment by segment."""

    rate: float
    segments: Sequence[Segment]
    simulated: Sequence[Simulated]
    """Simulated with step times fitted to the other loads."""
    with_own_steps: Sequence[Simulated]
    """Simulated with step times fitted to this load."""
    overheads: Overheads


class Predictor:
    """Predicts the loads of one model's arrangement whose nodes are all on one machine.

    `singles`: segments with one request at a time.
    """

    def __init__(
        self, arrangement: Arrangement, descriptions: Mapping[str, NodeDescription], singles: Sequence[Segment]
    ) -> None:
        self._arrangement = arrangement
        self._descriptions = descriptions
        self._singles = undisturbed(singles)
        self._costs: dict[int, list[StepCost]] = {}
        self._handoff_s_by_segment: dict[int, tuple[float, int]] = {}

    def pairs(self, loads: Mapping[float, Sequence[Segment]]) -> list[LoadPair]:
        """Simulates the segments of each rate; raises BatonError if there are too few steps to fit step times."""
        chosen = {rate: undisturbed(segments) for rate, segments in loads.items()}
        pairs = []
        for rate, segments in chosen.items():
            others = (
                undisturbed([segment for other in loads if other != rate for segment in loads[other]]) or self._singles
            )
            known = self._fitted([*self._singles, *others])
            overheads = Overheads(self._message_s(others, known), self._handoff_s(others))
            own = self._fitted(segments)
            drafts, own_drafts = speculation_of([*self._singles, *others]), speculation_of(segments)
            pairs.append(
                LoadPair(
                    rate,
                    segments,
                    [self._simulated(segment, known, overheads, drafts) for segment in segments],
                    [self._simulated(segment, own, overheads, own_drafts) for segment in segments],
                    overheads,
                )
            )
        return pairs

    def fit_all(self, loads: Mapping[float, Sequence[Segment]]) -> Fitted:
        """Fits the step times to all loads together."""
        return self._fitted(
            [*self._singles, *(segment for segments in loads.values() for segment in undisturbed(segments))]
        )

    def _fitted(self, segments: Sequence[Segment]) -> Fitted:
        return fit(cost for segment in segments for cost in self._costs_of(segment))

    def _costs_of(self, segment: Segment) -> list[StepCost]:
        costs = self._costs.get(id(segment))
        if costs is None:
            costs = self._costs[id(segment)] = segment.costs()
        return costs

    def _message_s(self, segments: Sequence[Segment], steps: Fitted) -> float:
        """The part of the mean time to first token that was neither waiting nor computing, in each direction.

        The queueing time of requests that found an idle node was their way to the scheduler, and counts as message
        latency. The work before a step with prompts is part of simulated steps already, and does not count.
        """
        rest_s = _known(
            [segment.outcomes.ttft_s - segment.outcomes.queue_s - segment.outcomes.prefill_s for segment in segments]
        )
        waits_s = _known([segment.outcomes.queue_s for segment in segments])
        if not len(rest_s):
            return 0.0
        intake_s = np.percentile(waits_s, _IDLE_PERCENTILE)
        return max(0.0, float(rest_s.mean() + intake_s) - steps.before_prompts_ms / 1e3) / 2

    def _handoff_s(self, segments: Sequence[Segment]) -> float:
        """The mean time that a request took beyond its simulated steps, from its first token on."""
        surpluses = [self._handoff_s_of(segment) for segment in segments]
        count = sum(requests for _, requests in surpluses)
        return max(0.0, sum(seconds for seconds, _ in surpluses) / count) if count else 0.0

    def _handoff_s_of(self, segment: Segment) -> tuple[float, int]:
        """The sum of these times, and the number of requests; simulated with the segment's own steps."""
        surplus = self._handoff_s_by_segment.get(id(segment))
        if surplus is None:
            steps, drafts = self._fitted([segment]), speculation_of([segment])
            bare = self._simulated(segment, steps, Overheads(0.0, 0.0), drafts).outcomes
            live = segment.outcomes
            several = _several(live)
            missing_s = (Means.of(live).tpot_ms - Means.of(bare).tpot_ms) / 1e3
            shares = 1 / (live.output_length[several] - 1)
            surplus = (missing_s / float(shares.mean()) * len(shares), len(shares)) if len(shares) else (0.0, 0)
            self._handoff_s_by_segment[id(segment)] = surplus
        return surplus

    def _simulated(
        self, segment: Segment, steps: Fitted, overheads: Overheads, drafts: SimulatedSpeculation | None
    ) -> Simulated:
        descriptions = self._descriptions
        config = SimulationConfig(
            self._arrangement,
            replace(_sizes(descriptions["decode"], steps.times), speculation=drafts),
            prefill_sizes=_sizes(descriptions["prefill"], steps.times) if "prefill" in descriptions else None,
            nic_bytes_per_s=_LOCAL_BYTES_PER_S,
            network_latency_s=overheads.handoff_s,
            message_s=overheads.message_s,
            max_concurrency=segment.max_concurrency,
            contention=steps.contention,
            keeps_timeline=True,
        )
        return simulate(segment.workload.build(), config)


def undisturbed(segments: Sequence[Segment]) -> list[Segment]:
    """The segments that other processes did not disturb; all of them if there is no such segment."""
    return [segment for segment in segments if segment.is_undisturbed] or list(segments)


def speculation_of(segments: Sequence[Segment]) -> SimulatedSpeculation | None:
    """The drafts of these segments; None: nodes drafted nothing."""
    return observed_speculation(figures for segment in segments for figures in segment.figures())


def _several(outcomes: Outcomes) -> NDArray[np.bool_]:
    """Which requests have more than one token."""
    several: NDArray[np.bool_] = outcomes.is_complete & (outcomes.output_length > 1)
    return several


def _known(columns: Sequence[Column]) -> Column:
    """All values of the columns that are not NaN."""
    values = np.concatenate(columns)
    return values[~np.isnan(values)]


def _sizes(node: NodeDescription, times: FormulaTimes) -> NodeSizes:
    """Sizes of a simulated node that equals this one."""
    return NodeSizes(
        times=times,
        block_size=node.block_size,
        cache_tokens=node.num_blocks * node.block_size,
        kv_bytes_per_token=node.block_bytes / node.block_size,
        max_num_seqs=node.max_num_seqs,
        max_num_batched_tokens=node.max_num_batched_tokens,
        max_model_len=node.max_model_len,
        shape=node.shape,
    )
