"""The adapters that routers want on a node, and whether the node acknowledges each: its files are here and fit.

Routers place requests with an adapter only on nodes that acknowledge it. No I/O: the node's service carries out the
checks, one for each digest at a time. Digests that no router wants any more are checked no more.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from itertools import islice
from typing import Any

from baton.messages.adapters import (
    MAX_LISTED,
    MAX_REFUSAL_CHARS,
    AdapterReport,
    AdapterSource,
    AdapterStatus,
    NodeAdapter,
)


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
        """A router's stream has ended."""
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
        found = [AdapterStatus(digest, refusals[digest]) for digest in self._lists.get(port, ()) if digest in refusals]
        return AdapterReport(found)

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
