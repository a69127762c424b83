"""The metrics page: an engine's metrics as a Prometheus parser reads them, and the port where they are served."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import get_args

import pytest
from prometheus_client.parser import text_string_to_metric_families

from baton.cli.cluster.supervisor.plan import plan_nodes
from baton.config import UpConfig
from baton.engine.batch import ModelRunnerOutput, SchedulerOutput
from baton.engine.connector import BlockFate, ExternalTokens
from baton.engine.request import Request
from baton.engine.runner import ModelInfo
from baton.errors import ConfigError
from baton.messages.node import Leg
from baton.node.reports.figures import engine_figures, model_figures
from baton.observe.metrics import Figure, Histogram, by_label, render
from baton.observe.metrics_page import MetricsPage
from baton.security.http_access import PageAuthenticator
from baton.security.keys import KeyRing, write_keys
from tests.doubles.fake_clock import FakeClock
from tests.doubles.fake_connector import FakeConnector
from tests.doubles.fake_runner import FakeRunner
from tests.support.engine_rig import EngineRig, prompt_of
from tests.support.executors import Ahead, executor_for

Samples = dict[str, float]


def samples(page: bytes) -> Samples:
    """The value of each sample, by its name and labels: name{key=value,...}."""
    found: Samples = {}
    for family in text_string_to_metric_families(page.decode()):
        assert family.name.startswith("baton_")
        assert family.documentation
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            found[sample.name.removeprefix("baton_") + (f"{{{labels}}}" if labels else "")] = sample.value
    return found


def page_of(rig: EngineRig) -> Samples:
    return samples(render(engine_figures(rig.scheduler.make_stats(), rig.core.step_times), {}))


def test_a_page_says_what_the_checks_at_start_found() -> None:
    model = ModelInfo("demo", "", "", "float32", "", 4096, 2048, frozenset(), bit_exact=True, is_verified=False)
    assert samples(render(model_figures(model), {})) == {"model_verified": 0, "model_bit_exact": 1}


def test_a_figure_has_the_labels_of_its_process_and_its_own() -> None:
    figures = [
        Figure("kv_cache_usage_perc", "Used.", 0.5, {}),
        *by_label("num_preemptions_total", "Preemptions.", "mode", {"swap": 2, "recompute": 1}),
        *by_label("num_preemptions_total", "Preemptions.", "mode", {'od"d\\\n': 3}),
    ]
    page = render(figures, {"node": "d0", "role": "decode"})
    assert samples(page) == {
        "kv_cache_usage_perc{node=d0,role=decode}": 0.5,
        "num_preemptions_total{mode=swap,node=d0,role=decode}": 2,
        "num_preemptions_total{mode=recompute,node=d0,role=decode}": 1,
        'num_preemptions_total{mode=od"d\\\n,node=d0,role=decode}': 3,
    }
    types = {family.name: family.type for family in text_string_to_metric_families(page.decode())}
    assert types == {"baton_kv_cache_usage_perc": "gauge", "baton_num_preemptions": "counter"}


def test_histograms_of_one_name_are_one_metric() -> None:
    slow, fast = Histogram((0.1, 1.0)), Histogram((0.1, 1.0))
    slow.observe(0.5)
    fast.observe(0.05)
    page = render([slow.now("reads", "Reads.", {"peer": "p0"}), fast.now("reads", "Reads.", {"peer": "p1"})], {})
    (family,) = text_string_to_metric_families(page.decode())
    assert (family.name, family.type, page.count(b"# TYPE")) == ("baton_reads", "histogram", 1)
    counted = {(sample.labels["peer"], sample.labels.get("le")): sample.value for sample in family.samples}
    assert [counted["p0", bound] for bound in ("0.1", "1.0", "+Inf")] == [0, 1, 1]
    assert [counted["p1", bound] for bound in ("0.1", "1.0", "+Inf")] == [1, 1, 1]


def test_waiting_requests_by_reason_and_prefix_cache_hits_by_source() -> None:
    rig = EngineRig(max_num_seqs=1)
    prompt = prompt_of(16)
    rig.begin("pulled", prompt, leg=Leg.DECODE, max_tokens=2)
    assert page_of(rig)["num_requests_waiting_by_reason{reason=remote_kv}"] == 1
    rig.complete_transfer("pulled")
    assert page_of(rig)["num_requests_kv_fetch_by_stage{stage=completed_waiting}"] == 1
    rig.run()
    rig.add("found", prompt, max_tokens=2)
    rig.begin("queues", 16, max_tokens=2)
    page = page_of(rig)
    assert (page["num_requests_running"], page["num_requests_waiting"]) == (1, 1)
    assert page["num_requests_waiting_by_reason{reason=capacity}"] == 1
    assert (page["kv_cache_blocks"], page["kv_cache_usage_perc"]) == (64, 4 / 64)
    assert page["prefix_cache_requests_total"] == 2
    assert page["prefix_cache_queries_total"] == 32
    for source, requests, tokens in (("device", 1, 12), ("host", 0, 0), ("remote", 1, 16)):
        assert page[f"prefix_cache_request_hits_total{{source={source}}}"] == requests
        assert page[f"prefix_cache_hits_total{{source={source}}}"] == tokens


def test_preemptions_and_the_host_tier() -> None:
    for mode in ("recompute", "swap"):
        rig = EngineRig(6, preemption_mode=mode, num_host_blocks=9)
        rig.add("old", 8, max_tokens=8)
        rig.add("new", 7, max_tokens=8)
        while not rig.scheduler.make_stats().num_preemptions:
            rig.step()
        page = page_of(rig)
        assert page[f"num_preemptions_total{{mode={mode}}}"] == 1
        assert page["kv_host_cache_blocks"] == 8
        assert (page["kv_host_cache_usage_perc"] > 0) is (mode == "swap")


def test_faults_are_counted() -> None:
    rig = EngineRig()
    rig.connector.raise_in = "get_num_new_matched_tokens"
    rig.begin("unlucky", 8, leg=Leg.DECODE)
    rig.transfer(released=["nobody"])
    rig.add("leaves", 8)
    decided = rig.scheduler.schedule()
    rig.abort("leaves")
    rig.commit(decided)
    page = page_of(rig)
    assert page["kv_connector_errors_total"] == 1
    assert page["unknown_transfers_total"] == 1
    assert page["skipped_results_total"] == 1


class SlowConnector(FakeConnector):
    """A connector with which scheduling takes 1 s and committing 4 s."""

    clock: FakeClock

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> ExternalTokens:
        self.clock.advance(1)
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def request_finished(self, request: Request, block_ids: Sequence[int], transferring: bool) -> BlockFate:
        self.clock.advance(4)
        return super().request_finished(request, block_ids, transferring)


class SlowRunner(FakeRunner):
    """A runner whose steps take 2 s."""

    clock: FakeClock

    def expect(self, scheduler_output: SchedulerOutput) -> None:
        """Steps are begun when they are executed."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        self.clock.advance(2)
        return super().execute_model(scheduler_output)


@pytest.mark.parametrize("ahead", get_args(Ahead))
def test_a_steps_time_is_split_into_its_parts(ahead: Ahead) -> None:
    connector, runner = SlowConnector(), SlowRunner(65, 4)
    rig = EngineRig(connector=connector, executor=executor_for(ahead))
    connector.clock = runner.clock = rig.clock
    connector.unavailable.add("r")
    rig.core.runner = rig.runner = runner
    rig.complete("r", 8, leg=Leg.DECODE, max_tokens=2)
    page = page_of(rig)
    assert page["engine_steps_total"] == 2
    assert page["engine_step_seconds_total{stage=schedule}"] == 1
    assert page["engine_step_seconds_total{stage=run}"] == 4
    assert page["engine_step_seconds_total{stage=update}"] == 4


def test_each_node_of_a_cluster_has_its_page_on_a_port_of_its_own() -> None:
    def ports(config: UpConfig) -> list[str]:
        commands = [child.command for child in plan_nodes(config, "redis://r", 1, None)]
        return [command[command.index("--metrics-port") + 1] for command in commands if "--metrics-port" in command]

    assert ports(UpConfig.model_validate({"prefill": 2, "metrics_port": 9400})) == ["9400", "9401", "9402"]
    assert ports(UpConfig.model_validate({"prefill": 2})) == []


# The port.


@pytest.fixture
async def port() -> AsyncIterator[int]:
    page = MetricsPage(lambda: b"baton_figure 1.0\n")
    yield await page.start("127.0.0.1", 0)
    await page.stop()


async def send_request(port: int, question: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(question)
    try:
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def test_the_page_is_where_prometheus_looks(port: int) -> None:
    answer = await send_request(port, b"GET /metrics?x=1 HTTP/1.1\r\nHost: here\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=")
    assert b"Content-Length: 17\r\n" in head
    assert body == b"baton_figure 1.0\n"


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", b"HTTP/1.1 404 "),
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"HTTP/1.1 405 "),
        (b"POST /livez HTTP/1.1\r\n\r\n", b"HTTP/1.1 405 "),
        (b"\r\n\r\n", b"HTTP/1.1 404 "),
        (b"GET  \r\n\r\n", b"HTTP/1.1 404 "),
        (b"x" * 100_000, b""),
    ],
    ids=["elsewhere", "post", "post to a probe", "nothing", "no path", "endless"],
)
async def test_other_paths_and_methods_are_refused(port: int, question: bytes, answer: bytes) -> None:
    assert (await send_request(port, question)).startswith(answer)
    assert (await send_request(port, b"GET /metrics HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 200 ")


async def test_liveness_and_readiness_probes_need_no_key(tmp_path: Path) -> None:
    ready: list[bool] = []
    write_keys(tmp_path / "keys", [])
    locked = PageAuthenticator("127.0.0.1", "", KeyRing(tmp_path / "keys"))
    page = MetricsPage(lambda: b"", locked, is_ready=lambda: bool(ready))
    port = await page.start("127.0.0.1", 0)

    async def status(path: bytes) -> bytes:
        return (await send_request(port, b"GET " + path + b" HTTP/1.1\r\n\r\n")).split()[1]

    asked = (b"/livez", b"/readyz", b"/metrics", b"/other")
    assert [await status(path) for path in asked] == [b"200", b"503", b"401", b"401"]
    ready.append(True)
    assert await status(b"/readyz") == b"200"
    await page.stop()


async def test_a_port_that_is_in_use_is_an_error_that_names_it(port: int) -> None:
    with pytest.raises(ConfigError, match="choose another one"):
        await MetricsPage(lambda: b"").start("127.0.0.1", port)
