"""Where a request's time went, as plain values, and as Protocol Buffers."""

from __future__ import annotations

from dataclasses import asdict, fields

from baton.messages.timelines import Timeline, TimelineStage
from baton.v1 import operator_pb2 as operator


def timeline_to_pb(timeline: Timeline) -> operator.Timeline:
    return operator.Timeline(**asdict(timeline))


def timeline_from_pb(pb: operator.Timeline) -> Timeline:
    plain = {name: getattr(pb, name) for name in _names(Timeline) if name not in ("ttft_ns", "stages")}
    stages = [TimelineStage(**{name: getattr(stage, name) for name in _names(TimelineStage)}) for stage in pb.stages]
    return Timeline(**plain, ttft_ns=pb.ttft_ns if pb.HasField("ttft_ns") else None, stages=stages)


def _names(kind: type[Timeline | TimelineStage]) -> list[str]:
    return [field.name for field in fields(kind)]
