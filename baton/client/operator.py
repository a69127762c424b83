"""The blocking client of the operator's service."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from baton.messages.adapters import AdapterRow, LoadedAdapter
from baton.messages.operator import (
    ClusterEvent,
    ClusterStatus,
    DrainProgress,
    PlacementDecision,
    RequestRow,
    RoleSet,
    Timeline,
)
from baton.security.access import Access, default_access
from baton.wire.clients.operator_client import OperatorStub
from baton.wire.credentials import Dialer


class OperatorClient:
    """The client of one router's operator port, at HOST:PORT."""

    def __init__(self, address: str, access: Access | None = None) -> None:
        self._stub = OperatorStub(address, Dialer.to_operator(access or default_access.get()))

    def status(self, timeout_s: float = 5.0) -> ClusterStatus:
        """The cluster as the router sees it. Raises Unreachable."""
        return self._stub.status(timeout_s)

    def explain(self, request_id: str, timeout_s: float = 5.0) -> Sequence[PlacementDecision]:
        """The placement decision of each attempt of a request. Raises RequestNotFound or Unreachable."""
        return self._stub.explain(request_id, timeout_s)

    def timeline(self, request_id: str, timeout_s: float = 5.0) -> Timeline:
        """The stages of a finished request with their durations. Raises RequestNotFound or Unreachable."""
        return self._stub.timeline(request_id, timeout_s)

    def requests(self, limit: int = 100, request_id: str = "", timeout_s: float = 5.0) -> Sequence[RequestRow]:
        """The latest running requests of this router and as many finished ones, up to `limit` each.

        `limit` 0: all running requests and no finished ones. `request_id`: this request alone, if the router knows it.
        Raises Unreachable.
        """
        return self._stub.requests(limit, request_id, timeout_s)

    def cordon(self, names: Sequence[str], timeout_s: float = 5.0) -> str:
        """Give these nodes no new requests; running ones continue. Returns a warning if the cluster now serves less.

        Raises NodeNotFound, InvalidRequest, and Unreachable if the registry can't store it, when nothing changes.
        """
        return self._stub.cordon(names, timeout_s)

    def uncordon(self, names: Sequence[str], timeout_s: float = 5.0) -> None:
        """Give these nodes requests again. Raises as `cordon`."""
        self._stub.uncordon(names, timeout_s)

    def set_role(self, name: str, role: str, timeout_s: float = 5.0) -> RoleSet:
        """Make the node a `prefill` or `decode` node as soon as its running work is done. Raises as `cordon`."""
        return self._stub.set_role(name, role, timeout_s)

    def reset_cache(self, name: str, timeout_s: float = 6.0) -> int:
        """Empty the prefix cache of a node. Returns the number of blocks that it held.

        Raises CacheInUse while any block there is in use, NodeNotFound, InvalidRequest, Unreachable.
        """
        return self._stub.reset_cache(name, timeout_s)

    def load_adapter(
        self, name: str, directory: str, *, replaces: bool = False, timeout_s: float = 90.0
    ) -> LoadedAdapter:
        """Give a name to the adapter in a directory of the nodes; `replaces`: it may have another adapter already.

        Raises InvalidRequest for a bad or taken name, AdapterRefused if no node takes the adapter or nodes find
        different ones, UnsupportedRequest, Overloaded, Unreachable.
        """
        return self._stub.load_adapter(name, directory, replaces=replaces, timeout_s=timeout_s)

    def unload_adapter(self, name: str, timeout_s: float = 5.0) -> None:
        """Take an adapter's name away; running requests keep it. Raises UnknownModel or Unreachable."""
        self._stub.unload_adapter(name, timeout_s)

    def adapters(self, timeout_s: float = 5.0) -> Sequence[AdapterRow]:
        """All adapters by name, and what the router's nodes say of them. Raises Unreachable."""
        return self._stub.adapters(timeout_s)

    def drain(self, name: str, *, stop: bool = False, timeout_s: float | None = None) -> Iterator[DrainProgress]:
        """Cordon a node and report what still runs there until it is idle. `stop`: end its process then.

        Raises as `cordon`, and DeadlineExceeded after `timeout_s`, when the node stays cordoned.
        """
        return self._stub.drain(name, stop=stop, timeout_s=timeout_s)

    def events(self, after: int = 0, *, follow: bool = False, timeout_s: float | None = None) -> Iterator[ClusterEvent]:
        """The cluster's events as this router saw them, the oldest first. `follow`: also those to come.

        Raises Unreachable.
        """
        return self._stub.events(after, follow=follow, timeout_s=timeout_s)

    def close(self) -> None:
        self._stub.close()
