"""A node's adapters, between its routers, the threads that read files, and the engine. Belongs to the event loop.

Routers place requests with an adapter only on nodes that acknowledge it: its files are here and fit. One check runs for
each digest at a time, and digests that no router wants any more are checked no more.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence, Set
from itertools import islice
from typing import Any

from baton.background import OnFault, start_background
from baton.errors import AdapterRefused
from baton.messages.adapters import (
    MAX_LISTED,
    MAX_REFUSAL_CHARS,
    AdapterReport,
    AdapterSource,
    AdapterStatus,
    NodeAdapter,
)
from baton.model_formats.adapters import AdapterInfo
from baton.node.adapters.adapter_cache import AdapterFault, AdapterNews
from baton.node.adapters.adapter_threads import MAX_INSPECTING, AdapterThreads
from baton.observe.metrics import Figure, by_label


class AdapterBook:
    """The lists of all attached routers, and what is known of their adapters. Belongs to the event loop."""

    def __init__(self) -> None:
        self._lists: dict[int, dict[str, AdapterSource]] = {}
        """What each router wants, by its port's client index and by digest."""
        self._refusals: dict[str, str] = {}
        """Why each adapter that was checked is refused; empty: it is acknowledged. Those that are missing are being
        checked."""
        self._directories: dict[str, str] = {}
        """Where each of those adapters was found or looked for."""
        self._to_check: dict[str, AdapterSource] = {}
        """The adapters whose check has not begun, by digest, in the order of their turns."""
        self._checking: dict[str, str] = {}
        """The directory in which an adapter is to be checked, or is being checked."""

    def set_list(self, port: int, adapters: Sequence[AdapterSource]) -> None:
        """Take a router's list in place of its earlier one; `next_check` then gives what is to be checked.

        Unsound entries, and those beyond MAX_LISTED, are left out: no router of ours sends such.
        """
        sound = islice((source for source in adapters if source.is_sound), MAX_LISTED)
        before, self._lists[port] = self._lists.get(port, {}), {source.digest: source for source in sound}
        self._forget_unwanted()
        for digest, source in self._lists[port].items():
            # A known adapter is checked again when its router names it anew: in another directory, or a refused one.
            is_new = digest not in before or before[digest].directory != source.directory
            has_moved = self._directories.get(digest) != source.directory
            if digest not in self._refusals or (is_new and (has_moved or self._refusals[digest])):
                self._queue(source)

    def _queue(self, source: AdapterSource) -> None:
        digest = source.digest
        if self._checking.get(digest) == source.directory:
            return
        if self._refusals.get(digest):
            del self._refusals[digest]
        self._checking[digest] = source.directory
        self._to_check[digest] = source

    def check_again(self, digest: str) -> None:
        """Let a refused adapter be checked once more where it was found or looked for; it stays refused until then."""
        directory = self._directories.get(digest)
        if digest in self._checking or not self._refusals.get(digest):
            return
        for source in self._sources():
            if source.digest == digest and source.directory == directory:
                self._checking[digest], self._to_check[digest] = source.directory, source
                return

    def next_check(self) -> AdapterSource | None:
        """Remove and return the adapter whose files are to be checked next; None: none are."""
        digest = next(iter(self._to_check), None)
        return self._to_check.pop(digest) if digest is not None else None

    def forget_port(self, port: int) -> None:
        """A router's stream has ended. Its adapters stay in memory until another list says which are wanted."""
        self._lists.pop(port, None)
        self._forget_unwanted()

    def checked(self, source: AdapterSource, refusal: str) -> None:
        """An adapter's files were checked; `refusal`: why it can't be used, empty if it can."""
        digest = source.digest
        if self._checking.get(digest) != source.directory:
            return
        del self._checking[digest]
        if refusal and self._refusals.get(digest) == "" and self._is_listed(digest, self._directories[digest]):
            # Another router still names the adapter where it was found before.
            return
        self._refusals[digest], self._directories[digest] = refusal[:MAX_REFUSAL_CHARS], source.directory

    def refuse(self, digest: str, refusal: str) -> None:
        """An acknowledged adapter can't be used any more."""
        if digest in self._refusals:
            self._refusals[digest] = refusal[:MAX_REFUSAL_CHARS]

    def found_again(self, digest: str, directory: str) -> Sequence[int]:
        """An operator had this adapter's files inspected, and they are sound: a refused one is acknowledged now.

        Returns the routers that are to be told.
        """
        if not self._refusals.get(digest):
            return ()
        if not self._is_listed(digest, directory):
            return ()
        self._refusals[digest], self._directories[digest] = "", directory
        return self.ports_with(digest)

    def why_not(self, digest: str) -> str:
        """Why a request with this adapter can't be taken; empty: it can."""
        refusal = self._refusals.get(digest)
        if refusal is None:
            return f"adapter {digest:.12} is not acknowledged by this node"
        return refusal

    def directory_of(self, digest: str) -> str:
        """Where the files of an acknowledged adapter are."""
        return self._directories[digest]

    @property
    def wanted(self) -> frozenset[str]:
        """The digests of all adapters that routers want."""
        return frozenset(digest for adapters in self._lists.values() for digest in adapters)

    def report_for(self, port: int) -> AdapterReport:
        """What a router is told of its adapters."""
        refusals = self._refusals
        statuses = [
            AdapterStatus(digest, refusals[digest]) for digest in self._lists.get(port, ()) if digest in refusals
        ]
        return AdapterReport(statuses)

    def ports_with(self, digest: str) -> list[int]:
        """The routers that want this adapter."""
        return [port for port, adapters in self._lists.items() if digest in adapters]

    def rows(self, loaded: Set[str]) -> Sequence[NodeAdapter]:
        """All adapters, for operators. `loaded`: those that are in memory."""
        rows: dict[tuple[str, str], NodeAdapter] = {}
        for source in self._sources():
            refusal = self._refusals.get(source.digest)
            if refusal is None:
                state = "checking"
            elif refusal:
                state = "refused"
            else:
                state = "loaded" if source.digest in loaded else "acknowledged"
            row = NodeAdapter(source.name, source.digest, source.directory, state, refusal or "")
            rows[source.name, source.digest] = row
        return [rows[key] for key in sorted(rows)]

    def _is_listed(self, digest: str, directory: str) -> bool:
        return any(source.directory == directory for source in self._sources() if source.digest == digest)

    def _sources(self) -> Sequence[AdapterSource]:
        return [source for adapters in self._lists.values() for source in adapters.values()]

    def _forget_unwanted(self) -> None:
        wanted = self.wanted
        known: dict[str, Any]
        for known in (self._refusals, self._directories, self._checking, self._to_check):
            for digest in [digest for digest in known if digest not in wanted]:
                del known[digest]


_log = logging.getLogger(__name__)
_NO_STATES = dict.fromkeys(("checking", "acknowledged", "loaded", "refused"), 0)
_NONE = "this node loads no adapters"
RETRY_S = 10.0
"""After so long an adapter is checked again that could not be read for a reason that may pass."""


class NodeAdapters:
    """Has the adapters of routers' lists checked, and tells each router which of its adapters are acknowledged."""

    def __init__(
        self,
        threads: AdapterThreads | None,
        report: Callable[[int, AdapterReport], None],
        keep: Callable[[Set[str]], None],
    ) -> None:
        """`report(port, report)` tells a router; `keep` tells the engine which adapters routers want."""
        self._threads = threads
        self._report = report
        self._keep = keep
        self.book = AdapterBook()
        """The lists of routers, and what was found out of their adapters."""
        self._loaded: Set[str] = frozenset()
        self._is_closed = False
        self._num_loads = 0
        self._checks: set[asyncio.Task[None]] = set()
        """At most MAX_INSPECTING tasks, each of which checks one adapter after another."""
        self._retries: dict[str, asyncio.TimerHandle] = {}
        """The adapters that are to be checked again after a while, by digest."""

    def set_list(self, port: int, adapters: Sequence[AdapterSource]) -> None:
        """Take a router's list in place of its earlier one."""
        self.book.set_list(port, adapters)
        wanted = self.book.wanted
        self._keep(wanted)
        for digest in self._retries.keys() - wanted:
            self._retries.pop(digest).cancel()
        self._start_checks()
        self._report(port, self.book.report_for(port))

    async def inspect(self, directory: str) -> AdapterInfo:
        """Read the adapter in a directory; raises AdapterRefused, DeadlineExceeded, Overloaded."""
        if self._threads is None:
            raise AdapterRefused(_NONE)
        info = await self._threads.inspect(directory)
        for port in self.book.found_again(info.digest, directory):
            self._report(port, self.book.report_for(port))
        return info

    def on_news(self, news: AdapterNews) -> None:
        """Take what the engine says of adapters in memory."""
        self._loaded, self._num_loads = news.loaded, news.num_loads
        for digest, fault in news.faults.items():
            _log.warning("adapter %.12s could not be loaded: %s", digest, fault.reason)
            self.book.refuse(digest, fault.reason)
            self._tell_all(digest)
            self._retry_if_it_may_pass(digest, fault)

    def figures(self) -> Sequence[Figure]:
        """The metrics of adapters, for the node's metrics page."""
        states = Counter({row.digest: row.state for row in self.rows()}.values())
        return [
            *by_label("lora_adapters", "Adapters that routers want here, by state.", "state", {**_NO_STATES, **states}),
            Figure("lora_loads_total", "Adapters that were read into memory.", self._num_loads, {}),
        ]

    def rows(self) -> Sequence[NodeAdapter]:
        """All adapters, for operators."""
        return self.book.rows(self._loaded)

    def close(self) -> None:
        """Give up what is being checked."""
        self._is_closed = True
        for task in self._checks:
            task.cancel()
        for retry in self._retries.values():
            retry.cancel()

    def _start_checks(self) -> None:
        """Let tasks check what is to be checked."""
        if self._threads is None:
            while (source := self.book.next_check()) is not None:
                self.book.checked(source, _NONE)
        while len(self._checks) < MAX_INSPECTING and (source := self.book.next_check()) is not None:
            self._start_check(source)

    def _start_check(self, source: AdapterSource) -> None:
        task = start_background(
            lambda: self._check_from(source), "adapter-check", source.name, on_fault=OnFault.GO_ON, may_end=True
        )
        self._checks.add(task)
        task.add_done_callback(self._check_ended)

    def _check_ended(self, task: asyncio.Task[None]) -> None:
        self._checks.discard(task)
        if not self._is_closed:
            self._start_checks()

    async def _check_from(self, first: AdapterSource) -> None:
        """Check this adapter, and then all that are to be checked."""
        source: AdapterSource | None = first
        while source is not None:
            await self._check(source)
            source = self.book.next_check()

    async def _check(self, source: AdapterSource) -> None:
        assert self._threads is not None
        fault = await self._threads.find_fault(source.directory, source.digest)
        self.book.checked(source, fault.reason if fault is not None else "")
        if fault is not None:
            _log.warning("adapter %s is refused: %s", source.name, fault.reason)
            self._retry_if_it_may_pass(source.digest, fault)
        else:
            _log.info("adapter %s is acknowledged: %.12s", source.name, source.digest)
        self._tell_all(source.digest)

    def _retry_if_it_may_pass(self, digest: str, fault: AdapterFault) -> None:
        if fault.may_pass and digest not in self._retries and digest in self.book.wanted:
            self._retries[digest] = asyncio.get_running_loop().call_later(RETRY_S, self._retry, digest)

    def _retry(self, digest: str) -> None:
        del self._retries[digest]
        self.book.check_again(digest)
        self._start_checks()

    def _tell_all(self, digest: str) -> None:
        for port in self.book.ports_with(digest):
            self._report(port, self.book.report_for(port))
