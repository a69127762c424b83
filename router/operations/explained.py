"""Makes messages for operators from decisions of placement."""

from __future__ import annotations

from baton.messages.operator import PlacementDecision, PlacementOutcome, PlacementWay
from router.placement.cost_model import CostTerms
from router.placement.decisions import Explanation


def explained(explanation: Explanation, now: float) -> PlacementDecision:
    """The message about a decision. `now`: seconds on the router's clock."""
    decision = explanation.decision
    return PlacementDecision(
        attempt=decision.attempt,
        age_s=max(0.0, now - decision.at),
        policy=decision.policy,
        decision=decision.decision,
        reason=decision.reason,
        prompt_tokens=decision.prompt_tokens,
        prefill_node=decision.prefill,
        decode_node=decision.decode,
        ways=tuple([_way(terms) for terms in explanation.ways]),
        outcome=_outcome(explanation),
        bits=decision.bits,
        continues_only_at=decision.continues_only_at,
    )


def _outcome(explanation: Explanation) -> PlacementOutcome | None:
    measured = explanation.decision.measured
    if measured is None:
        return None
    return PlacementOutcome(
        queue_ms=measured.timings.queue_ms,
        prefill_ms=measured.timings.prefill_ms,
        transfer_ms=measured.timings.transfer_ms,
        cached_tokens=measured.timings.cached_tokens,
        kv_bytes=measured.timings.kv_bytes,
        first_token_ms=measured.first_token_ms,
        best=None if explanation.best is None else _way(explanation.best),
        regret_ms=explanation.regret_ms,
    )


def _way(terms: CostTerms) -> PlacementWay:
    return PlacementWay(
        prefill_node=terms.prefill,
        decode_node=terms.decode,
        queue_ms=terms.queue_ms,
        cached_tokens=terms.cached_tokens,
        prefill_ms=terms.prefill_ms,
        decode_cached_tokens=terms.decode_cached_tokens,
        handoff_ms=terms.handoff_ms,
        decode_ms=terms.decode_ms,
        stall_ms=terms.stall_ms,
        token_ms=terms.token_ms,
        total_ms=terms.total_ms,
        tokens_per_step=terms.tokens_per_step,
    )
