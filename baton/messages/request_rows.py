"""Requests as operators see them in a list. Never a word of what they say."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestRow:
    """One request at one router."""

    request_id: str
    state: str
    """Waiting, Prefilling, Transferring, Decoding, Retrying; or Finished, Failed, Cancelled."""
    router: str
    age_s: float
    """Since it came."""
    prefill_node: str
    """Empty where the decode node computes the prompt, or while it waits; so is the next one."""
    decode_node: str
    prompt_tokens: int
    output_tokens: int
    """Given out so far, of all sequences."""
    attempts: int
    ttft_ms: float | None
    """None: no token yet."""
    total_ms: float | None
    """None: it runs."""
    kv_bytes: int = 0
    """That were moved for it; known at its end."""
    detail: str = ""
    """How it ended."""
