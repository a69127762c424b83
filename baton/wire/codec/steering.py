"""What operators do to a cluster and hear of it, as plain values, and as Protocol Buffers."""

from __future__ import annotations

from dataclasses import asdict, fields

from baton.messages.steering import ClusterEvent, DrainProgress
from baton.v1 import operator_pb2 as operator


def progress_to_pb(progress: DrainProgress) -> operator.DrainNodeResponse:
    return operator.DrainNodeResponse(**asdict(progress))


def progress_from_pb(pb: operator.DrainNodeResponse) -> DrainProgress:
    return DrainProgress(**{field.name: getattr(pb, field.name) for field in fields(DrainProgress)})


def event_to_pb(event: ClusterEvent) -> operator.ClusterEvent:
    return operator.ClusterEvent(**asdict(event))


def event_from_pb(pb: operator.ClusterEvent) -> ClusterEvent:
    return ClusterEvent(**{field.name: getattr(pb, field.name) for field in fields(ClusterEvent)})
