"""Speculation in the simulator: the steps of hand calculations, and what must hold for any share of right drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.bench.arrangement import Arrangement
from baton.bench.simulator.cells import simulate_cells
from baton.bench.simulator.config import Failure, NodeSizes, SimulatedSpeculation, SimulationConfig
from baton.bench.simulator.drafts import DraftTotals, SimulatedDrafts
from baton.bench.simulator.simulation import Simulated, Simulation
from baton.bench.simulator.step_times import FormulaTimes
from baton.bench.workloads.spec import WorkloadSpec
from baton.cli.main import main
from baton.engine.request import Request, RequestStatus
from baton.errors import InvalidRequest
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams

SHARES = (0.0, 0.1, 0.4, 0.8, 1.0)
CHAT = WorkloadSpec(
    num_prompts=30, request_rate=6.0, random_input_len=200, random_output_len=100, random_range_ratio=0.8
)
SHORT_CHAT = replace(CHAT, num_prompts=15)
"""For tests that simulate it many times."""
BIG = NodeSizes(max_num_batched_tokens=8192)


def simulated(
    spec: WorkloadSpec,
    arrangement: str,
    speculation: SimulatedSpeculation | None,
    sizes: NodeSizes = BIG,
    **changes: object,
) -> Simulated:
    config = SimulationConfig(Arrangement.parse(arrangement), replace(sizes, speculation=speculation))
    simulation = Simulation(replace(config, **changes), lambda ended: None)  # type: ignore[arg-type]
    simulation.run(spec.build())
    for node in simulation.nodes.values():
        node.scheduler.kv_cache_manager.check_invariant()
        assert node.is_idle
    return simulation.result()


def totals_of(done: Simulated) -> DraftTotals:
    assert done.drafts is not None
    return done.drafts


def by_index(done: Simulated) -> list[tuple[object, ...]]:
    """The requests in their order. Those that end in one step may be processed in any order."""
    columns = done.outcomes.columns()
    names = ("index", "first_token_s", "finished_s", "largest_gap_s", "output_length")
    return sorted(zip(*(columns[name] for name in names), strict=True))


def mean_tpot_s(done: Simulated) -> float:
    return float(np.nanmean(done.outcomes.tpot_s))


def test_the_latency_with_drafts_follows_from_the_formula() -> None:
    """The decode node's first step has no draft; then three right drafts a step, and one where only two tokens lack."""
    spec = WorkloadSpec(num_prompts=1, request_rate=1.0, random_input_len=600, random_output_len=12)
    drafts = SimulatedSpeculation(1.0, 3, row_ms=0.5, adapts=False)
    done = simulated(spec, "1p1d", drafts, network_latency_s=0.002)
    handoff_s, times = 600 * 819_200 / 25e9 + 0.002, FormulaTimes()
    decode_s = times.decode_s(1, 600) + times.decode_s(1, 601) + times.decode_s(1, 605) + times.decode_s(1, 609)
    outcomes = done.outcomes
    assert outcomes.e2el_s[0] - outcomes.ttft_s[0] == pytest.approx(handoff_s + decode_s + (3 + 3 + 1) * 0.5e-3)
    assert outcomes.largest_gap_s[0] == pytest.approx(handoff_s + times.decode_s(1, 600), rel=1e-6)
    assert outcomes.output_length.tolist() == [12]
    assert asdict(totals_of(done)) == {
        "num_decodes": 4,
        "num_drafts": 3,
        "num_draft_tokens": 7,
        "num_accepted_tokens": 7,
    }
    assert totals_of(done).tokens_per_step == 11 / 4


def test_a_drafted_token_costs_as_much_as_a_sequence_unless_its_time_is_given() -> None:
    spec = WorkloadSpec(num_prompts=1, request_rate=1.0, random_input_len=600, random_output_len=12)
    of_sequence = FormulaTimes().decode_sequence_ms
    given, default = (
        simulated(spec, "1p1d", SimulatedSpeculation(0.5, 3, row_ms=row_ms, adapts=False)).outcomes.e2el_s[0]
        for row_ms in (of_sequence, None)
    )
    assert given == pytest.approx(default, rel=1e-9)


@pytest.mark.parametrize("adapts", [True, False])
@pytest.mark.parametrize("arrangement", ["1p1d", "colocated:1"])
def test_wrong_drafts_cost_the_time_of_their_rows_and_nothing_else(arrangement: str, adapts: bool) -> None:
    plain = simulated(SHORT_CHAT, arrangement, None)
    free = simulated(SHORT_CHAT, arrangement, SimulatedSpeculation(0.0, 4, row_ms=0.0, adapts=adapts))
    assert by_index(free) == by_index(plain)
    assert free.num_steps == plain.num_steps
    assert totals_of(free).num_accepted_tokens == 0 < totals_of(free).num_draft_tokens
    costly = simulated(SHORT_CHAT, arrangement, SimulatedSpeculation(0.0, 4, row_ms=0.1, adapts=adapts))
    assert mean_tpot_s(costly) > mean_tpot_s(plain)
    undrafted = simulated(SHORT_CHAT, arrangement, SimulatedSpeculation(1.0, 4, coverage=0.0, adapts=adapts))
    assert by_index(undrafted) == by_index(plain)


def never_worse(times: Sequence[float]) -> bool:
    return all(later <= earlier * (1 + 1e-9) for earlier, later in pairwise(times))


@pytest.mark.parametrize(
    ("arrangement", "drafts"),
    [
        ("1p1d", SimulatedSpeculation(0.0, 8, adapts=False)),
        ("1p1d", SimulatedSpeculation(0.0, 8, row_ms=1.0, adapts=False)),
        ("colocated:1", SimulatedSpeculation(0.0, 4, coverage=0.4, adapts=False)),
        ("colocated:1", SimulatedSpeculation(0.0, 16)),
        ("2p2d", SimulatedSpeculation(0.0, 16)),
    ],
)
def test_more_right_drafts_never_make_the_mean_time_per_token_worse(
    arrangement: str, drafts: SimulatedSpeculation
) -> None:
    runs = [simulated(SHORT_CHAT, arrangement, replace(drafts, share=share)) for share in SHARES]
    assert never_worse([mean_tpot_s(run) for run in runs])
    assert never_worse([-totals_of(run).tokens_per_step for run in runs])
    assert mean_tpot_s(runs[-1]) < 0.5 * mean_tpot_s(runs[0])
    lengths = [dict(zip(run.outcomes.index, run.outcomes.output_length, strict=True)) for run in runs]
    assert all(one == lengths[0] for one in lengths)


def num_steps(share: float, seed: int, most: int, num_tokens: int) -> int:
    """The steps that a text of so many tokens takes."""
    drafts = SimulatedDrafts(SimulatedSpeculation(share, most, adapts=False), seed)
    request = Request("r", RequestSpec([1, 2, 3], SamplingParams(max_tokens=num_tokens)))
    request.status, request.num_computed_tokens = RequestStatus.RUNNING, 2
    steps = 0
    while request.num_output_tokens < num_tokens:
        proposed = drafts.propose([("text", request)])
        right = drafts.verify("text", request, len(proposed["r"]))
        request.output_token_ids += [0] * (1 + right)
        request.num_computed_tokens += 1 + right
        steps += 1
    return steps


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 16), st.integers(1, 200), st.floats(0, 1), st.floats(0, 1))
def test_a_text_takes_no_more_steps_with_a_larger_share(seed: int, most: int, tokens: int, one: float, two: float):  # type: ignore[no-untyped-def]
    low, high = sorted((one, two))
    assert num_steps(1.0, seed, most, tokens) == -(-tokens // (1 + most))
    assert num_steps(high, seed, most, tokens) <= num_steps(low, seed, most, tokens) <= tokens
    assert num_steps(0.0, seed, most, tokens) == tokens


def test_the_share_of_right_drafts_is_the_one_that_was_asked_for() -> None:
    totals = totals_of(simulated(CHAT, "1p1d", SimulatedSpeculation(0.6, 1, adapts=False)))
    assert totals.num_drafts > 1500
    assert totals.num_accepted_tokens / totals.num_draft_tokens == pytest.approx(0.6, abs=0.03)
    longer = totals_of(simulated(CHAT, "1p1d", SimulatedSpeculation(0.6, 4, adapts=False)))
    of_four = 0.6 + 0.6**2 + 0.6**3 + 0.6**4  # a token is right only behind right ones
    assert longer.num_accepted_tokens / longer.num_drafts == pytest.approx(of_four, abs=0.1)
    sparse = totals_of(simulated(CHAT, "1p1d", SimulatedSpeculation(0.6, 1, coverage=0.25, adapts=False)))
    assert sparse.num_drafts / sparse.num_decodes == pytest.approx(0.25, abs=0.03)


def test_another_seed_has_other_drafts() -> None:
    one, other = (simulated(SHORT_CHAT, "1p1d", SimulatedSpeculation(0.6, 4), seed=seed) for seed in (1, 2))
    assert one.outcomes.columns() != other.outcomes.columns()


def test_drafts_that_do_not_pay_are_not_made_for_long() -> None:
    adapted = totals_of(simulated(CHAT, "1p1d", SimulatedSpeculation(0.02, 16)))
    assert adapted.num_drafts < 0.25 * adapted.num_decodes


HARD: dict[str, tuple[str, NodeSizes, dict[str, object]]] = {
    "little memory": ("1p2d", NodeSizes(cache_tokens=2800, max_num_seqs=8), {}),
    "small budget": ("colocated:2", NodeSizes(max_num_batched_tokens=64, max_num_seqs=24), {}),
    "deaths": ("2p3d", BIG, {"failures": (Failure("decode-0", 3.0, 4.0), Failure("decode-1", 5.0, 3.0))}),
    "noticed late": ("2p2d", BIG, {"failures": (Failure("decode-1", 4.0, 5.0),), "detect_s": 1.0}),
    "prompts first": ("colocated:2", NodeSizes(prompts_first=True, max_num_batched_tokens=300), {}),
}


@pytest.mark.parametrize("name", HARD)
def test_every_request_gets_its_tokens_and_seeds_reproduce(name: str) -> None:
    arrangement, sizes, changes = HARD[name]
    spec = WorkloadSpec(
        dataset="prefix_repetition",
        num_prompts=40,
        request_rate=12.0,
        prefix_len=200,
        suffix_len=150,
        random_output_len=60,
        num_prefixes=6,
        seed=3,
    )
    drafts = SimulatedSpeculation(0.7, 6)
    one, again = (simulated(spec, arrangement, drafts, sizes, seed=1, **changes) for _ in range(2))
    assert one.outcomes.columns() == again.outcomes.columns()
    assert totals_of(one) == totals_of(again)
    assert one.outcomes.output_length.tolist() == [60] * 40
    assert not any(one.outcomes.error_texts())
    assert totals_of(one).num_accepted_tokens > 500


@pytest.mark.parametrize("share", [0.0, 0.7])
def test_steps_without_a_request_neither_shorten_its_pauses_nor_change_its_drafts(share: float) -> None:
    def drafted(times_asked: int) -> list[int]:
        """The lengths of a text's drafts, if so many steps are decided before each of its own."""
        drafts = SimulatedDrafts(SimulatedSpeculation(share, 6), 1)
        request = Request("r", RequestSpec([1, 2, 3], SamplingParams(max_tokens=500)))
        request.status, request.num_computed_tokens, lengths = RequestStatus.RUNNING, 2, []
        while request.num_output_tokens < 300:
            proposed, *more = [drafts.propose([("text", request)]) for _ in range(times_asked)]
            assert not any(more)
            lengths.append(len(proposed.get("r", ())))
            right = drafts.verify("text", request, lengths[-1]) if lengths[-1] else 0
            request.output_token_ids += [0] * (1 + right)
            request.num_computed_tokens += 1 + right
        return lengths

    assert 0 < sum(drafted(1)) != len(drafted(1))
    assert drafted(3) == drafted(1)


def test_cells_add_their_drafts() -> None:
    sizes = replace(BIG, speculation=SimulatedSpeculation(0.7, 6))
    config = SimulationConfig(Arrangement(2, 2), sizes, cells=2)
    together, again = (simulate_cells(CHAT.build(), config) for _ in range(2))
    assert together.drafts == again.drafts
    assert totals_of(together).num_decodes + totals_of(together).num_accepted_tokens == sum(
        length - 1 for length in together.outcomes.output_length.tolist()
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"share": -0.1},
        {"share": float("nan")},
        {"num_speculative_tokens": 0},
        {"num_speculative_tokens": 65},
        {"coverage": 1.1},
        {"row_ms": -1.0},
        {"row_ms": float("inf")},
    ],
)
def test_figures_out_of_bounds_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(InvalidRequest, match="--draft-"):
        SimulatedSpeculation(**{"share": 0.5, **fields})  # type: ignore[arg-type]


def test_the_command_shows_what_became_of_drafts(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "--num-prompts", "20", "--arrangement", "1p1d", "--draft-share", "1"]
    assert main([*words, "--draft-tokens", "3", "--fixed-drafts", "--draft-row-ms", "0", "--draft-coverage", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    header = next(place for place, line in enumerate(lines) if "TOK/STEP" in line)
    assert lines[header + 1].split()[-1] == "100%"
    assert float(lines[header + 1].split()[2]) > 3.5
    assert main(words[:5]) == 0
    assert "TOK/STEP" not in capsys.readouterr().out
