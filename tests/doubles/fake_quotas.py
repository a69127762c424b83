"""The fake of `baton.registry.quotas.QuotaStore`, and what all routers of a test share behind it."""

from __future__ import annotations

from collections.abc import Sequence

from baton.errors import Unreachable
from baton.registry.quotas import QuotaBook, QuotaUse, Taken
from tests.doubles.fake_clock import FakeClock


class FakeQuotaServer:
    """What is used of the quotas of one cluster."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.book = QuotaBook()
        self.up = True
        self.num_calls = 0
        """How often something was taken or given back."""


class FakeQuotas:
    """One router's use of a `FakeQuotaServer`; see `QuotaStore`. Leases are renewed when the test says so."""

    def __init__(self, server: FakeQuotaServer) -> None:
        self._server = server
        self._held: dict[str, QuotaUse] = {}

    async def take(self, use: QuotaUse) -> Taken:
        self._server.num_calls += 1
        if not self._server.up:
            raise Unreachable("the fake is down")
        taken = self._server.book.take(use, self._server.clock.monotonic())
        if taken.short_of is None:
            self._held[use.lease] = use
        return taken

    def give_back(self, use: QuotaUse, changes_s: Sequence[float]) -> None:
        self._server.num_calls += 1
        self._held.pop(use.lease, None)
        if self._server.up:
            self._server.book.give_back(use, changes_s, self._server.clock.monotonic())

    async def renew(self) -> None:
        """Renew all leases, as a router that lives does."""
        for use in self._held.values():
            self._server.book.renew(use, self._server.clock.monotonic())

    async def close(self) -> None:
        for use in list(self._held.values()):
            self.give_back(QuotaUse(use.lease, (), use.rooms), ())
