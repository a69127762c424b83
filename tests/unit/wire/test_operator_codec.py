"""Messages to operators: dataclass and protobuf message have the same fields, and absent is None."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
from google.protobuf.message import Message

from baton.messages.operator import (
    ClusterEvent,
    DrainProgress,
    PlacementDecision,
    PlacementOutcome,
    PlacementWay,
    RequestRow,
    Timeline,
    TimelineStage,
)
from baton.v1 import operator_pb2 as pb
from baton.wire.codec import operator

PAIRS: list[tuple[type[Any], type[Message]]] = [
    (PlacementDecision, pb.PlacementDecision),
    (PlacementOutcome, pb.PlacementOutcome),
    (PlacementWay, pb.PlacementWay),
    (RequestRow, pb.RequestRow),
    (DrainProgress, pb.DrainNodeResponse),
    (ClusterEvent, pb.ClusterEvent),
    (Timeline, pb.Timeline),
    (TimelineStage, pb.TimelineStage),
]
ROW = operator.REQUEST_ROW.from_pb(pb.RequestRow(request_id="r", state="Running"))
TIMELINE = operator.TIMELINE.from_pb(pb.Timeline(request_id="r"))


@pytest.mark.parametrize(("plain", "message"), PAIRS, ids=lambda kind: kind.__name__)
def test_dataclasses_and_messages_have_the_same_fields(plain: type[Any], message: type[Message]) -> None:
    assert {field.name for field in fields(plain)} == set(message.DESCRIPTOR.fields_by_name)


@pytest.mark.parametrize(
    ("told", "again"),
    [
        (ROW, lambda row: operator.REQUEST_ROW.from_pb(operator.REQUEST_ROW.to_pb(row))),
        (
            replace(ROW, ttft_ms=0.0, total_ms=0.0),
            lambda row: operator.REQUEST_ROW.from_pb(operator.REQUEST_ROW.to_pb(row)),
        ),
        (TIMELINE, lambda timeline: operator.TIMELINE.from_pb(operator.TIMELINE.to_pb(timeline))),
        (replace(TIMELINE, ttft_ns=0), lambda timeline: operator.TIMELINE.from_pb(operator.TIMELINE.to_pb(timeline))),
    ],
    ids=["row without times", "row with times of zero", "timeline without a token", "timeline with its token at once"],
)
def test_zero_differs_from_an_absent_value(told: Any, again: Callable[[Any], Any]) -> None:
    assert again(told) == told


def test_absent_fields_are_none() -> None:
    assert (ROW.ttft_ms, ROW.total_ms, TIMELINE.ttft_ns) == (None, None, None)
