"""A node's adapters, between its routers, the threads that read files, and the engine. Belongs to the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence, Set

from baton.background import OnFault, start_background
from baton.errors import AdapterRefused
from baton.messages.adapters import AdapterReport, AdapterSource, NodeAdapter
from baton.model_formats.adapters import AdapterInfo
from baton.node.adapters.adapter_book import AdapterBook
from baton.node.adapters.adapter_cache import AdapterFault, AdapterNews
from baton.node.adapters.adapter_threads import MAX_INSPECTING, AdapterThreads
from baton.observe.metrics import Figure, by_label

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
        self._book = AdapterBook()
        self._loaded: Set[str] = frozenset()
        self._is_closed = False
        self._num_loads = 0
        self._checks: set[asyncio.Task[None]] = set()
        """At most MAX_INSPECTING tasks, each of which checks one adapter after another."""
        self._retries: dict[str, asyncio.TimerHandle] = {}
        """The adapters that are to be checked again after a while, by digest."""

    def set_list(self, port: int, adapters: Sequence[AdapterSource]) -> None:
        """Take a router's list in place of its earlier one."""
        self._book.set_list(port, adapters)
        wanted = self._book.wanted
        self._keep(wanted)
        for digest in self._retries.keys() - wanted:
            self._retries.pop(digest).cancel()
        self._start_checks()
        self._report(port, self._book.report_for(port))

    def forget_port(self, port: int) -> None:
        """A router's stream has ended. Its adapters stay in memory until another list says which are wanted."""
        self._book.forget_port(port)

    def why_not(self, digest: str) -> str:
        """Why a request with this adapter can't be taken; empty: it can."""
        return self._book.why_not(digest)

    def directory_of(self, digest: str) -> str:
        """Where the files of an acknowledged adapter are."""
        return self._book.directory_of(digest)

    async def inspect(self, directory: str) -> AdapterInfo:
        """Read the adapter in a directory; raises AdapterRefused, DeadlineExceeded, Overloaded."""
        if self._threads is None:
            raise AdapterRefused(_NONE)
        info = await self._threads.inspect(directory)
        for port in self._book.found_again(info.digest, directory):
            self._report(port, self._book.report_for(port))
        return info

    def on_news(self, news: AdapterNews) -> None:
        """Take what the engine says of adapters in memory."""
        self._loaded, self._num_loads = news.loaded, news.num_loads
        for digest, fault in news.faults.items():
            _log.warning("adapter %.12s could not be loaded: %s", digest, fault.reason)
            self._book.refuse(digest, fault.reason)
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
        return self._book.rows(self._loaded)

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
            while (source := self._book.next_check()) is not None:
                self._book.checked(source, _NONE)
        while len(self._checks) < MAX_INSPECTING and (source := self._book.next_check()) is not None:
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
            source = self._book.next_check()

    async def _check(self, source: AdapterSource) -> None:
        assert self._threads is not None
        fault = await self._threads.find_fault(source.directory, source.digest)
        self._book.checked(source, fault.reason if fault is not None else "")
        if fault is not None:
            _log.warning("adapter %s is refused: %s", source.name, fault.reason)
            self._retry_if_it_may_pass(source.digest, fault)
        else:
            _log.info("adapter %s is acknowledged: %.12s", source.name, source.digest)
        self._tell_all(source.digest)

    def _retry_if_it_may_pass(self, digest: str, fault: AdapterFault) -> None:
        if fault.may_pass and digest not in self._retries and digest in self._book.wanted:
            self._retries[digest] = asyncio.get_running_loop().call_later(RETRY_S, self._retry, digest)

    def _retry(self, digest: str) -> None:
        del self._retries[digest]
        self._book.check_again(digest)
        self._start_checks()

    def _tell_all(self, digest: str) -> None:
        for port in self._book.ports_with(digest):
            self._report(port, self._book.report_for(port))
