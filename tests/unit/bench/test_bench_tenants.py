"""Loads of several tenants: what is simulated of them, what each of them got, and what a report says of it."""

from __future__ import annotations

import json
import os
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.bench.arrangement import Arrangement
from baton.bench.config import OverloadConfig
from baton.bench.fairness import FLOOD, LIGHT, Beside, alone_s, checks, evaluate, result_of
from baton.bench.load.endpoint import Target
from baton.bench.load.run import GeneratorLoad, LoadPlan, LoadRun
from baton.bench.overload import ClosedLoop
from baton.bench.report.comparison import answer
from baton.bench.report.measured import parse_result
from baton.bench.report.page import page
from baton.bench.results.outcome import Outcome, Outcomes
from baton.bench.results.tenants import TenantRun, tenants_result
from baton.bench.simulator.config import NodeSizes, SimulationConfig
from baton.bench.simulator.simulation import Simulation
from baton.bench.workloads.spec import WorkloadSpec
from baton.bench.workloads.tenants import TenantLoad, TenantsWorkload, parse_tenants
from baton.bench.workloads.workload import WorkloadRequest, unique_piece
from baton.cli.main import main
from baton.errors import InvalidRequest
from baton.messages.node import Role
from baton.security.quotas import KeyClass
from router.placement.placement import takes_no_stream
from tests.support.outside import assert_result_as_frozen

SPEC = WorkloadSpec(random_input_len=256, random_output_len=32)
SMALL = ["--max-num-seqs", "16", "--random-input-len", "256", "--random-output-len", "32", "--max-queue", "100"]


def outcomes_of(*rows: Outcome) -> Outcomes:
    taken = Outcomes()
    for row in rows:
        taken.append(row)
    return taken


def tenant(name: str, outcomes: Outcomes, begin_s: float = 0.0, end_s: float = 40.0, weight: float = 1.0) -> TenantRun:
    own = np.ones(len(outcomes), dtype=bool)
    return TenantRun(name, weight, "normal", begin_s, end_s, outcomes.planned_s, outcomes, own)


def simulated(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """The result of `baton simulate` of one pair of small nodes."""
    assert main(["simulate", *SMALL, *words, "-o", "json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def rows_of(result: dict[str, Any], period: int = -1) -> dict[str, dict[str, Any]]:
    """Each tenant's figures in a period."""
    periods = result["arrangements"][0]["rates"][0]["tenants"]["periods"]
    return {row["name"]: row for row in periods[period]["tenants"]}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("name=a,rte=1", "did you mean rate"),
        ("name=a,rate", "rate in 'name=a,rate' has no value"),
        ("name=a", "has no rate"),
        ("rate=1", "has no name"),
        ("name=a,rate=1,rate=2", "given twice"),
        ("name=A,rate=1", "lower-case"),
        ("name=a,rate=0", "above 0"),
        ("name=a,rate=nan", "above 0"),
        ("name=a,rate=inf", "finite"),
        ("name=a,rate=x", "not a number"),
        ("name=a,rate=1,weight=0.001", "from 0.01 to 1000"),
        ("name=a,rate=1,weight=nan", "from 0.01 to 1000"),
        ("name=a,rate=1,class=vip", "batch, normal, urgent"),
        ("name=a,rate=1,from=-1", "from 0 on"),
        ("name=a,rate=1,from=9,until=9", "until must be later"),
        ("name=a,rate=1,from=100", "raise --duration"),
        ("name=a,rate=1,input-len=1.5", "whole number"),
    ],
)
def test_a_wrong_tenant_is_refused_with_what_is_wrong(text: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        parse_tenants([text], 60.0)


def test_options_that_contradict_tenants_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    one = ["--tenant", "name=a,rate=1"]
    for words in (
        [*one, "--request-rate", "4"],
        [*one, *one],
        [*one, "--dataset-name", "multi_turn"],
        [*one, "--duration", "inf"],
        ["--fairness", "off"],
    ):
        assert main(["simulate", *words]) == 2
        assert capsys.readouterr().err.startswith(("baton: --", "baton: --tenant"))


def test_the_requests_of_tenants_are_merged_by_arrival() -> None:
    loads = parse_tenants(["name=a,rate=2,from=10", "name=b,rate=5,until=20,input-len=32"], 30.0)
    workload = TenantsWorkload(loads, SPEC)
    requests = list(workload)
    assert [request.index for request in requests] == list(range(len(workload))) == list(range(140))
    assert [request.arrival_s for request in requests] == sorted(request.arrival_s for request in requests)
    for number, load in enumerate(loads):
        own = [request for request in requests if request.tenant == load.name]
        assert len(own) == load.count
        assert all(load.begin_s <= request.arrival_s <= load.end_s + 1e-9 for request in own)
        assert {request.input_length for request in own} == {load.input_len or 256}
        assert workload.tenant_numbers[[request.index for request in own]].tolist() == [number] * load.count
    assert len({request.pieces[0].hash_id for request in requests}) == len(requests)


def test_service_counts_uncached_prompts_and_tokens_when_they_come() -> None:
    first = Outcome(0, 0.0, 0.0, 30.0, 50.0, 100, 20, cached_tokens=40)
    refused = Outcome(1, 25.0, 25.0, None, 25.1, 100, 0, error="the queue is full")
    figures = tenants_result([tenant("a", outcomes_of(first, refused), weight=2.0)], 2.0)
    (period,) = figures["periods"]
    assert (period["begin_s"], period["counted_from_s"], period["end_s"]) == (0.0, 20.0, 40.0)
    (row,) = period["tenants"]
    # From 20 to 40 s: the prompt's 60 uncached tokens, and half of the 20 generated ones, each of which counts for two.
    assert row["service_tokens_per_s"] == pytest.approx((60 + 2 * 10) / 20)
    assert row["total_token_throughput"] == pytest.approx((60 + 10) / 20)
    assert (row["service_share"], row["service_share_per_weight"]) == (1.0, 0.5)
    assert (row["offered"], row["completed"], row["refused"], row["failed"]) == (1, 0, 1, 0)
    (series,) = figures["over_time"]
    assert sum(series["service_tokens_per_s"]) * figures["window_s"] == pytest.approx(60 + 2 * 10)
    assert series["median_ttft_ms"][0] == pytest.approx(30_000)


def test_tenants_get_the_service_by_their_weights(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--tenant", "name=three,rate=20,weight=3", "--tenant", "name=one,rate=20", "--duration", "60"]
    rows = rows_of(simulated(capsys, *words))
    assert rows["three"]["service_share"] / rows["one"]["service_share"] == pytest.approx(3.0, rel=0.03)


def test_batch_work_gets_what_is_left_by_others(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--tenant", "name=nightly,rate=20,class=batch", "--tenant", "name=day,rate=24,from=30", "--duration", "60"]
    result = simulated(capsys, *words)
    assert rows_of(result, 0)["nightly"]["service_share"] == 1.0
    assert rows_of(result)["nightly"]["service_share"] < 0.01


@pytest.mark.parametrize("fairness", ["tokens", "off"])
def test_a_light_tenant_waits_little_beside_a_flood(fairness: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--tenant", "name=light,rate=2", "--tenant", "name=flood,rate=40,from=30", "--duration", "60"]
    result = simulated(capsys, *words, "--fairness", fairness)
    alone, beside = (rows_of(result, period)["light"] for period in (0, 1))
    if fairness == "off":
        assert beside["median_ttft_ms"] > 1000
    else:
        assert beside["median_ttft_ms"] < 8 * alone["median_ttft_ms"]
        assert (beside["refused"], beside["failed"]) == (0, 0)


@pytest.mark.outside
def test_a_simulation_of_tenants_has_their_figures(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--tenant", "name=a,rate=2", "--tenant", "name=b,rate=2,from=4", "--duration", "8"]
    result = simulated(capsys, *words)
    assert_result_as_frozen(result, "simulate_tenants")
    assert result["workload"]["num_prompts"] == 24
    assert main(["simulate", *SMALL, *words]) == 0
    shown = capsys.readouterr().out
    assert "1p1d: 4 to 8 s, counted from 6 s on:" in shown


# `baton bench overload --tenants`, and the reports of both.

CONFIG = OverloadConfig(overload_s=40.0)


def measured(late_s: float, *, refused: int = 0) -> dict[str, Any]:
    """A run in which the light tenant's first tokens come 0.1 s after a request, and later by `late_s` in the flood."""
    end_s = alone_s(CONFIG) + CONFIG.overload_s
    runs, plans = {}, {}
    for name, rate, begin_s in ((LIGHT, 1.0, 0.0), (FLOOD, 10.0, alone_s(CONFIG))):
        spec = replace(SPEC, num_prompts=round(rate * (end_s - begin_s)), request_rate=rate)
        plans[name] = LoadPlan(Target("baton", "x"), spec, delay_s=begin_s)
        planned = [request.arrival_s for request in spec.build()]
        rows = [
            Outcome(i, at, at, at + 0.1 + late_s * (at > alone_s(CONFIG)), at + 0.9 + late_s, 256, 32)
            for i, at in enumerate(planned)
        ]
        if name == LIGHT:
            for number in range(-1 - refused, -1):
                rows[number] = replace(rows[number], first_token_s=None, error="UNAVAILABLE: full")
        load = GeneratorLoad(1, 0.0, 0.1, 0.1)
        runs[name] = LoadRun(outcomes_of(*rows), end_s, len(rows), load, False, False, 100.0 + begin_s)
    return evaluate(CONFIG, plans, runs)


def overload_result() -> dict[str, Any]:
    measurements = {"tokens": measured(0.2), "off": measured(9.9)}
    return result_of(CONFIG, ClosedLoop(10.0, 30.0), measurements, "2026-11-30T00:00:00+00:00")


def verdicts(late_s: float, refused: int = 0, tpot_ms: float = 30.0, fcfs_s: float | None = None) -> list[bool]:
    fair = Beside.of(measured(late_s, refused=refused)["tenants"])
    fcfs = None if fcfs_s is None else replace(fair, throughput=fair.throughput * fcfs_s)
    return [ok for _, _, ok in checks(fair, tpot_ms, fcfs)]


def test_the_times_of_both_loads_count_from_the_start_of_the_first_one() -> None:
    alone, beside = ({row["name"]: row for row in each["tenants"]} for each in measured(0.0)["tenants"]["periods"])
    assert (alone[LIGHT]["service_share"], alone[FLOOD]["offered"]) == (1.0, 0)
    assert beside[FLOOD]["service_share"] == pytest.approx(10 / 11, rel=0.1)


def test_the_light_tenant_is_held_against_itself_alone_and_a_full_batch() -> None:
    assert verdicts(0.2) == [True, True, True, True]
    assert verdicts(0.4) == [False, False, True, True]
    assert verdicts(0.2, refused=2) == [True, True, False, True]
    assert verdicts(0.2, tpot_ms=20.0) == [True, True, True, False]
    assert verdicts(0.2, fcfs_s=1.01) == [True] * 5
    assert verdicts(0.2, fcfs_s=1.04) == [True] * 4 + [False]


@pytest.mark.outside
def test_a_report_says_how_much_longer_the_light_tenant_waited_and_draws_each_tenant() -> None:
    result = overload_result()
    assert_result_as_frozen(result, "overload_tenants")
    found = answer(parse_result(result))
    assert found.headline == "Beside the flood light waited 3 times as long for its first tokens as alone."
    assert (
        "--fairness off: 100\u00a0ms (p99 100\u00a0ms) alone, 10\u00a0s (p99 10\u00a0s) beside the flood"
        in found.detail
    )
    drawn = page(parse_result(result))
    assert drawn.count('id="plot-tenants-share-') == drawn.count('id="plot-tenants-ttft-') == 2


def test_broken_figures_of_tenants_are_drawn_or_refused() -> None:
    junk: tuple[Any, ...] = (None, "x", -1, float("nan"), 1e308, [], {}, [None], [[]], True)
    sound = json.dumps(overload_result())
    every = [
        (keys, other) for keys in _keys(json.loads(sound)["arrangements"][0]["rates"][0]["tenants"]) for other in junk
    ]
    random.Random(5).shuffle(every)
    refused = 0
    for keys, other in every[: int(os.environ.get("BATON_BROKEN_RESULTS", "80"))]:
        result = json.loads(sound)
        at = result["arrangements"][0]["rates"][0]["tenants"]
        for key in keys[:-1]:
            at = at[key]
        at[keys[-1]] = other
        try:
            page(parse_result(result))
        except InvalidRequest:
            refused += 1
    assert refused > 5


def _keys(value: Any) -> list[tuple[Any, ...]]:
    """The path to each value that the object has."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path for key, each in inner for path in ((key,), *((key, *rest) for rest in _keys(each)))]


@given(
    st.sampled_from(["colocated:2", "conditional:1p1d"]),
    st.integers(2, 6),
    st.lists(st.sampled_from(KeyClass), min_size=1, max_size=3),
    st.integers(0, 1 << 30),
)
@settings(max_examples=8, deadline=None)
def test_no_request_waits_while_a_node_has_room_for_it(
    arrangement: str, seats: int, classes: list[KeyClass], seed: int
) -> None:
    rng, requests = random.Random(seed), list[WorkloadRequest]()
    loads = [
        TenantLoad(f"t{number}", 1.0, weight=rng.choice([1.0, 3.0]), service_class=name)
        for number, name in enumerate(classes)
    ]
    for index in range(24):
        length = rng.randint(1, 200)
        piece, output = unique_piece(length, seed, index), rng.randint(1, 30)
        tenant = rng.choice(loads).name
        requests.append(WorkloadRequest(index, 0.01 * index, length, output, (piece,), tenant=tenant))
    sizes = NodeSizes(max_num_seqs=seats, cache_tokens=2048, max_num_batched_tokens=64)
    config = SimulationConfig(Arrangement.parse(arrangement), sizes, tenants=loads)
    simulation, waited = Simulation(config, lambda _: None), 0

    def check() -> None:
        nonlocal waited
        router = simulation.router
        if router.requests.num_waiting:
            waited += 1
            has_prefills = any(candidate.node.role is Role.PREFILL for candidate in router.view.candidates())
            open_roles = {
                candidate.node.role
                for candidate in router.view.candidates()
                if candidate.lack is None or (has_prefills and not takes_no_stream(candidate))
            }
            assert len(open_roles) < 1 + has_prefills

    for number in range(200):
        simulation.timeline.call_at(0.005 * number + 0.0001, check)
    simulation.run(iter(requests))
    assert waited
