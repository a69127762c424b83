"""Requests as operators see them in a list, without any text of prompts or outputs."""

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
    """Seconds since the request's arrival at the router."""
    prefill_node: str
    """Empty where the decode node computes the prompt, and while the request waits for nodes."""
    decode_node: str
    """Empty while the request waits for nodes."""
    prompt_tokens: int
    output_tokens: int
    """Tokens sent to the client so far, of all sequences."""
    attempts: int
    ttft_ms: float | None
    """Time to the first token; None: there is none yet."""
    total_ms: float | None
    """Time to the end of the request; None: the request has not ended."""
    kv_bytes: int = 0
    """Bytes of KV that were transferred for the request; known when it has ended."""
    detail: str = ""
    """The end of the request in words; empty while it runs."""
