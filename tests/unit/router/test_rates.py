"""The rates of nodes that the router estimates, on synthetic nodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from baton.messages.node import StageTimings, StepFigures
from router.placement.fleet_rates import FleetRates
from router.placement.rates import GUESS, StepLearner, StepRates, TransferLearner
from tests.support.router_parts import decode, prefill

CPU = StepRates(step_ms=3.0, token_ms=0.4, sequence_ms=0.8, context_ms=2e-4)
GPU = StepRates(step_ms=7.0, token_ms=0.01, sequence_ms=0.02, context_ms=1e-6)


class SyntheticNode:
    """Makes steps with these rates and 10 % noise; one in fifty takes twenty times as long, or no time."""

    def __init__(self, rates: StepRates, seed: int = 1) -> None:
        self.rates = rates
        self._rng = Random(seed)

    def step(self, prefill_tokens: int, sequences: int, context: int) -> StepFigures:
        time_ms = step_ms(self.rates, prefill_tokens, sequences, context) * self._rng.uniform(0.9, 1.1)
        if self._rng.random() < 0.02:
            time_ms *= self._rng.choice((20, 0.02))
        return StepFigures(time_ms, prefill_tokens, sequences, context)

    def any_step(self) -> StepFigures:
        sequences = self._rng.randrange(24)
        tokens = self._rng.choice((0, 0, 0, self._rng.randrange(1, 512), 512)) or (0 if sequences else 64)
        return self.step(tokens, sequences, sequences * self._rng.randrange(50, 1500))

    def prefill_step(self) -> StepFigures:
        return self.step(self._rng.randrange(1, 512), 0, 0)

    def decode_step(self) -> StepFigures:
        sequences = self._rng.randrange(1, 32)
        return self.step(0, sequences, sequences * self._rng.randrange(50, 1500))


def learn(learner: StepLearner, steps: Callable[[], StepFigures], count: int = 600) -> StepRates:
    """Let a learner observe so many steps, and return what it has learnt."""
    for _ in range(count):
        learner.observe(steps())
    return learner.rates


def step_ms(rates: StepRates, tokens: int, sequences: int, context: int) -> float:
    return rates.overhead_ms(sequences, context) + rates.token_ms * tokens


def faster(rates: StepRates, times: float) -> StepRates:
    parts = (rates.step_ms, rates.token_ms, rates.sequence_ms, rates.context_ms)
    return StepRates(*(part / times for part in parts))


def worst_error(learnt: StepRates, true: StepRates) -> float:
    """Return the largest relative error over typical steps."""
    kinds = [(512, 0, 0), (64, 0, 0), (0, 1, 500), (0, 8, 8000), (0, 24, 24000), (256, 8, 4000)]
    return max(abs(step_ms(learnt, *kind) / step_ms(true, *kind) - 1) for kind in kinds)


@pytest.mark.parametrize("true", [CPU, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("seed", range(4))
def test_a_nodes_rates_are_estimated_despite_outliers(true: StepRates, seed: int) -> None:
    assert worst_error(learn(StepLearner(), SyntheticNode(true, seed).any_step), true) < 0.1


def test_a_node_that_slows_down_is_noticed() -> None:
    slow, learner = faster(CPU, 1 / 3), StepLearner()
    for rates in (CPU, slow):
        learn(learner, SyntheticNode(rates).any_step, 2000)
    assert worst_error(learner.rates, slow) < 0.15


class DraftingNode(SyntheticNode):
    """Drafts four tokens for each sequence that decodes, of which `right` in four are right."""

    def __init__(self, rates: StepRates, right: int) -> None:
        super().__init__(rates)
        self._right = right

    def step(self, prefill_tokens: int, sequences: int, context: int) -> StepFigures:
        made = super().step(prefill_tokens, 5 * sequences, context)
        drafted, right = 4 * sequences, self._right * sequences
        return replace(made, decode_sequences=sequences, drafts=sequences, draft_tokens=drafted, accepted_tokens=right)


def test_a_drafting_node_has_more_rows_and_more_tokens_in_a_step() -> None:
    learner = StepLearner()
    rates = learn(learner, DraftingNode(CPU, right=3).any_step)
    assert (rates.rows, rates.tokens) == (pytest.approx(5.0, rel=0.01), pytest.approx(4.0, rel=0.01))
    for sequences in (1, 8, 20):
        true_ms = CPU.overhead_ms(5 * sequences, 500 * sequences)
        assert rates.overhead_ms(sequences, 500 * sequences) == pytest.approx(true_ms, rel=0.1)
    assert learn(learner, DraftingNode(CPU, right=0).any_step, 3000).tokens == pytest.approx(1.0, abs=0.02), (
        "its texts have changed"
    )


def test_nodes_without_drafts_have_exactly_one_row_and_token() -> None:
    fleet, node = FleetRates(), SyntheticNode(CPU)
    for number in range(300):
        fleet.add_step("p", node.prefill_step(), number)
        fleet.add_step("d", node.decode_step(), number)
    for name in ("p", "d", "new"):
        for now in (300.0, 302.5, 400.0):
            rates = fleet.steps(name, now)
            assert (rates.rows, rates.tokens) == (1.0, 1.0)


def test_drafts_of_a_node_are_its_own_until_it_is_unused_for_long() -> None:
    fleet, plain, drafting = FleetRates(), SyntheticNode(CPU), DraftingNode(CPU, right=2)
    rng = Random(1)
    for _ in range(6000):
        name = rng.choice(("plain", "drafting"))
        fleet.add_step(name, (drafting if name == "drafting" else plain).decode_step(), 0)
    assert fleet.steps("plain", 0).tokens < 1.02
    assert fleet.steps("drafting", 0).tokens > 2.9
    average = fleet.steps("new", 0).tokens
    assert 1.5 < average < 2.5
    assert fleet.steps("drafting", 60).tokens == pytest.approx(average, rel=0.01)


def test_a_node_that_computes_prompts_for_long_keeps_its_rows() -> None:
    learner = StepLearner(StepRates(3.0, 0.4, 0.8, 2e-4, rows=5.0, tokens=3.0))
    learn(learner, SyntheticNode(CPU).prefill_step, 3000)
    assert (learner.rates.rows, learner.rates.tokens) == (5.0, 3.0)
    # Drafts of no sequence are no figures of a node.
    learner.observe(StepFigures(5.0, 0, 0, 0, 1, 2**32 - 1, 2**32 - 1))
    assert learner.rates.rows == 5.0


def test_rates_that_no_step_measures_stay_unchanged() -> None:
    node, learner = SyntheticNode(CPU), StepLearner()
    learn(learner, node.any_step)
    learn(learner, node.decode_step, 5000)
    assert learner.rates.token_ms == pytest.approx(CPU.token_ms, rel=0.15)
    assert worst_error(learner.rates, CPU) < 0.15


def test_rates_are_never_negative_and_invalid_figures_are_ignored() -> None:
    learner = StepLearner()
    for number in range(200):
        # The more it does the faster it is: no node is so.
        learner.observe(StepFigures(100.0 - number % 90, number % 90, number % 7, number % 5))
    rates = learner.rates
    assert min(rates.step_ms, rates.token_ms, rates.sequence_ms, rates.context_ms) >= 0
    before = StepLearner()
    for time_ms in (0.0, -1.0, float("inf"), float("nan")):
        before.observe(StepFigures(time_ms, 1, 1, 1))
    assert (before.rates, before.num_steps) == (GUESS, 0)


def test_a_new_node_starts_with_the_average_rates_and_learns_quickly() -> None:
    fleet, old = FleetRates(), SyntheticNode(CPU)
    assert fleet.steps("new", 0) == GUESS
    for _ in range(1000):
        fleet.add_step("prefill", old.prefill_step(), 0)
        fleet.add_step("decode", old.decode_step(), 0)
    assert worst_error(fleet.steps("new", 0), CPU) < 0.1
    # A decode node knows from the others what computing a prompt would cost it.
    assert fleet.steps("decode", 0).token_ms == pytest.approx(CPU.token_ms, rel=0.5)
    quick = SyntheticNode(faster(CPU, 2))
    for _ in range(12):
        fleet.add_step("new", quick.prefill_step(), 0)
    assert fleet.steps("new", 0).token_ms < 0.7 * CPU.token_ms
    fleet.forget("new")
    assert fleet.steps("new", 0).token_ms > 0.8 * CPU.token_ms


def test_the_rates_of_an_unused_slow_node_return_to_those_of_the_fleet() -> None:
    fleet, old = FleetRates(), SyntheticNode(CPU)
    slow = SyntheticNode(StepRates(*(10 * rate for rate in (CPU.step_ms, CPU.token_ms, 0.0, 0.0))))
    for _ in range(128):
        fleet.add_step("slow", slow.prefill_step(), 0)
    fleet.add_transfer("slow", StageTimings(transfer_ms=4000.0, kv_bytes=4 << 20), 0)
    fleet.add_transfer("slow", StageTimings(transfer_ms=4000.0, kv_bytes=4 << 20), 0)
    for second in range(40):
        for _ in range(50):
            fleet.add_step("others", old.prefill_step(), second)
        fleet.add_transfer("others", StageTimings(transfer_ms=4.0, kv_bytes=4 << 20), second)
    assert fleet.steps("slow", 0).token_ms > 5 * CPU.token_ms
    assert fleet.steps("slow", 40).token_ms < 1.2 * CPU.token_ms
    assert fleet.ms_per_byte("slow", 0) > 100 * fleet.ms_per_byte("others", 40)
    assert fleet.ms_per_byte("slow", 40) < 5 * fleet.ms_per_byte("others", 40)
    # What goes on being slow stays known to be.
    for _ in range(128):
        fleet.add_step("slow", slow.prefill_step(), 40)
    assert fleet.steps("slow", 40).token_ms > 5 * CPU.token_ms


def test_nodes_of_each_shape_have_rates_of_their_own() -> None:
    fleet, small, large = FleetRates(), SyntheticNode(CPU), SyntheticNode(faster(CPU, 4))
    for name, node in {"p1": prefill("p1"), "p2": prefill("p2"), "d1": decode("d1", tp=4)}.items():
        fleet.attach(replace(node, incarnation=name))
    for second in range(40):
        for _ in range(20):
            fleet.add_step("p1", small.any_step(), second)
            fleet.add_step("d1", large.decode_step(), second)
    assert worst_error(fleet.steps("p2", 40), CPU) < 0.15
    # The node was unused for long, and still nobody takes it for one of the small nodes.
    assert fleet.steps("d1", 100).sequence_ms == pytest.approx(CPU.sequence_ms / 4, rel=0.15)
    # The node has computed no prompt yet: its ranks are assumed to divide one.
    assert fleet.steps("d1", 40).token_ms == pytest.approx(CPU.token_ms / 4, rel=0.15)


@pytest.mark.parametrize(
    ("changes", "weights", "rows"),
    [
        ({"tp": 2}, 1 / 2, 1 / 2),
        # Four micro-batches, each of which reads a quarter of the weights in a stage.
        ({"tp": 1, "pp": 4}, 1, 1 / 4),
        ({"tp": 2, "pp": 2}, 1 / 2, 1 / 4),
        ({"tp": 2, "num_threads": 4}, 1, 1),  # ranks share the threads of their node
        ({"num_threads": 8}, 1 / 2, 1 / 2),
        ({"tp": 2, "pp": 2, "num_threads": 8}, 1, 1 / 2),
        ({"tp": 2, "numerics": "cuda"}, 1, 1),  # of another kind of machine nothing is known
    ],
)
def test_a_node_of_a_shape_that_nobody_measured_is_assumed_by_its_size(
    changes: dict[str, object], weights: float, rows: float
) -> None:
    fleet, old = FleetRates(), SyntheticNode(CPU)
    fleet.attach(decode("d1", num_threads=4))
    for _ in range(1000):
        fleet.add_step("d1.1", old.any_step(), 0)
    fleet.attach(decode("d2", **changes))
    known, assumed = fleet.steps("d1.1", 1e6), fleet.steps("d2.1", 0)
    assert assumed.step_ms == pytest.approx(known.step_ms * weights)
    for part in ("token_ms", "sequence_ms", "context_ms"):
        assert getattr(assumed, part) == pytest.approx(getattr(known, part) * rows)
    # Its own first steps count more than that.
    slow = SyntheticNode(faster(CPU, 1 / 3))
    for _ in range(16):
        fleet.add_step("d2.1", slow.any_step(), 0)
    assert fleet.steps("d2.1", 0).token_ms > 2 * CPU.token_ms


def test_classes_of_nodes_that_are_gone_are_forgotten() -> None:
    fleet, old = FleetRates(), SyntheticNode(CPU)
    for number in range(500):
        fleet.attach(decode("d1", numerics=f"version {number}"))
        fleet.add_step("d1.1", old.any_step(), 0)
        if number % 2:
            fleet.forget("d1.1")
    assert fleet.num_classes <= 64


def test_transfer_rates_follow_bytes_without_the_slowest_transfers() -> None:
    fleet, learner = FleetRates(), TransferLearner()
    assert learner.ms_per_byte == fleet.ms_per_byte("d", 0) == 1e-6
    for number in range(40):
        slow = number % 5 == 0
        fleet.add_transfer("d", StageTimings(transfer_ms=900.0 if slow else 20.0, kv_bytes=10_000_000), 0)
    fleet.add_transfer("d", StageTimings(transfer_ms=5.0, kv_bytes=0), 0)
    fleet.add_transfer("d", StageTimings(transfer_ms=0.0, kv_bytes=5), 0)
    assert fleet.ms_per_byte("d", 0) == pytest.approx(2e-6)
    assert fleet.ms_per_byte("newcomer", 0) == pytest.approx(2e-6)
