"""The simulator: results agree with hand calculations, and runs of steps give the same results as single steps."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest

from baton.bench.arrangement import Arrangement
from baton.bench.results.goodput import find_goodput
from baton.bench.simulator.config import Failure, NodeSizes, SimulationConfig
from baton.bench.simulator.events import Timeline
from baton.bench.simulator.handoff import Network
from baton.bench.simulator.prompt import SimulatedPrompt
from baton.bench.simulator.simulation import Simulation
from baton.bench.simulator.step_times import FormulaTimes, TableTimes, read_step_times
from baton.bench.workloads.spec import WorkloadSpec
from baton.bench.workloads.workload import Piece, WorkloadRequest
from baton.cli.main import main
from baton.errors import InvalidRequest
from tests.support.outside import assert_result_as_frozen

TIMES = FormulaTimes()


def _run(spec: WorkloadSpec, config: SimulationConfig) -> Simulation:
    simulation = Simulation(config, lambda ended: None)
    simulation.run(spec.build())
    for node in simulation.nodes.values():
        node.scheduler.kv_cache_manager.check_invariant()
        assert node.is_idle
    return simulation


def _config(arrangement: str, **changes: object) -> SimulationConfig:
    return replace(SimulationConfig(Arrangement.parse(arrangement)), **changes)  # type: ignore[arg-type]


def _spec(**changes: object) -> WorkloadSpec:
    spec = WorkloadSpec(num_prompts=1, request_rate=1.0, random_input_len=600, random_output_len=5)
    return replace(spec, **changes)  # type: ignore[arg-type]


def _prefill_s(tokens: int) -> float:
    return (18.10 + 0.1019 * tokens + 7.12e-6 * tokens**2) / 1e3


def _decode_s(batch: int, context: int) -> float:
    return (19.93 + 6.27e-4 * context + 0.0385 * batch) / 1e3


def test_the_latency_of_one_request_follows_from_the_formula() -> None:
    config = _config("1p1d", message_s=0.001, network_latency_s=0.002)
    outcomes = _run(_spec(), config).outcomes
    assert outcomes.ttft_s[0] == pytest.approx(0.001 + _prefill_s(600) + 0.001)
    # The hand-off lies between the first and the second token; none of the last chunk was transferred earlier.
    handoff_s = 600 * 819_200 / 25e9 + 0.002
    decode_s = sum(_decode_s(1, 600 + place) for place in range(4))
    assert outcomes.e2el_s[0] - outcomes.ttft_s[0] == pytest.approx(handoff_s + decode_s)
    assert outcomes.largest_gap_s[0] == pytest.approx(handoff_s + _decode_s(1, 600), rel=1e-6)


def test_kv_is_transferred_while_the_next_chunk_is_computed() -> None:
    sizes = NodeSizes(max_num_batched_tokens=256)
    outcomes = _run(_spec(), _config("1p1d", sizes=sizes)).outcomes
    last_chunk = 600 - 2 * 256
    handoff_s = last_chunk * 819_200 / 25e9 + 1e-3
    assert outcomes.largest_gap_s[0] == pytest.approx(handoff_s + _decode_s(1, 600), rel=1e-6)


def test_colocated_requests_share_steps() -> None:
    spec = _spec(num_prompts=2, request_rate=float("inf"), random_input_len=100, random_output_len=3)
    outcomes = _run(spec, _config("colocated:1", message_s=0.0)).outcomes
    # The first request's step has started when the second one arrives; then one decodes while the other is computed.
    mixed_s = _decode_s(1, 100) + (0.1019 * 100 + 7.12e-6 * 100**2) / 1e3
    assert outcomes.ttft_s.tolist() == pytest.approx([_prefill_s(100), _prefill_s(100) + mixed_s])
    both_s = _decode_s(2, 201)
    assert outcomes.tpot_s.tolist() == pytest.approx([(mixed_s + both_s) / 2, (both_s + _decode_s(1, 101)) / 2])


def test_streams_stall_while_prompts_are_computed_first() -> None:
    spec = _spec(num_prompts=2, request_rate=float("inf"), random_input_len=100, random_output_len=3)
    sizes = NodeSizes(prompts_first=True)
    outcomes = _run(spec, _config("colocated:1", message_s=0.0, sizes=sizes)).outcomes
    # As above, but the first request draws no token while the other's prompt is computed.
    assert outcomes.ttft_s.tolist() == pytest.approx([_prefill_s(100), 2 * _prefill_s(100)])
    both_s = _decode_s(2, 200) + _decode_s(2, 202)
    assert outcomes.tpot_s.tolist() == pytest.approx([(_prefill_s(100) + both_s) / 2, both_s / 2])


@pytest.mark.parametrize("rate", [100.0, float("inf")])
def test_a_request_that_waits_in_a_closed_loop_counts_from_its_arrival(rate: float) -> None:
    """Unless all arrive at once: then the planned time is when it is sent, as on a live cluster."""
    spec = _spec(num_prompts=5, request_rate=rate)
    simulation = _run(spec, _config("colocated:1", max_concurrency=1, message_s=0.0))
    arrivals = [request.arrival_s for request in spec.build()]
    outcomes = simulation.outcomes
    ends = [0.0, *outcomes.finished_s.tolist()[:-1]]
    if rate == float("inf"):
        assert outcomes.planned_s.tolist() == outcomes.sent_s.tolist() == pytest.approx(ends)
    else:
        assert outcomes.planned_s.tolist() == arrivals
        assert outcomes.sent_s.tolist() == pytest.approx([*map(max, arrivals, ends)])
        assert sum(simulation.result().parts.means_ms().values()) == pytest.approx(outcomes.ttft_s.mean() * 1e3)


_CASES = {
    "pairs": _config("2p2d"),
    "colocated, little memory": _config("colocated:2", sizes=NodeSizes(cache_tokens=3000)),
    "pairs, little memory": _config("1p2d", sizes=NodeSizes(cache_tokens=2800, max_num_seqs=8)),
    "conditional, small chunks": _config("conditional:1p1d", sizes=NodeSizes(max_num_batched_tokens=300)),
    "deaths": _config(
        "2p3d", failures=(Failure("decode-0", 3.0, 4.0), Failure("prefill-1", 4.0, 3.0)), mtbf_s=15.0, repair_s=3.0
    ),
    "noticed late": _config("2p2d", failures=(Failure("decode-1", 4.0, 5.0),), detect_s=1.0),
    "random": _config("2p2d", policy="random"),
    "a few choices": _config("3p3d", choices=2, failures=(Failure("decode-1", 4.0, 2.0),)),
    "by other nodes' blocks": _config("2p2d", policy="global-cache"),
    "prompts first": _config("colocated:2", sizes=NodeSizes(prompts_first=True, max_num_batched_tokens=300)),
    "prompts first, whole": _config("colocated:2", sizes=NodeSizes(prompts_first=True, max_model_len=2048)),
    "round robin, a closed loop": _config("2p1d", policy="round-robin", max_concurrency=6),
}


@pytest.mark.parametrize("name", _CASES)
def test_runs_of_steps_and_single_steps_have_the_same_results(name: str) -> None:
    """Two runs with the same seed have the same results, stepwise or not."""
    config = _CASES[name]
    spec = WorkloadSpec(
        dataset="prefix_repetition",
        num_prompts=60,
        request_rate=6.0,
        prefix_len=200,
        suffix_len=150,
        random_output_len=60,
        num_prefixes=6,
        seed=3,
    )
    runs = [_run(spec, replace(config, stepwise=stepwise)) for stepwise in (False, True)]
    columns = [run.outcomes.columns() for run in runs]
    assert columns[0] == columns[1]
    assert runs[0].result().num_steps == runs[1].result().num_steps
    lengths = runs[0].outcomes.output_length
    assert not any(runs[0].outcomes.error_texts())
    assert lengths.tolist() == [60] * 60


def test_a_nodes_death_costs_another_attempt_and_no_token() -> None:
    spec = _spec(num_prompts=40, request_rate=4.0, random_output_len=200)
    undisturbed, disturbed = (
        _run(spec, _config("1p2d", failures=failures)) for failures in ((), (Failure("decode-0", 6.0, 5.0),))
    )
    assert undisturbed.outcomes.attempts.tolist() == [1] * 40
    assert disturbed.outcomes.attempts.max() == 2
    assert disturbed.result().num_retries == int((disturbed.outcomes.attempts > 1).sum()) > 3
    assert disturbed.outcomes.output_length.tolist() == [200] * 40
    assert disturbed.outcomes.largest_gap_s.max() > undisturbed.outcomes.largest_gap_s.max()


def test_a_run_leaves_no_reference_cycles() -> None:
    """The cycle collector is off during a run, so a million requests would stay in memory."""
    spec = _spec(num_prompts=60, request_rate=20.0)
    _run(spec, _config("2p2d"))
    gc.collect()
    gc.disable()
    try:
        kept = _run(spec, _config("2p2d"))
        assert gc.collect() < 60
        assert len(kept.outcomes) == 60
    finally:
        gc.enable()


def test_another_seed_gives_other_results() -> None:
    spec = WorkloadSpec(dataset="sharegpt-like", num_prompts=30, request_rate=3.0)
    first, again, other = (_run(replace(spec, seed=seed), _config("1p1d")) for seed in (1, 1, 2))
    assert first.outcomes.columns() == again.outcomes.columns()
    assert first.outcomes.columns() != other.outcomes.columns()


def test_turns_of_a_conversation_follow_each_other_and_find_their_prefix_cached() -> None:
    spec = WorkloadSpec(
        dataset="multi_turn",
        num_prompts=20,
        turns=4,
        random_input_len=320,
        turn_len=64,
        random_output_len=32,
        think_s=2,
    )
    outcomes = _run(replace(spec, request_rate=1.0), _config("1p1d")).outcomes
    rows = dict(zip(outcomes.index.tolist(), zip(outcomes.planned_s, outcomes.finished_s, strict=True), strict=True))
    for index, (planned_s, _) in rows.items():
        if index % 4:
            assert planned_s > rows[index - 1][1]
    by_index = dict(zip(outcomes.index.tolist(), outcomes.cached_tokens.tolist(), strict=True))
    assert [by_index[0], by_index[1], by_index[2]] == [0, 320, 416]


def test_flows_share_the_nics_at_their_ends() -> None:
    timeline, ended = Timeline(), []
    network = Network(timeline, bytes_per_s=100.0)
    one = network.flow("a", "c", lambda: ended.append(("one", timeline.now)))
    two = network.flow("b", "c", lambda: ended.append(("two", timeline.now)))
    three = network.flow("d", "e", lambda: ended.append(("three", timeline.now)))
    one.add(100.0)
    two.add(200.0)
    three.add(250.0)
    timeline.run()
    # Two flows share the NIC of c until one has ended; the third has NICs of its own.
    assert ended == [("one", 2.0), ("three", 2.5), ("two", 3.0)]


@pytest.mark.parametrize("seed", range(20))
def test_prompts_share_keys_as_far_as_they_share_tokens(seed: int) -> None:
    rng = Random(seed)

    def pieces() -> list[Piece]:
        return [Piece(rng.randrange(3), rng.choice([5, 16, 40])) for _ in range(rng.randrange(1, 6))]

    first, second = pieces(), pieces()
    size = rng.choice([4, 8, 16])
    one, two = (SimulatedPrompt(some, 0, size, name).block_keys for some, name in ((first, "one"), (second, "two")))
    tokens = [_tokens(some) for some in (first, second)]
    assert len(one) == len(tokens[0]) // size
    for number, (mine, theirs) in enumerate(zip(one, two, strict=False)):
        end = (number + 1) * size
        if mine == theirs:
            assert tokens[0][:end] == tokens[1][:end]
        elif first[0] == second[0] and end <= first[0].length:
            pytest.fail("blocks of one piece have different keys")


def _tokens(pieces: list[Piece]) -> list[int]:
    """The tokens that `WorkloadRequest.token_ids` makes of the pieces."""
    length = sum(piece.length for piece in pieces)
    return WorkloadRequest(0, 0.0, length, 1, pieces).token_ids(1 << 40)


def test_outputs_of_two_requests_share_no_blocks() -> None:
    pieces = [Piece(1, 20)]
    one, two = (SimulatedPrompt(pieces, 30, 8, name).block_keys for name in ("one", "two"))
    assert one[:2] == two[:2]
    assert not set(one[2:]) & set(two[2:])
    assert len(one) == 50 // 8


def test_the_goodput_search_finds_the_highest_rate_that_meets_the_slo() -> None:
    for edge in (0.07, 0.9, 3.3, 700.0):
        found = find_goodput(lambda rate, edge=edge: 1.0 if rate <= edge else 0.5, 1.0, 0.9)  # type: ignore[misc]
        assert found.rate <= edge < found.next_rate <= found.rate * 1.04
    assert find_goodput(lambda rate: 0.0, 1.0, 0.9).rate == 0.0


def test_a_prompt_in_chunks_costs_only_the_constants_more() -> None:
    whole = TIMES.step_s([(0, 900)], 0, 0)
    parts = sum(TIMES.step_s([chunk], 0, 0) for chunk in ((0, 256), (256, 512), (512, 900)))
    assert parts - whole == pytest.approx(2 * 0.0181)


def test_step_times_from_an_engine_report(tmp_path: Path) -> None:
    path = tmp_path / "engine.json"
    decode = [{"batch": batch, "step_ms": ms} for batch, ms in ((1, 10.0), (8, 24.0))]
    report = {"prefill_tokens_per_s": 1.0, "context_tokens": 1024, "prefill_ms": 512.0, "decode": decode}
    path.write_text(json.dumps(report))
    times = read_step_times(path)
    assert isinstance(times, TableTimes)
    assert times.decode_s(4, 4096) == pytest.approx(0.016)
    assert times.step_s([(0, 1024)], 0, 0) == pytest.approx(0.512)
    assert times.step_s([(0, 1024)], 8, 8192) == pytest.approx(0.526)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"prefill": [], "decode": [[1, 2]]},
        {"prefill": [[1, 2], [1, 3]], "decode": [[1, 2]]},
        {"prefill": [[1, 2]], "decode": [[1, -2]]},
        {"prefill_tokens_per_s": 1, "decode": [], "context_tokens": 8, "prefill_ms": 1},
        {"prefill_ms": 1, "decode_ms": -5},
    ],
)
def test_invalid_step_times_are_refused(tmp_path: Path, values: dict[str, object]) -> None:
    path = tmp_path / "times.json"
    path.write_text(json.dumps(values))
    with pytest.raises(InvalidRequest, match="not a table"):
        read_step_times(path)


def test_a_result_that_can_not_be_written_is_printed_all_the_same(tmp_path: Path) -> None:
    # This name is the longest one, and the file that is renamed to it has a longer one.
    path = tmp_path / f"{'x' * 250}.json"
    words = ["simulate", "--num-prompts", "1", "--result-filename", str(path)]
    ran = subprocess.run(
        [sys.executable, "-P", "-m", "baton.cli.main", *words], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 1
    assert "1p1d" in ran.stdout
    assert f"File name too long: {path}" in ran.stderr


def test_single_requests_are_in_the_file_and_not_in_the_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--num-prompts", "3", "--save-detailed", "-o", "json"]) == 0
    rate = json.loads(capsys.readouterr().out)["arrangements"][0]["rates"][0]
    assert rate["summary"]["completed"] == 3
    assert "outcomes" not in rate


def test_a_trace_has_its_own_rate(tmp_path: Path) -> None:
    trace, result = tmp_path / "trace.csv", tmp_path / "result.json"
    lines = ("TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46,30,4", "2023-11-16 18:15:47,30,4")
    trace.write_text("\n".join(lines))
    words = ["simulate", "--dataset-name", "azure", "--dataset-path", str(trace)]
    assert main([*words, "--result-filename", str(result)]) == 0
    assert json.loads(result.read_text())["arrangements"][0]["rates"][0]["rate"] is None


@pytest.mark.outside
def test_the_result_file_has_the_schema_of_live_benchmarks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"
    words = ["--splits", "2", "--num-prompts", "40", "--request-rate", "3", "--random-input-len", "300"]
    words += ["--random-output-len", "20", "--goodput", "ttft:500", "tpot:50", "--timeline", "--save-detailed"]
    assert main(["simulate", *words, "--result-filename", str(path)]) == 0
    assert "colocated:2" in capsys.readouterr().out
    result = json.loads(path.read_text())
    assert (result["schema"], result["kind"]) == ("baton.bench/1", "simulate")
    assert_result_as_frozen(result)
    colocated, disaggregated = result["arrangements"]
    assert [colocated["name"], disaggregated["name"]] == ["colocated:2", "1p1d"]
    summary = disaggregated["rates"][0]["summary"]
    assert summary["completed"] == 40
    ttft_ms = (
        np.array(disaggregated["rates"][0]["outcomes"]["first_token_s"])
        - disaggregated["rates"][0]["outcomes"]["planned_s"]
    ) * 1e3
    assert summary["mean_ttft_ms"] == pytest.approx(ttft_ms.mean(), abs=1e-2)
    assert sum(disaggregated["rates"][0]["ttft_parts"].values()) == pytest.approx(summary["mean_ttft_ms"])
    assert {kind for _, _, kind, _ in disaggregated["rates"][0]["timeline"]["decode-0.1"]} == {"decode"}
