"""What one router takes at most, and what it has counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from baton.config import MIN_PRIORITY
from baton.observe.metrics import FIRST_TOKEN_BUCKETS_S, Histogram
from router.flight.flight_table import AttemptCause
from router.served import Served

NUM_TEXT_THREADS = 2
"""More of them would keep the loop from Python's lock, 5 ms each at a time."""


@dataclass(frozen=True, slots=True)
class DispatchLimits:
    """Bounds of one router."""

    capacity_wait_s: float = 10.0
    """How long a new request waits for a node to come before it is turned away."""
    recovery_wait_s: float = 120.0
    """How long a request whose nodes were lost waits for one to come back: long enough to load a model."""
    queue_wait_s: float = 120.0
    """How long a request waits for nodes that are there but full."""
    max_queue: int = 1024
    """New requests that may wait, of text and of embeddings each."""
    max_running: int = 16_384
    """Requests on nodes; more wait."""
    priority_ageing_s: float = 60.0
    """Seconds of waiting that weigh as much as one step of priority; 0: none ever do."""
    max_tokenizing: int = 64
    """Long requests that may wait for a thread that parses, renders and tokenizes them."""
    max_backlog_tokens: int = 256
    stall_s: float = 30.0
    """How long a client may leave more than the backlog unread."""
    min_priority: int = MIN_PRIORITY
    """Requests with a smaller one are refused."""
    thread_text_chars: int = 4096
    """Longer prompts are tokenized, and checked, in a thread, so that nobody else waits."""


@dataclass(slots=True)
class DispatchCounters:
    """Totals since start."""

    accepted: int = 0
    finished: int = 0
    failed: int = 0
    attempts: Counter[AttemptCause] = field(default_factory=Counter)
    """Those that were sent to nodes."""
    late_deltas: int = 0
    """Deltas of requests that were over."""
    queue_time: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_BUCKETS_S))
    """What requests waited for their first nodes, in seconds; those that never had to included."""
    resumed: int = 0
    """Requests whose client came back for what follows..."""
    adopted: int = 0
    """... that ran on at their nodes meanwhile, for another router."""
    links_back: int = 0
    """How often a node was there again, with what it ran for this router, after its link was cut."""
    moved: int = 0
    """Requests that another router adopted from this one."""
    adoption_looks: int = 0
    """How often a flight was looked at because its node might have told all that it had for another router."""
    served: Served = field(default_factory=Served)
    rejections: Counter[str] = field(default_factory=Counter)
    """Requests that were turned away without a token, by the error's name."""
