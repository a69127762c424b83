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
from router.admission.tenant_figures import TenantFigures
from tests.support.metrics_page import read_metrics_samples, read_metrics_text
from tests.support.mini_cluster import MiniCluster, mini_cluster
from tests.support.outside import assert_as_frozen
from tests.support.step_gate import StepGate

pytestmark = pytest.mark.one_transport

SPEC = SimulatedSpec(num_blocks=96, vocab_size=256, max_model_len=512)


MONITORING = Path(__file__).parents[2] / "deploy" / "monitoring"
CHART_VALUES = MONITORING.parent / "helm/baton/values.yaml"


async def page(cluster: MiniCluster, node_id: str) -> dict[str, float]:
    """Return the samples of a node."""
    return await read_metrics_samples(cluster.nodes[node_id].node.metrics_port or 0)


async def test_a_prompt_in_transfer_is_shown_by_both_nodes(tmp_path: Path) -> None:
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


def gauge(*labels: str) -> Metric:
    return Metric("gauge", frozenset(labels))


def parse_metrics(text: str) -> dict[str, Metric]:
    """Parse a page; return its metrics by name without the prefix."""
    found = {}
    for family in text_string_to_metric_families(text):
        assert family.name.startswith("baton_"), family.name
        assert family.documentation
        name = family.name.removeprefix("baton_") + ("_total" if family.type == "counter" else "")
        labels = {frozenset(sample.labels) - {"le"} for sample in family.samples}
        assert len(labels) == 1, f"{name} has now these labels and now those: {labels}"
        assert all(found >= OF_A_PROCESS for found in labels), name
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
    async with mini_cluster(make_runner, directory, token_ids_only=True, metrics_port=0) as cluster:
        for seed in (1, 2):
            answer = await cluster.generate(GenerateRequest([seed] * 40, temperature=0.0, max_tokens=4))
            assert len(answer.token_ids) == 4
        with pytest.raises(InvalidRequest):
            await cluster.generate(GenerateRequest([1], temperature=-1.0))
        yield cluster


def listed(process: str, page: dict[str, Metric]) -> str:
    """A line for each metric of a page."""
    lines = []
    for name, metric in sorted(page.items()):
        bounds = [f"le={','.join(f'{bound:g}' for bound in metric.bounds)}"] if metric.bounds else []
        lines.append(" ".join((f"{process}: baton_{name}", metric.type, *sorted(metric.labels), *bounds)) + "\n")
    return "".join(lines)


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


@pytest.mark.outside
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
    # These appear only after a failure.
    faults = parse_metrics(
        render(failure_figures({("p", TransferCause.LEASE_LOST): 1}), dict.fromkeys(OF_A_PROCESS, "")).decode()
    )
    # And these if there are keys.
    tenants = TenantFigures(lambda tenant: 0.0)
    tenants.placed("t", "normal", 1.0, 0.0, 0.0)
    of_tenants = parse_metrics(render(tenants.figures(), dict.fromkeys(OF_A_PROCESS, "")).decode())
    pages = {
        "router": router,
        "router with tenants": of_tenants,
        "prefill node": prefill,
        "decode node of ranks": decode,
        "after a failure": faults,
    }
    assert_as_frozen("metrics.txt", "".join(listed(process, page) for process, page in pages.items()))
    found = {**router, **of_tenants, **prefill, **decode, **faults}
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
