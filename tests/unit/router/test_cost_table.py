"""The vectorized cost table chooses the same nodes as the cost model, to the last bit."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import InvalidRequest, NoCapacity
from baton.messages.kv_cache import KVFormat
from baton.messages.node import NodeDescription
from baton.messages.node_model import EMBEDS, GENERATES
from router.placement.cost_model import (
    Held,
    NodeCosts,
    PlacementQuery,
    ServiceLevel,
    cheapest,
    newcomer_share,
    node_costs,
)
from router.placement.cost_table import CostTable, fitting_kinds
from router.placement.fleet_rates import NO_WORK, MixedWork
from router.placement.placement import Candidate, Candidates, Demand, Origin, fitting_nodes, may_serve, with_room
from router.placement.rates import StepRates
from router.placement.room import Lack
from tests.support.router_parts import MODEL, decode, prefill

NOW = 100.0
RATES = [StepRates(4.0, 0.2, 0.5, 1e-4), StepRates(4.0, 0.21, 0.5, 1e-4), StepRates(20.0, 0.05, 1.0, 1e-3, 3.5, 2.1)]


def some_nodes(rng: Random) -> Sequence[NodeDescription]:
    made = [
        replace(
            (prefill if rng.random() < rng.choice([0.0, 0.5, 1.0]) else decode)(f"n{number}"),
            max_model_len=rng.choice([64, 8192]),
            num_blocks=4096,
            block_size=rng.choice([4, 4, 4, 6, 12, 16]),
            block_bytes=100_000,
            dtype=rng.choice(["float32", "float32", "bfloat16"]),
            numerics=rng.choice(["cpu", "cpu", "cuda"]),
            kv_shape=rng.choice(["", "shape"]),
            bit_exact=rng.random() < 0.9,
            max_num_batched_tokens=rng.choice([0, 256, 512]),
            embedding_size=rng.choice([0, 8]),
        )
        for number in range(rng.randint(0, 12))
    ]
    rng.shuffle(made)
    return made


def some_candidate(rng: Random, node: NodeDescription) -> Candidate:
    return Candidate(
        node,
        load=float(rng.choice([0, 1, 2, 30])),
        last_chosen=rng.choice([0, 0, 1, 2, 3]),
        lack=rng.choice([Lack.SEATS, Lack.KV, Lack.TOKENS]) if rng.random() < 0.3 else None,
        uncomputed_tokens=rng.choice([0, 0, 1, 600]),
        context_tokens=rng.choice([0, 5000]),
        attached_at=rng.choice([0.0, NOW, NOW - 1.0]),
        is_left_out=rng.random() < 0.2,
    )


class Fleet:
    """A fleet of nodes and the two implementations that choose among them."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._rates: dict[str, StepRates] = {}
        self._pending: dict[str, int] = {}
        self._work: dict[str, MixedWork] = {}
        self.table = CostTable(self._costs)
        self.candidates: tuple[Candidate, ...] = ()

    def _costs(self, candidate: Candidate, now: float, prefills_only: bool) -> NodeCosts:
        incarnation = candidate.node.incarnation
        share = newcomer_share(now - candidate.attached_at)
        rates, pending = self._rates.get(incarnation, RATES[0]), self._pending.get(incarnation, 0)
        work = self._work.get(incarnation, NO_WORK)
        return node_costs(candidate, pending, rates, 1e-6, share, prefills_only=prefills_only, work=work)

    def renew(self) -> None:
        """Replace the nodes, or update the reports of some of them."""
        rng, before = self._rng, self.candidates
        if not before or rng.random() < 0.2:
            self.candidates = tuple(some_candidate(rng, node) for node in some_nodes(rng))
        else:
            changed = [c for c in before if rng.random() < 0.3]
            renewed = {c.node.incarnation: some_candidate(rng, c.node) for c in changed}
            kept = [renewed.get(c.node.incarnation, c) for c in before]
            if rng.random() < 0.1:
                rng.shuffle(kept)
            # A list of changes since other candidates than the table saw last must not be used.
            earlier = before.marker if isinstance(before, Candidates) else object()
            told: list[Candidate] | None = [*renewed.values()]
            if rng.random() < 0.3:
                earlier, told = object(), rng.choice([[], None])
            self.candidates = Candidates(kept, earlier, told)
        for candidate in self.candidates:
            if rng.random() < 0.2:
                incarnation = candidate.node.incarnation
                self._rates[incarnation], self._pending[incarnation] = rng.choice(RATES), rng.choice([0, 100])
                reported = MixedWork(rng.choice([0, 3]), 300, rng.choice([0.0, 500.0, 1e4]), NOW - rng.random())
                self._work[incarnation] = rng.choice([NO_WORK, reported])
                self.table.mark_stale(incarnation)

    def sample(self, share: float) -> frozenset[str]:
        return frozenset(c.node.incarnation for c in self.candidates if self._rng.random() < share)

    def check(self, now: float) -> None:
        """Compare the choices of both implementations for one request."""
        rng, candidates = self._rng, self.candidates
        tokens, embeds = rng.choice([1, 40, 700, 3000]), rng.random() < 0.2
        demand = Demand(MODEL, tokens, rng.choice([1, 20, 500]), embeds, EMBEDS if embeds else GENERATES)
        if candidates and rng.random() < 0.3:
            origin = Origin.of(rng.choice(candidates).node, across=True)
            demand = replace(demand, origin=rng.choice([origin, origin.widened]))
        exclude, rooms = self.sample(rng.choice([0.0, 0.3])), rng.random() < 0.5
        self.table.set_candidates(candidates)
        able = self.table.fitting_rows(demand, exclude, with_room=rooms)
        try:
            may = may_serve(candidates, demand.origin)
            fitting = fitting_nodes(with_room(may) if rooms else may, demand, exclude)
        except (InvalidRequest, NoCapacity):
            assert not candidates or (able is not None and not able.any())
            return
        self.table.refresh(able, now)
        prefills_only = len({candidate.node.role for candidate in fitting}) > 1
        expected = [
            self._costs(c, now, prefills_only and c.node.role.value == "prefill")
            for c in sorted(fitting, key=lambda one: one.node.incarnation)
        ]
        costs = self.table.costs(able)
        assert sorted(costs, key=lambda one: one.node.incarnation) == expected
        infinite = float("inf")
        holder = rng.choice([None, *candidates])
        held = (
            Held(holder.node, KVFormat.of(holder.node), rng.choice([16, 512, 2900]), rng.random() < 0.2)
            if holder
            else None
        )
        query = PlacementQuery(
            demand,
            expected,
            cached={incarnation: rng.choice([16, 512, 5000]) for incarnation in self.sample(rng.choice([0.0, 0.4]))},
            level=ServiceLevel(rng.choice([infinite, 30.0, 200.0]), rng.choice([infinite, 6.0, 25.0])),
            alone_tokens=rng.choice([0, 512, sys.maxsize]),
            now=now,
            held=held,
            may_stay=rng.random() < 0.5,
            passed_over=self.sample(rng.choice([0.0, 0.5])),
            pairs_passed_over=frozenset(
                (a.node.node_id, b.node.node_id) for a in candidates for b in candidates if rng.random() < 0.2
            ),
            across=rng.random() < 0.5,
        )
        assert self.table.cheapest(query, able) == cheapest(query)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_the_table_chooses_the_same_nodes_as_the_cost_model(seed: int) -> None:
    fleet = Fleet(Random(seed))
    for number in range(12):
        fleet.renew()
        fleet.check(NOW + number / 2)


@pytest.mark.parametrize("num_changed", [0, 1, 3])
def test_only_rows_of_changed_nodes_are_recomputed(num_changed: int) -> None:
    computed: list[str] = []

    def costs_of(candidate: Candidate, now: float, prefills_only: bool) -> NodeCosts:
        computed.append(candidate.node.incarnation)
        return node_costs(candidate, 0, RATES[0], 1e-6, prefills_only=prefills_only)

    table = CostTable(costs_of)
    first = [Candidate(make(f"{name}{i}"), 0.0, 0) for i in range(50) for name, make in (("p", prefill), ("d", decode))]
    table.set_candidates(first)
    table.refresh(None, NOW)
    assert len(computed) == 100
    computed.clear()
    table.set_candidates([replace(one, load=1.0) if place < num_changed else one for place, one in enumerate(first)])
    table.mark_stale("p40.1")
    table.mark_stale("a stranger")
    table.refresh(None, NOW)
    assert sorted(computed) == sorted({"p40.1", *(one.node.incarnation for one in first[:num_changed])})


def test_formats_fit_each_other_in_the_table_as_they_do_one_by_one() -> None:
    kinds = [
        KVFormat(model, numerics, dtype, size, protocol, shape)
        for numerics, shape in (("cpu", ""), ("cpu", "s"), ("cuda", "s"), ("cuda", "t"))
        for model in ("m0", "m1")
        for dtype in ("float32", "int8")
        for size in (8, 16, 24)
        for protocol in (5, 6)
    ]
    for across in (False, True):
        fits = [[one.fits(other, across=across) for other in kinds] for one in kinds]
        assert fitting_kinds(kinds, across=across).tolist() == fits
