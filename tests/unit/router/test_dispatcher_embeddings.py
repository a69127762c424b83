"""Embeddings at the router: placement, retries when nodes die, and limits."""

from __future__ import annotations

import pytest

from baton.errors import (
    EngineFault,
    InvalidRequest,
    NoCapacity,
    QueueFull,
    RequestNotFound,
    UnsupportedRequest,
    WouldBeLate,
)
from baton.messages.ids import AttemptKey
from baton.messages.node import Leg, LoadReport, NodeDescription, Outcome, RequestDelta, StageTimings
from baton.messages.pooling import PoolingRequest
from baton.observe.metrics import Distribution, Figure, declared_figures
from router.admission.limits import DispatchLimits
from router.flight.timeline import timeline
from router.placement.placer import PlacementSettings, Placer, Policy
from tests.support.router_parts import decode, prefill
from tests.support.router_rig import RouterRig, router_rig

VECTOR = bytes(range(16))
POLICIES = [Policy.COST, Policy.LEAST_LOADED, Policy.ROUND_ROBIN]


def nodes(*names: str) -> list[NodeDescription]:
    return [(prefill if name.startswith("p") else decode)(name, embedding_size=4) for name in names]


async def text_is_placed(rig: RouterRig) -> None:
    waiting, in_flight = rig.requests.num_waiting, rig.in_flight()
    reader = await rig.accepted(request_id="some-text")
    assert rig.requests.num_waiting == waiting
    assert rig.in_flight() > in_flight
    await rig.cancel(reader)


def report_embedding(rig: RouterRig, name: str, attempt: AttemptKey, vector: bytes = VECTOR) -> None:
    timings = StageTimings(1, 2, cached_tokens=3)
    rig.nodes[name].report(RequestDelta(attempt, outcome=Outcome.STOP, timings=timings, embedding=vector))


@pytest.mark.parametrize("policy", POLICIES)
async def test_an_embedding_is_computed_by_a_prefill_node_alone(policy: Policy) -> None:
    async with router_rig(*nodes("d1", "p1"), placer=Placer(PlacementSettings(policy))) as rig:
        reader = rig.ask(pooling=PoolingRequest(), request_id="mine", priority=3, cache_salt="s")
        submit = await rig.next_submit("p1")
        assert (submit.leg, submit.kv_source, submit.spec.priority, submit.spec.cache_salt) == (Leg.EMBED, None, 3, "s")
        rig.timers.advance(0.25)
        report_embedding(rig, "p1", submit.attempt)
        finished = await reader.finished()
        assert (finished.embedding, finished.finish_reason, finished.completion_tokens) == (VECTOR, "stop", 0)
        assert (finished.prompt_tokens, finished.cached_tokens) == (5, 3)
        assert (finished.ttft_ms, finished.total_ms) == (pytest.approx(250), pytest.approx(250))
        assert (finished.path.prefill_node, finished.path.decode_node) == ("", "p1")
        assert finished.path.reason == "an embedding takes one node"
        assert rig.nodes["d1"].inbox.empty()
        assert reader.chunks == []
        assert not rig.store.kept, "there is nothing to go on with"
        traced = rig.requests.timelines.find("mine")
        assert traced is not None
        spent = timeline(traced, "router-1", rig.timers.monotonic())
        assert sum(stage.duration_ns for stage in spent.stages) == spent.total_ns == spent.ttft_ns
        assert "unfinished" not in {stage.name for stage in spent.stages}
        served = rig.requests.counters.served
        figures = {one.name: one.value for one in declared_figures(served) if isinstance(one, Figure)}
        assert (figures["prompt_tokens_total"], figures["generation_tokens_total"]) == (5, 0)


async def test_an_embedding_is_retried_when_its_node_dies_and_decode_nodes_come_last() -> None:
    async with router_rig(*nodes("d1", "p1", "p2")) as rig:
        reader = rig.ask(pooling=PoolingRequest())
        first = await rig.next_attempt("p1")
        rig.nodes["p1"].die()
        second = await rig.next_attempt("p2")
        rig.nodes["p2"].die()
        third = await rig.next_submit("d1")
        assert (third.leg, third.attempt) == (Leg.EMBED, first._replace(attempt=3))
        assert second.attempt == 2
        report_embedding(rig, "d1", second, b"late")
        report_embedding(rig, "d1", third.attempt)
        finished = await reader.finished()
        assert (finished.embedding, finished.path.attempts) == (VECTOR, 3)
        assert finished.path.reason == "no prefill node is left"


async def test_nodes_of_an_older_version_get_no_embeddings() -> None:
    async with router_rig(prefill("p1"), *nodes("d1")) as rig:
        reader = rig.ask(pooling=PoolingRequest())
        report_embedding(rig, "d1", await rig.next_attempt("d1"))
        await reader.finished()
        assert rig.nodes["p1"].inbox.empty()


@pytest.mark.parametrize("policy", POLICIES)
async def test_an_embedding_is_refused_at_once_if_no_node_embeds(policy: Policy) -> None:
    async with router_rig(prefill("p1"), decode("d1"), placer=Placer(PlacementSettings(policy))) as rig:
        reader = rig.ask(pooling=PoolingRequest())
        refusal = await reader.raises(UnsupportedRequest, "'demo' can't do embed; it can generate")
        assert refusal.field == "model"
        assert reader.events == []
        assert rig.requests.counters.rejections == {"UnsupportedRequest": 1}
        await text_is_placed(rig)


async def test_an_embedding_waits_for_a_node_if_none_is_up() -> None:
    async with router_rig(limits=DispatchLimits(capacity_wait_s=5.0)) as rig:
        in_vain = await rig.accepted(pooling=PoolingRequest(), request_id="in-vain")
        rig.timers.advance(6.0)
        await in_vain.raises(NoCapacity, "no node that can embed with demo is up")
        reader = await rig.accepted(pooling=PoolingRequest())
        rig.register(*nodes("p1"))
        report_embedding(rig, "p1", await rig.next_attempt("p1"))
        await reader.finished()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("others", ["older", "as new"])
async def test_an_embedding_that_waits_for_a_full_node_delays_no_text(policy: Policy, others: str) -> None:
    """The other nodes that embed are decode nodes, and text goes to one of them alone."""
    full = prefill("p1", embedding_size=4, max_num_seqs=4)
    rest = [prefill("p2"), decode("d1")] if others == "older" else nodes("d1")
    async with router_rig(full, *rest, placer=Placer(PlacementSettings(policy))) as rig:
        await rig.tell_all("p1", running=4, waiting=9)
        reader, behind = (rig.ask(pooling=PoolingRequest(), request_id=name) for name in ("first", "second"))
        await behind.wait_until_accepted()
        assert rig.requests.num_waiting == 2
        if others == "older" or policy is Policy.COST:
            await text_is_placed(rig)
        rig.nodes["p1"].report(load=LoadReport())
        for one in (reader, behind):
            report_embedding(rig, "p1", await rig.next_attempt("p1"))
            await one.finished()


async def test_a_text_request_that_waits_delays_no_embedding() -> None:
    async with router_rig(*nodes("p1"), decode("d1", max_num_seqs=4)) as rig:
        await rig.tell_all("d1", running=4, waiting=9)
        text = await rig.accepted(max_tokens=1, request_id="text")
        assert rig.requests.num_waiting == 1
        reader = rig.ask(pooling=PoolingRequest())
        report_embedding(rig, "p1", await rig.next_attempt("p1"))
        await reader.finished()
        assert rig.requests.num_waiting == 1
        await rig.cancel(text)
        await rig.tell_all("d1")


async def test_freed_room_goes_to_the_request_that_can_use_it() -> None:
    full = [prefill("p1", embedding_size=4, max_num_seqs=4), decode("d1", max_num_seqs=4)]
    async with router_rig(*full, placer=Placer(PlacementSettings(Policy.COST))) as rig:
        await rig.tell_all("p1", "d1", running=4, waiting=9)
        asked = [rig.ask(pooling=PoolingRequest())]
        await asked[0].wait_until_accepted()
        rig.timers.advance(0.01)
        asked.append(rig.ask(max_tokens=1))
        await asked[1].wait_until_accepted()
        assert rig.requests.num_waiting == 2
        rig.nodes["d1"].report()
        await rig.serve("d1")
        await asked[1].finished()
        rig.nodes["p1"].report()
        report_embedding(rig, "p1", await rig.next_attempt("p1"))
        await asked[0].finished()


async def test_room_that_texts_and_embeddings_can_use_goes_by_queue_order() -> None:
    async with router_rig(prefill("p1", embedding_size=4, max_num_seqs=1)) as rig:
        await rig.tell_all("p1", running=1, waiting=9)
        asked = {}
        for name, embeds, priority in (("e1", True, 1), ("t1", False, 1), ("e2", True, 0), ("t2", False, 0)):
            pooling = PoolingRequest() if embeds else None
            asked[name] = rig.ask(pooling=pooling, request_id=name, priority=priority, max_tokens=1)
            await asked[name].wait_until_accepted()
            rig.timers.advance(0.01)
        rig.nodes["p1"].report(load=LoadReport())
        for name in ("e2", "t2", "e1", "t1"):
            attempt = await rig.next_attempt("p1")
            assert attempt.request_id == name
            if name.startswith("e"):
                report_embedding(rig, "p1", attempt)
            else:
                rig.report("p1", attempt, 0, "a", Outcome.LENGTH)
            await asked[name].finished()


async def test_texts_and_embeddings_have_their_own_limits() -> None:
    async with router_rig(*nodes("d1"), limits=DispatchLimits(max_queue=1, max_running=1)) as rig:
        running = rig.ask(request_id="running", max_tokens=1)
        attempt = await rig.next_attempt("d1")
        waiting = [rig.ask(request_id="t1", max_tokens=1)]
        await waiting[0].wait_until_accepted()
        rig.timers.advance(0.01)
        waiting.append(rig.ask(request_id="e1", pooling=PoolingRequest()))
        await waiting[1].wait_until_accepted()
        for name, embeds in (("e2", True), ("t2", False)):
            await rig.ask(request_id=name, pooling=PoolingRequest() if embeds else None).raises(QueueFull)
        rig.report("d1", attempt, 0, "a", Outcome.LENGTH)
        await rig.serve("d1")
        report_embedding(rig, "d1", await rig.next_attempt("d1"))
        for one in (running, *waiting):
            await one.finished()


async def test_the_times_of_embeddings_predict_nothing_for_texts() -> None:
    async with router_rig(decode("d1", embedding_size=4, max_num_seqs=1)) as rig:
        text = rig.ask(request_id="text", max_tokens=1)
        attempt = await rig.next_attempt("d1")
        rig.timers.advance(6.0)
        await rig.end(text, "d1", attempt, 0, "a")
        for number in range(3):
            reader = rig.ask(pooling=PoolingRequest(), request_id=f"e{number}")
            report_embedding(rig, "d1", await rig.next_attempt("d1"))
            await reader.finished()
        await rig.tell_all("d1", running=1, waiting=9)
        await rig.ask(ttft_slo_ms=1000.0).raises(WouldBeLate, "in 6")
        await rig.tell_all("d1")
        served = rig.requests.counters.served
        told = [one for one in declared_figures(served) if isinstance(one, Distribution)]
        counts = {one.name: one.buckets[-1][1] for one in told}
        assert counts["time_to_first_token_seconds"] == counts["request_decode_time_seconds"] == 1
        assert counts["e2e_request_latency_seconds"] == counts["request_prefill_time_seconds"] == 4


async def test_an_embeddings_prompt_may_have_the_models_maximum_length() -> None:
    async with router_rig(*nodes("p1")) as rig:
        reader = rig.ask("x" * 64, pooling=PoolingRequest())
        report_embedding(rig, "p1", await rig.next_attempt("p1"))
        assert (await reader.finished()).prompt_tokens == 64
        await rig.ask("x" * 65, pooling=PoolingRequest()).raises(InvalidRequest, "at most 64")
        await rig.ask("", pooling=PoolingRequest()).raises(InvalidRequest, "prompt")


async def test_a_cancelled_embedding_is_aborted_at_its_node() -> None:
    async with router_rig(*nodes("p1")) as rig:
        reader = rig.ask(pooling=PoolingRequest(), request_id="mine")
        attempt = await rig.next_attempt("p1")
        await rig.resume("mine", 0).raises(RequestNotFound, "no stream")
        await rig.cancel(reader)
        assert (await rig.next_abort("p1")).attempt == attempt


@pytest.mark.parametrize("told", [{"outcome": Outcome.STOP}, {"outcome": Outcome.LENGTH}, {"token_ids": (1,)}])
async def test_a_node_that_generates_instead_of_embedding_fails_the_request(told: dict[str, object]) -> None:
    async with router_rig(*nodes("p1")) as rig:
        reader = rig.ask(pooling=PoolingRequest())
        attempt = await rig.next_attempt("p1")
        rig.nodes["p1"].report(RequestDelta(attempt, **told))  # type: ignore[arg-type]
        await reader.raises(EngineFault, "did not embed")


async def test_many_long_inputs_of_a_call_need_no_threads() -> None:
    async with router_rig(*nodes("p1"), limits=DispatchLimits(thread_text_chars=2, max_tokenizing=0)) as rig:
        reader = rig.ask(pooling=PoolingRequest(), prompt=[1, 2, 3, 4])
        report_embedding(rig, "p1", await rig.next_attempt("p1"))
        assert (await reader.finished()).embedding == VECTOR
