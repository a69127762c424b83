"""Why a request went where it went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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
