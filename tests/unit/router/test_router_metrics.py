"""The metrics page of a router: results and times of its requests."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from baton.errors import DeadlineExceeded
from baton.messages.node import Outcome
from baton.observe.metrics import declared_figures, render
from router.counters import Served
from router.flight.flight_table import AttemptCause
from router.operations.metrics import figures
from tests.support.http_rig import finished
from tests.support.router_parts import decode, prefill
from tests.support.router_rig import router_rig

TELL_APART = ("le", "finished_reason", "cause", "node")


def samples(page: bytes) -> dict[tuple[str, str], float]:
    """Return samples by name and by the label that distinguishes samples of one name."""
    found = {}
    for family in text_string_to_metric_families(page.decode()):
        for sample in family.samples:
            apart = [
                sample.labels[name]
                for name in ("le", "finished_reason", "cause", "error", "node")
                if name in sample.labels
            ]
            found[sample.name, "".join(apart[:1])] = sample.value
    return found


def test_outcomes_and_tokens_of_requests_are_counted() -> None:
    served = Served()
    served.count(replace(finished("stop", 5), ttft_ms=30.0, total_ms=230.0))
    served.count(replace(finished("length", 1), ttft_ms=70.0, total_ms=70.0))
    found = samples(render(declared_figures(served), {}))
    assert found["baton_request_success_total", "stop"] == found["baton_request_success_total", "length"] == 1
    assert (found["baton_prompt_tokens_total", ""], found["baton_generation_tokens_total", ""]) == (6, 6)
    ttft = "baton_time_to_first_token_seconds"
    assert [found[f"{ttft}_bucket", bound] for bound in ("0.02", "0.04", "0.06", "0.08", "+Inf")] == [0, 1, 1, 2, 2]
    assert (found[f"{ttft}_count", ""], found[f"{ttft}_sum", ""]) == (2, 0.1)
    # A request of one token has no time per token.
    tpot = "baton_request_time_per_output_token_seconds"
    assert (found[f"{tpot}_count", ""], found[f"{tpot}_sum", ""]) == (1, 0.05)
    assert found["baton_e2e_request_latency_seconds_count", ""] == 2
    assert found["baton_request_decode_time_seconds_sum", ""] == pytest.approx(0.2)
    assert found["baton_request_prefill_time_seconds_count", ""] == 2


async def test_inter_token_gaps_are_measured_per_sequence() -> None:
    async with router_rig(prefill("p1"), decode("d1")) as rig:
        reader = rig.ask(max_tokens=3, n=2)
        attempt = await rig.next_attempt("p1", "d1")
        rig.report("p1", attempt, 0, "a", Outcome.HANDED_OFF)
        await reader.wait_for_tokens(1)
        for index, sequence, text in ((1, 0, "b"), (0, 1, "x"), (1, 1, "y"), (2, 0, "c"), (2, 1, "z")):
            rig.timers.advance(0.04)
            outcome = Outcome.LENGTH if index == 2 else None
            rig.report("d1", attempt, index, text, outcome, sequence_index=sequence)
            await reader.wait_for_tokens(len(reader.token_ids) + 1)
        await reader.finished()
        found = samples(render(declared_figures(rig.requests.counters.served), {}))
        gaps = "baton_inter_token_latency_seconds"
        assert (found[f"{gaps}_count", ""], found[f"{gaps}_sum", ""]) == (4, pytest.approx(0.04 * (1 + 1 + 3 + 2)))


async def test_requests_that_ended_with_an_error_are_counted_by_the_error() -> None:
    async with router_rig(prefill("p1"), decode("d1")) as rig:
        late = rig.ask(timeout_s=1.0)
        await rig.next_submit("p1")
        rig.timers.advance(1.0)
        await late.raises(DeadlineExceeded)
        await rig.next_abort("p1")
        left = rig.ask(request_id="left")
        await rig.next_submit("p1")
        await rig.cancel(left)
        found = samples(render(declared_figures(rig.requests.counters), {}))
        errors = {key: value for (name, key), value in found.items() if name == "baton_request_errors_total"}
        assert {key: value for key, value in errors.items() if value} == {"deadline_exceeded": 1, "cancelled": 1}
        assert found["baton_request_failure_total", ""] == 1, "a client's own cancel is no failure"
        assert {"attempts_exhausted", "engine_fault", "slow_reader", "transfer_failed"} <= errors.keys()


async def test_the_metrics_page_of_a_router_has_every_figure() -> None:
    async with router_rig(prefill("p1"), decode("d1")) as rig:
        reader = rig.ask(max_tokens=1)
        for name in ("p1", "d1"):
            await rig.next_submit(name)
        rig.nodes["p1"].die()
        await rig.next_abort("d1")
        await rig.serve("d1")
        assert (await reader.finished()).path.attempts == 2
        page = render(figures(rig.dispatcher.requests, rig.view, rig.timers.monotonic(), 0.0), {})
        found = samples(page)
        assert (found["baton_node_up", "p1"], found["baton_node_up", "d1"]) == (0, 1)
        attempts = {cause.value: found["baton_request_attempts_total", cause.value] for cause in AttemptCause}
        assert {cause: count for cause, count in attempts.items() if count} == {"first": 1, "node_lost": 1}
        assert found["baton_num_requests_running", ""] == found["baton_num_requests_waiting", ""] == 0
