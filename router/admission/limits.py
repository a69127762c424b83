"""The bounds of one router."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

NUM_TEXT_THREADS = 2
"""More threads would keep the event loop from Python's global lock, each for 5 ms at a time."""


@dataclass(frozen=True, slots=True)
class DispatchLimits:
    """Bounds of one router."""

    capacity_wait_s: float = 10.0
    """How long a new request waits for any node to be attached before it is turned away."""
    recovery_wait_s: float = 120.0
    """How long a request whose nodes were lost waits for others: long enough to load a model."""
    queue_wait_s: float = 120.0
    """How long a request waits while all nodes are full."""
    max_queue: int = 1024
    """The most new requests that may wait, for text and for embeddings each."""
    max_running: int = 16_384
    """The most requests on nodes; more of them wait."""
    priority_ageing_s: float = 60.0
    """Seconds of waiting that weigh as much as one step of priority; 0: waiting does not count."""
    fairness: Literal["tokens", "off"] = "tokens"
    """Whether waiting requests of several tenants get nodes by what each tenant has had."""
    fair_output_weight: float = 2.0
    """For how many tokens of a prompt a generated token counts in that."""
    urgent_share: float = 0.5
    """The share of the tokens that requests of the urgent class get while normal ones wait, too."""
    max_tokenizing: int = 64
    """The most long requests that may wait for a thread that parses, renders and tokenizes them."""
    max_backlog_tokens: int = 256
    """A client that has left more tokens of each sequence unread is a slow reader."""
    stall_s: float = 30.0
    """How long a client may be a slow reader before its request is ended."""
    min_priority: int = 0
    """Requests with a smaller number are refused, except those of API keys with a bound of their own."""
    prompt_embeds_bytes: int = 0
    """The most bytes of rows that a prompt may have in place of tokens; 0: none are taken."""
    max_image_bytes: int = 8 << 20
    """The most bytes of all images of a request."""
    logprob_memory: int = 256 << 20
    """The most bytes that log-probabilities of all live requests may come to."""
    thread_text_chars: int = 4096
    """Longer prompts are checked and tokenized in a thread, so that other requests do not wait."""

    @property
    def held_row_bytes(self) -> int:
        """The most bytes of such rows and of images that all live requests may have together."""
        return 16 * (self.prompt_embeds_bytes + self.max_image_bytes)
