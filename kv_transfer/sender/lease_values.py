"""What a lease book is given and what it answers: bounds on its waits, effects, and figures about its leases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from baton.metric import Metric
from kv_transfer.effects import Recorded, Released
from kv_transfer.link.link_messages import SenderMessage


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """Bounds of the sender's waits, in seconds, and of what it remembers."""

    lease_s: float = 10.0
    """How long a lease is promised for, from the reader's last heartbeat on."""
    unclaimed_s: float = 60.0
    """How long a computed prompt that no reader expects waits for its subscription. It is long, because a router or a
    reader that gives a request up says so; it bounds the case that all processes that knew of the request died."""
    grace_s: float = 5.0
    """How long blocks are kept after the end of the reader's link: reads of them may still run."""
    suspect_s: float = 300.0
    """How long blocks are kept after the end of the promise, while the reader's link lives and its reads don't end."""
    max_waiting: int = 4096
    """The most readers that may wait for a request to begin, the most that may wait for its first offer, and the most
    attempts that are followed because reads outlive their leases: each of the three has this bound."""
    remembered_s: float = 600.0
    """How long an attempt that is over is recognised. Every reader gives up asking about it earlier."""
    max_remembered: int = 16384
    """How many attempts that are over are recognised at most."""


@dataclass(frozen=True, slots=True)
class TellReader:
    """Send a message on a link."""

    link: int
    message: SenderMessage


@dataclass(frozen=True, slots=True)
class OpenLeases:
    """So many leases may be read from now on, those included that are over and still read: the sender's transfer agent
    must make progress while there are any."""

    count: int


@dataclass(frozen=True, slots=True)
class CutLink:
    """End this link: its reader has a newer one, or is a newer process."""

    link: int
    reason: str


LeaseEffect = TellReader | Released | OpenLeases | CutLink | Recorded


@dataclass(frozen=True, slots=True)
class LeaseStats:
    """Number of leases in each state, blocks of the suspect leases, and the age of the oldest lease in seconds.

    A field that declares a metric is on the prefill node's metrics page.
    """

    granted: Annotated[int, Metric("kv_leases", "Open leases, by state.", labels={"state": "granted"})]
    reading: Annotated[int, Metric("kv_leases", "Open leases, by state.", labels={"state": "reading"})]
    suspect: Annotated[int, Metric("kv_leases", "Open leases, by state.", labels={"state": "suspect"})]
    suspect_blocks: Annotated[
        int, Metric("kv_suspect_blocks", "Blocks of leases that are over though a reader may still read them.")
    ]
    oldest_s: Annotated[float, Metric("kv_lease_age_seconds", "Age of the oldest open lease; 0: there is none.")]
