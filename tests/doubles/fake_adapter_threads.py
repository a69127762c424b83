"""The fake of `AdapterThreads`: a test says what is in each directory, and when a load ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from baton.errors import AdapterRefused
from baton.model_formats.adapters import AdapterInfo
from baton.node.adapters.adapter_cache import AdapterFault
from baton.node.adapters.adapter_threads import AdapterThreads


@dataclass(frozen=True, slots=True)
class FakeAdapterLoad:
    """A load that has begun; a test calls `done`."""

    digest: str
    directory: str
    done: Callable[[AdapterFault | None], None]


class FakeAdapterThreads(AdapterThreads):
    """Has no threads. Digests of one letter repeated 64 times are enough: nothing is read."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}
        """The digest of the adapter in each directory; others have none."""
        self.loads: list[FakeAdapterLoad] = []
        """The loads that have begun and not ended, the oldest first."""
        self.checked: list[str] = []
        """The directories that were checked, in order."""
        self.is_closed = False

    def load(self, digest: str, directory: str, done: Callable[[AdapterFault | None], None]) -> None:
        self.loads.append(FakeAdapterLoad(digest, directory, done))

    def end_load(self, fault: AdapterFault | None = None) -> None:
        """End the oldest load."""
        self.loads.pop(0).done(fault)

    async def inspect(self, directory: str) -> AdapterInfo:
        """The adapter in a directory. Raises AdapterRefused."""
        if directory not in self.found:
            raise AdapterRefused(f"there is no directory {directory}")
        return AdapterInfo(self.found[directory], 4, 256, 1)

    async def find_fault(self, directory: str, digest: str) -> AdapterFault | None:
        self.checked.append(directory)
        found = self.found.get(directory)
        if found is None:
            return AdapterFault(f"there is no directory {directory}")
        return None if found == digest else AdapterFault(f"{directory} holds {found}, not {digest}")

    def close(self) -> None:
        """Take note that no more is to be read."""
        self.is_closed = True

    async def aclose(self) -> None:
        return
