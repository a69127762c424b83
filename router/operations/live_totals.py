"""Publishes this router's totals for the live pages of all routers, and samples those of the others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

from baton.errors import InvalidRequest, Unreachable
from baton.observe.metrics import Histogram
from baton.registry import Membership
from router.flight.flight_table import AttemptCause
from router.live_requests import LiveRequests
from router.operations.live_history import MAX_ROUTERS, SAMPLE_EVERY_S, Buckets, LiveHistory, RouterTotals
from router.timers import Timers, sleep_until

_log = logging.getLogger(__name__)


def router_totals(requests: LiveRequests, name: str, incarnation: str) -> RouterTotals:
    """What this router has counted."""
    counters, served = requests.counters, requests.counters.served
    return RouterTotals(
        name=name,
        incarnation=incarnation,
        tokens=served.generation_tokens + requests.num_live_tokens,
        requests=counters.accepted,
        failed=counters.failed,
        cancelled=counters.errors["Cancelled"],
        retried=counters.attempts.total() - counters.attempts[AttemptCause.FIRST],
        running=requests.num_live - requests.num_waiting,
        waiting=requests.num_waiting,
        ttft=served.ttft.counts,
        gaps=served.gaps.counts,
    )


def buckets_of(ttft: Histogram, gaps: Histogram) -> Buckets:
    """The buckets of a router's latencies."""
    return Buckets(ttft.bounds, gaps.bounds)


class LiveTotals:
    """Samples the totals of all routers into a history, while this router runs. Belongs to the event loop."""

    def __init__(
        self,
        membership: Membership,
        timers: Timers,
        wall: Callable[[], float],
        own: Callable[[], RouterTotals],
        history: LiveHistory,
    ) -> None:
        """`wall`: seconds since the epoch. `own`: this router's totals."""
        self._membership = membership
        self._timers = timers
        self._wall = wall
        self._own = own
        self._routers: list[str] = []
        self.history = history

    def registered_routers(self, incarnations: Iterable[str]) -> None:
        """Take the incarnations of the routers that are in the registry now."""
        self._routers = sorted(incarnations)[:MAX_ROUTERS]

    async def run(self) -> None:
        """Take a sample every `SAMPLE_EVERY_S`, until cancelled."""
        while True:
            await self.sample()
            await sleep_until(self._timers, self._timers.monotonic() + SAMPLE_EVERY_S)

    async def sample(self) -> None:
        """Publish this router's totals and add all routers' to the history; while Redis is away, its own alone."""
        own = self._own()
        others = [name for name in self._routers if name != own.incarnation]
        try:
            published = await self._membership.exchange_totals(own.incarnation, own.to_json(), others)
        except Unreachable:
            published = {}
        self.history.add(self._wall(), [own, *_readable(published)])


def _readable(published: Mapping[str, bytes]) -> Iterable[RouterTotals]:
    for incarnation, data in published.items():
        try:
            totals = RouterTotals.from_json(data)
        except InvalidRequest as error:
            _log.debug("the live page shows no figures of router %s: %s", incarnation, error)
            continue
        if totals.incarnation == incarnation:
            yield totals
