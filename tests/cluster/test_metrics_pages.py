"""The metrics pages of all processes: during a hand-off, and the set of metrics that exist."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from baton.errors import InvalidRequest, TransferCause
from baton.messages.generation import GenerateRequest
from baton.messages.node_report import RankReport
from baton.observe.metrics import render
from baton.observe.rank_reports import rank_reports
from baton.runner import SimulatedSpec, StepTime
from baton.runner.simulated import SimulatedRunner
from baton.wire.server.event_loop import RpcEventLoop
from kv_transfer.figures import failure_figures
from tests.support.metrics_page import read_metrics_samples, read_metrics_text
from tests.support.mini_cluster import MiniCluster, mini_cluster, simulated_model_dir
from tests.support.step_gate import StepGate

SPEC = SimulatedSpec(num_blocks=96, vocab_size=256, max_model_len=512)


MONITORING = Path(__file__).parents[2] / "deploy" / "monitoring"
CHART_VALUES = MONITORING.parent / "helm/baton/values.yaml"


async def page(cluster: MiniCluster, node_id: str) -> dict[str, float]:
    """Return the samples of a node."""
    return await read_metrics_samples(cluster.nodes[node_id].node.metrics_port or 0)


async def test_a_prompt_in_transfer_is_shown_by_both_nodes(tmp_path: Path) -> None:
    simulated_model_dir(tmp_path, 256, 512)
    gate = StepGate(allowed=0)
    held = SimulatedSpec(num_blocks=96, vocab_size=256, max_model_len=512, step_time=StepTime(1.0), sleep=gate)

    def make_runner(node_id: str) -> SimulatedRunner:
        return SimulatedRunner(held if node_id.startswith("prefill") else SPEC)

    async with mini_cluster(make_runner, tmp_path, token_ids_only=True, metrics_port=0) as cluster:
        answer = asyncio.create_task(cluster.generate(GenerateRequest([1] * 40, temperature=0.0, max_tokens=4)))
        # Each poll is a round trip, so the loop does not spin.
        while not any(event.name == "subscribed" for event in await cluster.trace("decode-0")):
            pass
        decode = await page(cluster, "decode-0")
        gate.allow(None)
        on_decode = '{{model_name="{}",node="decode-0",role="decode"{}}}'.format
        model = cluster.nodes["decode-0"].description.model
        stage = "baton_num_requests_kv_fetch_by_stage"
        assert decode[stage + on_decode(model, ',stage="waiting_to_start"')] == 1
        assert decode[stage + on_decode(model, ',stage="in_progress"')] == 0
        open_states = {',state="planned"', ',state="reserved"'}
        assert sum(decode["baton_kv_open_transfers" + on_decode(model, state)] for state in open_states) == 1
        assert decode["baton_kv_transfer_age_seconds" + on_decode(model, "")] > 0
        assert len((await answer).token_ids) == 4
        await cluster.wait_until_idle()
        decode, prefill = await page(cluster, "decode-0"), await page(cluster, "prefill-0")
        assert decode[stage + on_decode(model, ',stage="waiting_to_start"')] == 0
        assert decode["baton_prefix_cache_hits_total" + on_decode(model, ',source="remote"')] == 40
        arrived = ',outcome="arrived",peer="prefill-0",role="decode"'
        assert decode[f'baton_kv_transfers_total{{model_name="{model}",node="decode-0"{arrived}}}'] == 1
        of_peer = ',peer="prefill-0",role="decode"'
        for figure in ("seconds", "post_seconds", "bytes", "descriptors"):
            assert decode[f'baton_kv_transfer_{figure}_sum{{model_name="{model}",node="decode-0"{of_peer}}}'] > 0
        assert decode[f'baton_kv_handshake_seconds_count{{model_name="{model}",node="decode-0"{of_peer}}}'] == 1
        assert not any(decode["baton_kv_open_transfers" + on_decode(model, state)] for state in open_states)
        states = [value for sample, value in prefill.items() if sample.startswith("baton_kv_leases{")]
        assert states == [0, 0, 0]


@dataclass(frozen=True)
class Metric:
    """The type, labels and bucket bounds of one metric."""

    type: str
    labels: frozenset[str]
    """The labels beside those of the process."""
    bounds: tuple[float, ...] = ()
    """The bounds of a histogram's buckets, without the infinite one."""


OF_A_PROCESS = frozenset({"model_name", "node", "role"})
TTFT = (*(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75), *(1, 2.5, 5, 7.5, 10, 20, 40, 80))
ITL = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)
TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


def gauge(*labels: str) -> Metric:
    return Metric("gauge", frozenset(labels))


def counter(*labels: str) -> Metric:
    return Metric("counter", frozenset(labels))


def histogram(*labels: str, bounds: tuple[float, ...] = ()) -> Metric:
    return Metric("histogram", frozenset(labels), bounds)


PROCESS = {
    "process_cpu_seconds_total": counter(),
    "process_resident_memory_bytes": gauge(),
    "process_open_fds": gauge(),
    "process_max_fds": gauge(),
    "process_threads": gauge(),
    "event_loop_tasks": gauge(),
    "event_loop_held_seconds": histogram(),
    "event_loop_held_cpu_seconds": histogram(),
    "event_loop_held_seconds_max": gauge(),
    "event_loop_held_cpu_seconds_max": gauge(),
}
ROUTER = {
    **PROCESS,
    "grpc_connections": gauge(),
    "grpc_calls": gauge(),
    "http_connections": gauge(),
    "connections_refused_total": counter("limit"),
    "num_requests_running": gauge(),
    "num_requests_waiting": gauge(),
    "logprob_reserved_bytes": gauge(),
    "prompt_tokens_total": counter(),
    "generation_tokens_total": counter(),
    "request_success_total": counter("finished_reason"),
    "request_failure_total": counter(),
    "request_errors_total": counter("error"),
    "time_to_first_token_seconds": histogram(bounds=TTFT),
    "inter_token_latency_seconds": histogram(bounds=ITL),
    "request_time_per_output_token_seconds": histogram(bounds=ITL),
    "e2e_request_latency_seconds": histogram(),
    "request_queue_time_seconds": histogram(),
    "request_prefill_time_seconds": histogram(),
    "request_decode_time_seconds": histogram(),
    "request_attempts_total": counter("cause"),
    "router_decisions_total": counter("decision", "reason"),
    "rejections_total": counter("reason"),
    "node_up": gauge(),
}
NODE = {
    **PROCESS,
    "num_requests_running": gauge(),
    "num_requests_waiting": gauge(),
    "num_requests_waiting_by_reason": gauge("reason"),
    "num_uncomputed_prompt_tokens": gauge(),
    "num_requests_kv_fetch_by_stage": gauge("stage"),
    "kv_cache_usage_perc": gauge(),
    "prefix_cache_queries_total": counter(),
    "prefix_cache_hits_total": counter("source"),
    "prompt_tokens_by_source_total": counter("source"),
    "num_preemptions_total": counter("mode"),
    "spec_decode_num_drafts_total": counter(),
    "spec_decode_num_draft_tokens_total": counter(),
    "spec_decode_num_accepted_tokens_total": counter(),
    "spec_decode_num_accepted_tokens_per_pos_total": counter("position"),
    "iteration_tokens_total": histogram(bounds=TOKENS),
    "kv_leased_blocks": gauge(),
    "kv_quarantined_blocks": gauge(),
}
PREFILL = {**NODE, "kv_lease_age_seconds": gauge()}
DECODE = {
    **NODE,
    "kv_transfer_seconds": histogram("peer"),
    "kv_transfer_bytes": histogram("peer"),
    "kv_transfer_descriptors": histogram("peer"),
    "kv_handshake_seconds": histogram("peer"),
    "kv_digest_mismatch_total": counter(),
    "rank_up": gauge("rank"),
    "rank_resident_memory_bytes": gauge("rank"),
    "rank_shared_memory_bytes": gauge("rank"),
    "rank_cpu_seconds_total": counter("rank"),
    "rank_threads": gauge("rank"),
}


def parse_metrics(text: str) -> dict[str, Metric]:
    """Parse a page; return its metrics by name without the prefix."""
    found = {}
    for family in text_string_to_metric_families(text):
        assert family.name.startswith("baton_"), family.name
        assert family.documentation
        name = family.name.removeprefix("baton_") + ("_total" if family.type == "counter" else "")
        labels = {frozenset(sample.labels) - {"le"} for sample in family.samples}
        assert len(labels) == 1, f"{name} has now these labels and now those: {labels}"
        bounds = {float(sample.labels["le"]) for sample in family.samples if "le" in sample.labels}
        assert name not in found, f"{name} is there twice"
        found[name] = Metric(family.type, labels.pop() - OF_A_PROCESS, tuple(sorted(bounds - {float("inf")})))
    return found


class RunnerOfTwoRanks(SimulatedRunner):
    """Its second rank is this process, too."""

    def rank_reports(self) -> Sequence[RankReport]:
        return rank_reports([os.getpid()])


def make_runner(node_id: str) -> SimulatedRunner:
    return (RunnerOfTwoRanks if node_id.startswith("decode") else SimulatedRunner)(SPEC)


@asynccontextmanager
async def cluster_after_requests(directory: Path) -> AsyncIterator[MiniCluster]:
    """Yield a cluster that has served two requests and refused one."""
    simulated_model_dir(directory, 256, 512)
    async with mini_cluster(make_runner, directory, token_ids_only=True, metrics_port=0) as cluster:
        for seed in (1, 2):
            answer = await cluster.generate(GenerateRequest([seed] * 40, temperature=0.0, max_tokens=4))
            assert len(answer.token_ids) == 4
        with pytest.raises(InvalidRequest):
            await cluster.generate(GenerateRequest([1], temperature=-1.0))
        yield cluster


def check_metrics(expected: dict[str, Metric], found: dict[str, Metric]) -> None:
    """Check that the page has all expected metrics with type, labels and bounds."""
    for name, kind in expected.items():
        seen = found[name]
        assert (name, seen.type, seen.labels) == (name, kind.type, kind.labels)
        assert not kind.bounds or seen.bounds == kind.bounds, name
        assert kind.type != "histogram" or seen.bounds, name


def names_in(expression: str) -> set[str]:
    """Return the metrics that a Prometheus expression names."""
    return set(re.findall(r"\bbaton[_:][A-Za-z0-9_:]+", expression))


def check_expression(expression: str, found: dict[str, Metric], recorded: Iterable[str]) -> None:
    """Check that an expression names only existing metrics and labels."""
    labels: set[str] = set(OF_A_PROCESS)
    for name in names_in(expression):
        if ":" in name:
            assert name in recorded, f"{name} is recorded by no rule: {expression}"
            labels |= {"cause"}
            continue
        base = re.sub(r"_(bucket|sum|count)\Z", "", name.removeprefix("baton_"))
        assert base in found, f"{name} is exported by no process: {expression}"
        assert (base == name.removeprefix("baton_")) == (found[base].type != "histogram"), expression
        labels |= found[base].labels | ({"le"} if name.endswith("_bucket") else set())
    groups = re.findall(r"\b(?:by|on|without) \(([^)]*)\)", expression)
    selectors = re.findall(r"\{([^}]*)\}", expression)
    used = {label.strip() for group in groups for label in group.split(",")}
    used |= {label for selector in selectors for label in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector)}
    assert used <= labels, f"{used - labels} in {expression}"
    for opening, closing in ("()", "{}", "[]"):
        assert expression.count(opening) == expression.count(closing), expression


def rules() -> Sequence[dict[str, Any]]:
    groups = yaml.safe_load((MONITORING / "rules.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_every_process_has_the_promised_metrics_and_rules_and_panels_use_no_others(tmp_path: Path) -> None:
    # On the loop that processes have.
    with asyncio.Runner(loop_factory=RpcEventLoop) as runner:
        runner.run(_check_every_process(tmp_path))


async def _check_every_process(tmp_path: Path) -> None:
    async with cluster_after_requests(tmp_path) as cluster:
        router = parse_metrics(await read_metrics_text(int(cluster.router.http.rpartition(":")[2])))
        prefill, decode = [
            parse_metrics(await read_metrics_text(cluster.nodes[name].node.metrics_port or 0))
            for name in ("prefill-0", "decode-0")
        ]
    check_metrics(ROUTER, router)
    check_metrics(PREFILL, prefill)
    check_metrics(DECODE, decode)
    assert not any(name.startswith("rank_") for name in prefill), "its process has figures of its own"
    # These appear only after a failure.
    faults = parse_metrics(
        render(failure_figures({("p", TransferCause.LEASE_LOST): 1}), dict.fromkeys(OF_A_PROCESS, "")).decode()
    )
    assert faults["kv_transfer_failures_total"] == counter("cause", "peer")
    found = {**router, **prefill, **decode, **faults}
    recorded = [rule["record"] for rule in rules() if "record" in rule]
    for rule in rules():
        assert ("alert" in rule) == ("annotations" in rule)
        check_expression(rule["expr"], found, recorded)
    for role, page in (("prefill", prefill), ("decode", decode)):
        # The chart's autoscalers compare a sum over the pods of a role with a multiple of these values.
        scaled_by = yaml.safe_load(CHART_VALUES.read_text())[role]["autoscaling"]["metrics"]
        assert scaled_by
        assert {page[name.removeprefix("baton_")] for name in scaled_by} == {gauge()}
    panels = json.loads((MONITORING / "dashboard.json").read_text())["panels"]
    expressions = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    assert len(expressions) > 30
    for expression in expressions:
        check_expression(expression, found, recorded)
    documented = re.findall(r"`baton_([a-z_]+)`", (MONITORING.parents[1] / "docs/monitoring.md").read_text())
    assert len(documented) > 10
    assert set(documented) <= set(found)


def test_panels_of_the_dashboard_do_not_overlap() -> None:
    panels = json.loads((MONITORING / "dashboard.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [panel["gridPos"] for panel in panels]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    cells = [(x, y) for p in places for x in range(p["x"], p["x"] + p["w"]) for y in range(p["y"], p["y"] + p["h"])]
    assert len(set(cells)) == len(cells)
    assert all(before["y"] <= after["y"] for before, after in pairwise(places))


@pytest.mark.parametrize(
    "expression",
    ["rate(baton_no_such_metric[1m])", "sum by (colour) (baton_node_up)", "baton:nothing:rate1m", "sum(baton_node_up"],
)
def test_an_expression_with_an_unknown_name_is_detected(expression: str) -> None:
    with pytest.raises(AssertionError):
        check_expression(expression, {"node_up": gauge()}, ())
