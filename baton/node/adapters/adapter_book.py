"""The adapters that routers want on a node, and whether the node acknowledges each: its files are here and fit.

Routers place requests with an adapter only on nodes that acknowledge it. No I/O: the node's service carries out the
checks that `set_list` asks for.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from itertools import islice

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
        self._checking: dict[str, str] = {}
        """The directory in which an adapter is being checked."""

    def set_list(self, port: int, adapters: Sequence[AdapterSource]) -> Sequence[AdapterSource]:
        """Take a router's list in place of its earlier one; returns the adapters whose files are to be checked.

        Unsound entries, and those beyond MAX_LISTED, are left out: no router of ours sends such.
        """
        sound = islice((source for source in adapters if source.is_sound), MAX_LISTED)
        before, self._lists[port] = self._lists.get(port, {}), {source.digest: source for source in sound}
        self._forget_unwanted()
        to_check = []
        for digest, source in self._lists[port].items():
            # A refused adapter is checked again when its router names it anew, for instance in another directory.
            is_new = digest not in before or before[digest].directory != source.directory
            is_open = digest not in self._refusals or (is_new and self._refusals[digest])
            if is_open and self._checking.get(digest) != source.directory:
                self._refusals.pop(digest, None)
                self._checking[digest] = source.directory
                to_check.append(source)
        return to_check

    def forget_port(self, port: int) -> None:
        """A router's stream has ended."""
        self._lists.pop(port, None)
        self._forget_unwanted()

    def checked(self, source: AdapterSource, refusal: str) -> None:
        """An adapter's files were checked; `refusal`: why it can't be used, empty if it can."""
        if self._checking.get(source.digest) == source.directory:
            del self._checking[source.digest]
            self._refusals[source.digest] = refusal[:MAX_REFUSAL_CHARS]
            self._directories[source.digest] = source.directory

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
        if not any(source.directory == directory for source in self._sources() if source.digest == digest):
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

    def _sources(self) -> Sequence[AdapterSource]:
        return [source for adapters in self._lists.values() for source in adapters.values()]

    def _forget_unwanted(self) -> None:
        wanted = self.wanted
        for known in (self._refusals, self._directories, self._checking):
            for digest in [digest for digest in known if digest not in wanted]:
                del known[digest]
