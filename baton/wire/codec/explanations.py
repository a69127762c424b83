"""Why a request went where it went, as plain values, and as Protocol Buffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

from baton.v1 import operator_pb2 as operator


@dataclass(frozen=True, slots=True)
class PlacementWay:
    """A way to serve a request, and the parts of its predicted cost in milliseconds."""

    prefill_node: str
    """Empty where the decode node does it all."""
    decode_node: str
    queue_ms: float
    cached_tokens: int
    """Of the prompt, where it is computed."""
    prefill_ms: float
    decode_cached_tokens: int
    """Of the prompt, where it is decoded: these never move."""
    handoff_ms: float
    decode_ms: float
    stall_ms: float
    """What other requests lose."""
    token_ms: float
    """Time per output token."""
    total_ms: float


@dataclass(frozen=True, slots=True)
class PlacementOutcome:
    """What became of a request, measured."""

    queue_ms: float
    prefill_ms: float
    transfer_ms: float
    cached_tokens: int
    kv_bytes: int
    first_token_ms: float
    """From the request's arrival at the router."""
    best: PlacementWay | None
    """What would have been cheapest, at the rates that are known now."""
    regret_ms: float


@dataclass(frozen=True, slots=True)
class PlacementDecision:
    """One attempt's placement."""

    attempt: int
    age_s: float
    policy: str
    decision: str
    """pair, decode_only or prefill_only."""
    reason: str
    prompt_tokens: int
    prefill_node: str
    decode_node: str
    ways: Sequence[PlacementWay] = ()
    """Predicted, the cheapest first; none where the policy predicts nothing."""
    outcome: PlacementOutcome | None = None
    """None until the request has ended well."""


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
