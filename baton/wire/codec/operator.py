"""What a router tells operators, to Protocol Buffers and back. A message has the fields of its dataclass."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any, TypeVar

from google.protobuf.message import Message

from baton.messages.explanations import PlacementDecision, PlacementOutcome, PlacementWay
from baton.messages.request_rows import RequestRow
from baton.messages.steering import ClusterEvent, DrainProgress
from baton.messages.timelines import Timeline, TimelineStage
from baton.v1 import operator_pb2 as operator

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")


def decision_to_pb(decision: PlacementDecision) -> operator.PlacementDecision:
    return operator.PlacementDecision(**asdict(decision))


def decision_from_pb(pb: operator.PlacementDecision) -> PlacementDecision:
    outcome = _outcome_from_pb(pb.outcome) if pb.HasField("outcome") else None
    return _read(PlacementDecision, pb, ways=[_read(PlacementWay, way) for way in pb.ways], outcome=outcome)


def row_to_pb(row: RequestRow) -> operator.RequestRow:
    return operator.RequestRow(**asdict(row))


def row_from_pb(pb: operator.RequestRow) -> RequestRow:
    return _read(RequestRow, pb)


def progress_to_pb(progress: DrainProgress) -> operator.DrainNodeResponse:
    return operator.DrainNodeResponse(**asdict(progress))


def progress_from_pb(pb: operator.DrainNodeResponse) -> DrainProgress:
    return _read(DrainProgress, pb)


def event_to_pb(event: ClusterEvent) -> operator.ClusterEvent:
    return operator.ClusterEvent(**asdict(event))


def event_from_pb(pb: operator.ClusterEvent) -> ClusterEvent:
    return _read(ClusterEvent, pb)


def timeline_to_pb(timeline: Timeline) -> operator.Timeline:
    return operator.Timeline(**asdict(timeline))


def timeline_from_pb(pb: operator.Timeline) -> Timeline:
    return _read(Timeline, pb, stages=[_read(TimelineStage, stage) for stage in pb.stages])


def _outcome_from_pb(pb: operator.PlacementOutcome) -> PlacementOutcome:
    return _read(PlacementOutcome, pb, best=_read(PlacementWay, pb.best) if pb.HasField("best") else None)


def _read(kind: type[T], pb: Message, **messages: Any) -> T:
    """Make a `kind` of the fields of `pb`; an optional field that is absent is None.

    `messages`: the fields that are messages themselves, as plain values.
    """
    names = [field.name for field in fields(kind) if field.name not in messages]
    return kind(**{name: _field(pb, name) for name in names}, **messages)


def _field(pb: Message, name: str) -> Any:
    is_absent = pb.DESCRIPTOR.fields_by_name[name].has_presence and not pb.HasField(name)
    return None if is_absent else getattr(pb, name)
