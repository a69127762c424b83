"""What the simulator says of a load, from what was measured at others. Pure but for the simulations themselves.

It is not told what it is asked. What steps cost, and how much nodes of one machine slow each other down, is fitted from
single requests and the other loads; so are the ways of messages (what of the time to first tokens was neither queueing
nor computing) and what a hand-off takes beyond its bytes. When a request is computed, with whom, and how long it waits
for that comes out of scheduler, placement and hand-offs. Beside it stands what it says with this load's own steps: that
shows its queueing apart from the formula.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from baton.bench.arrangement import Arrangement
from baton.bench.nodes.run import NodesRun
from baton.bench.results.outcome import Column, Outcomes
from baton.bench.simulator.simulation import NodeSizes, Simulated, SimulationConfig, simulate
from baton.bench.simulator.step_times import FormulaTimes
from baton.bench.validate.fit import Fitted, StepCost, costs_of, fitted
from baton.bench.workloads.spec import WorkloadSpec
from baton.errors import BatonError
from baton.messages.node import NodeDescription

QUIET = 0.08
"""Of all cores, what strangers may take without being measured themselves."""
_WAITED_LEAST = 25
"""Percent of requests: nodes were idle when they came."""
_LOCAL_BYTES_PER_S = 5e9
"""Over shared memory: what a hand-off takes beyond its bytes is measured."""


@dataclass(frozen=True, slots=True)
class Overheads:
    """What a request costs outside of steps, seconds."""

    message_s: float
    """Each way between client and node."""
    handoff_s: float
    """Beyond a hand-off's bytes."""


@dataclass(frozen=True, slots=True)
class Means:
    """Milliseconds."""

    ttft_ms: float
    tpot_ms: float

    @staticmethod
    def of(*runs: Outcomes) -> Means:
        """Over the requests of all of them; raises BatonError if none was answered."""
        ttft_s = np.concatenate([one.ttft_s[one.is_complete] for one in runs])
        if not len(ttft_s):
            errors = [error for one in runs for error in one.errors]
            raise BatonError(f"no request was answered: {next(iter(errors), 'no error either')}")
        tpot_s = np.concatenate([one.tpot_s[_several(one)] for one in runs])
        return Means(float(ttft_s.mean()) * 1e3, float(tpot_s.mean()) * 1e3 if len(tpot_s) else 0.0)


@dataclass(frozen=True, slots=True)
class Stretch:
    """A load for some seconds, on real nodes."""

    workload: WorkloadSpec
    live: NodesRun
    strangers: float
    """Which share of the cores others took meanwhile."""
    max_concurrency: int | None = None

    @property
    def outcomes(self) -> Outcomes:
        return self.live.run.outcomes

    @property
    def is_quiet(self) -> bool:
        return self.strangers <= QUIET

    def costs(self) -> list[StepCost]:
        """Of all steps of all nodes."""
        return costs_of({name: one.steps for name, one in self.live.timelines.items()})


@dataclass(frozen=True, slots=True)
class LoadPair:
    """One load, live and simulated, stretch by stretch."""

    rate: float
    stretches: Sequence[Stretch]
    simulated: Sequence[Simulated]
    """With steps that cost what they did at the other loads."""
    with_own_steps: Sequence[Simulated]
    overheads: Overheads


class Predictor:
    """One model's arrangement, all of its nodes on one machine. `singles`: requests that had it for themselves."""

    def __init__(
        self, arrangement: Arrangement, descriptions: Mapping[str, NodeDescription], singles: Sequence[Stretch]
    ) -> None:
        self._arrangement = arrangement
        self._descriptions = descriptions
        self._singles = quiet(singles)
        self._costs: dict[int, list[StepCost]] = {}
        self._beyond_s: dict[int, tuple[float, int]] = {}

    def pairs(self, loads: Mapping[float, Sequence[Stretch]]) -> list[LoadPair]:
        """Each rate's stretches with what is simulated from the other rates'; raises BatonError with too few steps."""
        chosen = {rate: quiet(stretches) for rate, stretches in loads.items()}
        pairs = []
        for rate, stretches in chosen.items():
            others = quiet([one for other in loads if other != rate for one in loads[other]]) or self._singles
            known = self._fitted([*self._singles, *others])
            overheads = Overheads(self._message_s(others, known), self._handoff_s(others))
            own = self._fitted(stretches)
            pairs.append(
                LoadPair(
                    rate,
                    stretches,
                    [self._simulated(one, known, overheads) for one in stretches],
                    [self._simulated(one, own, overheads) for one in stretches],
                    overheads,
                )
            )
        return pairs

    def everything(self, loads: Mapping[float, Sequence[Stretch]]) -> Fitted:
        """What steps cost at all loads together."""
        return self._fitted([*self._singles, *(one for stretches in loads.values() for one in quiet(stretches))])

    def _fitted(self, stretches: Sequence[Stretch]) -> Fitted:
        return fitted(cost for one in stretches for cost in self._costs_of(one))

    def _costs_of(self, stretch: Stretch) -> list[StepCost]:
        found = self._costs.get(id(stretch))
        if found is None:
            found = self._costs[id(stretch)] = stretch.costs()
        return found

    def _message_s(self, stretches: Sequence[Stretch], steps: Fitted) -> float:
        """What of the time to first tokens was neither waiting nor computing. What those who waited least waited was
        their way to the scheduler. What simulated steps last longer is none of it.
        """
        rest_s = _known([one.outcomes.ttft_s - one.outcomes.queue_s - one.outcomes.prefill_s for one in stretches])
        waits_s = _known([one.outcomes.queue_s for one in stretches])
        if not len(rest_s):
            return 0.0
        intake_s = np.percentile(waits_s, _WAITED_LEAST)
        return max(0.0, float(rest_s.mean() + intake_s) - steps.before_prompts_ms / 1e3) / 2

    def _handoff_s(self, stretches: Sequence[Stretch]) -> float:
        """What a request took beyond its simulated steps, from its first token on."""
        beyond = [self._beyond_s_of(one) for one in stretches]
        count = sum(requests for _, requests in beyond)
        return max(0.0, sum(seconds for seconds, _ in beyond) / count) if count else 0.0

    def _beyond_s_of(self, stretch: Stretch) -> tuple[float, int]:
        """In sum, and of how many requests; simulated with this very stretch's steps."""
        found = self._beyond_s.get(id(stretch))
        if found is None:
            bare = self._simulated(stretch, self._fitted([stretch]), Overheads(0.0, 0.0)).outcomes
            live = stretch.outcomes
            several = _several(live)
            missing_s = (Means.of(live).tpot_ms - Means.of(bare).tpot_ms) / 1e3
            shares = 1 / (live.output_length[several] - 1)
            found = (missing_s / float(shares.mean()) * len(shares), len(shares)) if len(shares) else (0.0, 0)
            self._beyond_s[id(stretch)] = found
        return found

    def _simulated(self, stretch: Stretch, steps: Fitted, overheads: Overheads) -> Simulated:
        descriptions = self._descriptions
        config = SimulationConfig(
            self._arrangement,
            _sizes(descriptions["decode"], steps.times),
            prefill_sizes=_sizes(descriptions["prefill"], steps.times) if "prefill" in descriptions else None,
            nic_bytes_per_s=_LOCAL_BYTES_PER_S,
            network_latency_s=overheads.handoff_s,
            message_s=overheads.message_s,
            max_concurrency=stretch.max_concurrency,
            contention=steps.contention,
            keeps_timeline=True,
        )
        return simulate(stretch.workload.build(), config)


def quiet(stretches: Sequence[Stretch]) -> list[Stretch]:
    """Those in which nobody else had much of the machine; all of them if there is none."""
    return [one for one in stretches if one.is_quiet] or list(stretches)


def _several(outcomes: Outcomes) -> NDArray[np.bool_]:
    """Where more than one token came."""
    several: NDArray[np.bool_] = outcomes.is_complete & (outcomes.output_length > 1)
    return several


def _known(columns: Sequence[Column]) -> Column:
    """All values that there are."""
    values = np.concatenate(columns)
    return values[~np.isnan(values)]


def _sizes(node: NodeDescription, times: FormulaTimes) -> NodeSizes:
    """A simulated node like this one."""
    return NodeSizes(
        times=times,
        block_size=node.block_size,
        cache_tokens=node.num_blocks * node.block_size,
        kv_bytes_per_token=node.block_bytes / node.block_size,
        max_num_seqs=node.max_num_seqs,
        max_num_batched_tokens=node.max_num_batched_tokens,
        max_model_len=node.max_model_len,
    )
