"""Why a request went where it went, as plain values, and as Protocol Buffers."""

from __future__ import annotations

from dataclasses import asdict, fields

from baton.messages.explanations import PlacementDecision, PlacementOutcome, PlacementWay
from baton.v1 import operator_pb2 as operator


def decision_to_pb(decision: PlacementDecision) -> operator.PlacementDecision:
    return operator.PlacementDecision(**asdict(decision))


def decision_from_pb(pb: operator.PlacementDecision) -> PlacementDecision:
    plain = {name: getattr(pb, name) for name in _names(PlacementDecision) if name not in ("ways", "outcome")}
    outcome = _outcome_from_pb(pb.outcome) if pb.HasField("outcome") else None
    return PlacementDecision(**plain, ways=[_way_from_pb(way) for way in pb.ways], outcome=outcome)


def _way_from_pb(pb: operator.PlacementWay) -> PlacementWay:
    return PlacementWay(**{name: getattr(pb, name) for name in _names(PlacementWay)})


def _outcome_from_pb(pb: operator.PlacementOutcome) -> PlacementOutcome:
    plain = {name: getattr(pb, name) for name in _names(PlacementOutcome) if name != "best"}
    return PlacementOutcome(**plain, best=_way_from_pb(pb.best) if pb.HasField("best") else None)


def _names(kind: type[PlacementWay | PlacementOutcome | PlacementDecision]) -> list[str]:
    return [field.name for field in fields(kind)]
