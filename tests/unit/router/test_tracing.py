"""Requests as spans: the deciding parts, with a tracer that keeps its spans."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from baton.engine.batch import EngineCoreEvent, EngineCoreEventType
from baton.messages.generation import ModelCard
from baton.messages.ids import AttemptKey
from baton.messages.node import Leg, Submit
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams
from baton.node.attempts.attempt_times import AttemptClock, AttemptSpans, Stage, stages
from baton.observe.start_tracing import is_asked_for, start_tracing
from router.flight.timeline import RequestSpans
from router.placement.placement import Placement
from router.placement.reasons import IN_TURN
from tests.doubles.fake_tracing import FakeTracer
from tests.support.router_parts import MODEL, decode, prefill
from tests.support.router_rig import router_rig

KEY = AttemptKey("r", 1, 7)
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
T = EngineCoreEventType


@pytest.mark.parametrize(
    ("environ", "asked"),
    [
        ({}, False),
        ({"OTEL_SERVICE_NAME": "x"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}, True),
        ({"OTEL_TRACES_EXPORTER": "console"}, True),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, False),
        ({"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, False),
    ],
)
def test_tracing_is_enabled_by_the_standard_variables(environ: dict[str, str], asked: bool) -> None:
    assert is_asked_for(environ) is asked


def test_an_unavailable_exporter_is_logged_and_the_process_continues(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert start_tracing({"OTEL_TRACES_EXPORTER": "carrier-pigeon"}, "router", "r0", "r0.a") is None
    assert "carrier-pigeon" in caplog.text
    monkeypatch.setitem(sys.modules, "baton.observe.otel", None)
    assert start_tracing({"OTEL_TRACES_EXPORTER": "otlp"}, "router", "r0", "r0.a") is None
    assert "pip install" in caplog.text


def clock_of(*events: tuple[EngineCoreEventType, float]) -> AttemptClock:
    clock = AttemptClock(1.0)
    for kind, time in events:
        clock.note(EngineCoreEvent(kind, KEY, time))
    return clock


COMPUTED = ((T.SCHEDULED, 2.0), (T.FIRST_TOKEN, 3.0))
PULLED = ((T.REMOTE_KV_REQUESTED, 2.0), (T.REMOTE_KV_ARRIVED, 4.0))


@pytest.mark.parametrize(
    ("leg", "events", "names"),
    [
        (Leg.WHOLE, COMPUTED, ["queue 1-2", "prefill 2-3", "decode 3-9"]),
        (Leg.PREFILL, COMPUTED, ["queue 1-2", "prefill 2-3"]),
        (Leg.DECODE, PULLED, ["queue 1-2", "transfer 2-4", "decode 4-9"]),
        (Leg.DECODE, PULLED[:1], ["queue 1-2", "transfer 2-9"]),
        # Its KV did not come.
        (
            Leg.DECODE,
            (*PULLED[:1], (T.SCHEDULED, 3.0), (T.FIRST_TOKEN, 5.0)),
            ["queue 1-2", "prefill 2-5", "decode 5-9"],
        ),
        # A beam search.
        (Leg.DECODE, (*PULLED, (T.FIRST_TOKEN, 8.0)), ["queue 1-2", "transfer 2-4", "decode 4-9"]),
        (Leg.WHOLE, COMPUTED[:1], ["queue 1-2", "prefill 2-9"]),
        (Leg.WHOLE, (), ["queue 1-9"]),
    ],
)
def test_an_attempt_has_a_span_for_each_stage(
    leg: Leg, events: tuple[tuple[EngineCoreEventType, float], ...], names: list[str]
) -> None:
    found = list(stages(clock_of(*events), leg, 9.0))
    assert [f"{stage.name} {stage.begun:g}-{stage.ended:g}" for stage in found] == names
    assert all(isinstance(stage, Stage) for stage in found)


def test_a_node_reports_the_spans_of_traced_attempts_once() -> None:
    tracer = FakeTracer()
    spans = AttemptSpans(tracer)
    params = SamplingParams(temperature=0.0, seed=1, max_tokens=4)
    spans.begun(Submit(KEY, Leg.WHOLE, RequestSpec([1], params)), clock_of(*COMPUTED))
    spans.ended(KEY, 9.0)
    assert tracer.spans == []
    spans.begun(Submit(KEY, Leg.PREFILL, RequestSpec([1], params), traceparent=PARENT), clock_of(*COMPUTED))
    spans.ended(KEY, 9.0, "out of luck")
    spans.ended(KEY, 10.0)
    assert [(span.name, span.parent, span.error) for span in tracer.spans] == [
        ("queue", PARENT, ""),
        ("prefill", PARENT, "out of luck"),
    ]
    assert tracer.spans[0].attributes == {"baton.request_id": "r", "baton.attempt": 1}


async def test_every_attempt_gets_the_routers_span_as_parent() -> None:
    tracer = FakeTracer()
    async with router_rig(prefill("p1"), prefill("p2"), decode("d1"), spans=RequestSpans(tracer)) as rig:
        reader = rig.ask(max_tokens=1, request_id="r", traceparent=PARENT)
        first = await rig.next_submit("p1")
        assert (await rig.next_submit("d1")).traceparent == first.traceparent
        rig.nodes["p1"].die()
        await rig.next_abort("d1")
        second = await rig.next_submit("p2")
        assert second.attempt.attempt == 2
        rig.timers.advance(0.5)
        await rig.end(reader, "p2", second.attempt, 0, "a")
    root, *stages_of_it = tracer.spans
    assert (root.name, root.parent, root.trace_id) == ("generate", PARENT, PARENT.split("-")[1])
    assert first.traceparent == second.traceparent == root.traceparent
    assert [(span.name, span.parent) for span in stages_of_it] == [
        ("admit", root.traceparent),
        ("queue", root.traceparent),
    ]
    assert root.ended is not None
    assert root.ended - root.begun >= 0.5
    assert root.attributes["baton.attempts"] == 2
    assert (root.attributes["gen_ai.usage.output_tokens"], root.error) == (1, "")
    traced = rig.requests.timelines.find("r")
    assert traced is not None
    assert traced.trace_id == root.trace_id


async def test_a_request_continued_by_another_router_stays_in_its_trace() -> None:
    tracer, card = FakeTracer(), ModelCard(MODEL, 64, 300)
    async with router_rig(prefill("p1"), decode("d1"), spans=RequestSpans(tracer)) as rig:
        reader = rig.ask(request_id="r", traceparent=PARENT)
        await rig.next_submit("p1")
        noted = await rig.journal("router-2.a").find("r", card)
        assert noted is not None
        assert noted.traceparent == tracer.spans[0].traceparent
        rig.dispatcher.cancel("r")
        await reader.raises(Exception, "cancelled")
        await rig.next_abort("p1")
        # Left behind by another one, whose nodes are here.
        theirs = replace(noted.request, request_id="s")
        nodes = Placement(prefill("p1"), decode("d1"), IN_TURN)
        rig.journal("router-0.a").write(theirs, AttemptKey("s", 1, 9), nodes, 0, noted.traceparent)
        resumed = rig.resume("s")
        await rig.next_adopt("p1")
        rig.dispatcher.cancel("s")
        await resumed.raises(Exception, "cancelled")
    again = next(span for span in tracer.spans if span.attributes.get("baton.request_id") == "s")
    assert (again.name, again.parent) == ("generate", noted.traceparent)


async def test_a_cancelled_request_has_an_error_span_and_an_untraced_one_has_none() -> None:
    tracer = FakeTracer()
    async with router_rig(prefill("p1"), decode("d1"), spans=RequestSpans(tracer)) as rig:
        reader = rig.ask(request_id="r")
        await rig.next_submit("p1")
        rig.dispatcher.cancel("r")
        await reader.raises(Exception, "cancelled")
    assert tracer.spans[0].error == "cancelled: cancelled by the client"
    async with router_rig(prefill("p1"), decode("d1")) as rig:
        reader = rig.ask(request_id="r", traceparent=PARENT)
        assert (await rig.next_submit("p1")).traceparent == ""
        rig.dispatcher.cancel("r")
        await reader.raises(Exception, "cancelled")
