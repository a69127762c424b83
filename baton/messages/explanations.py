"""The explanation of a placement: the candidates that the router compared, and how the choice turned out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PlacementWay:
    """A candidate placement of a request, and the parts of its predicted cost in milliseconds."""

    prefill_node: str
    """Empty where the decode node computes the prompt, too."""
    decode_node: str
    queue_ms: float
    cached_tokens: int
    """Tokens of the prompt that are cached on the node that computes it."""
    prefill_ms: float
    decode_cached_tokens: int
    """Tokens of the prompt that are cached on the decode node: their KV is not transferred."""
    handoff_ms: float
    decode_ms: float
    stall_ms: float
    """Time by which this placement delays other requests."""
    token_ms: float
    """Time per output token."""
    total_ms: float
    tokens_per_step: float = 1.0
    """Tokens that a sequence gets from a step on average: more than 1 where drafts are right. 0: an older router."""


@dataclass(frozen=True, slots=True)
class PlacementOutcome:
    """The measured times of a request that has ended, to compare with what was predicted."""

    queue_ms: float
    prefill_ms: float
    transfer_ms: float
    cached_tokens: int
    kv_bytes: int
    first_token_ms: float
    """Time to the first token, from the request's arrival at the router."""
    best: PlacementWay | None
    """The placement that would have been cheapest at the rates that are known now."""
    regret_ms: float
    """By how much `best` would have been cheaper than the placement that was chosen."""


@dataclass(frozen=True, slots=True)
class PlacementDecision:
    """The placement of one attempt, and the candidates that the router compared for it."""

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
    """The candidates with their predicted costs, cheapest first; empty for a policy that predicts no costs."""
    outcome: PlacementOutcome | None = None
    """None until the request has ended without an error."""
    bits: str = ""
    """`NodeDescription.bits` of the nodes; empty: an older router."""
    continues_only_at: str = ""
    """The nodes among which the choice was made, as they alone may continue the stream; empty: it had not begun."""
