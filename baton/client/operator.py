"""The synchronous client of the operator's service."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from baton.messages.cluster import ClusterStatus
from baton.messages.explanations import PlacementDecision
from baton.messages.request_rows import RequestRow
from baton.messages.steering import ClusterEvent, DrainProgress, RoleSet
from baton.messages.timelines import Timeline
from baton.security.access import Access, default_access
from baton.wire.clients.operator_client import OperatorStub
from baton.wire.credentials import Dialer


class OperatorClient:
    """Speaks to a router's operator port at HOST:PORT."""

    def __init__(self, address: str, access: Access | None = None) -> None:
        self._stub = OperatorStub(address, Dialer.to_operator(access or default_access.get()))

    def status(self, timeout_s: float = 5.0) -> ClusterStatus:
        """How the router sees the cluster; raises Unreachable."""
        return self._stub.status(timeout_s)

    def explain(self, request_id: str, timeout_s: float = 5.0) -> Sequence[PlacementDecision]:
        """Why a request went where it went, attempt by attempt; raises RequestNotFound or Unreachable."""
        return self._stub.explain(request_id, timeout_s)

    def timeline(self, request_id: str, timeout_s: float = 5.0) -> Timeline:
        """Where a request's time went; raises RequestNotFound or Unreachable."""
        return self._stub.timeline(request_id, timeout_s)

    def requests(self, limit: int = 100, request_id: str = "", timeout_s: float = 5.0) -> Sequence[RequestRow]:
        """The latest requests that this router serves, and as many that are over; 0: all that run, and no others.

        With an id that one alone, if the router knows it. Raises Unreachable.
        """
        return self._stub.requests(limit, request_id, timeout_s)

    def cordon(self, names: Sequence[str], timeout_s: float = 5.0) -> str:
        """No new requests for these nodes; what runs there goes on. Returns why less is served now, if so.

        Raises NodeNotFound, InvalidRequest, and Unreachable when the registry can't keep it: then nothing changes.
        """
        return self._stub.cordon(names, timeout_s)

    def uncordon(self, names: Sequence[str], timeout_s: float = 5.0) -> None:
        """They take requests again; raises as `cordon`."""
        self._stub.uncordon(names, timeout_s)

    def set_role(self, name: str, role: str, timeout_s: float = 5.0) -> RoleSet:
        """The node is to be `prefill` or `decode`, as soon as its work is done; raises as `cordon`."""
        return self._stub.set_role(name, role, timeout_s)

    def reset_cache(self, name: str, timeout_s: float = 6.0) -> int:
        """Have a node forget its prefix cache; returns how many blocks it was.

        Raises CacheInUse while any block there is in use, NodeNotFound, InvalidRequest, Unreachable.
        """
        return self._stub.reset_cache(name, timeout_s)

    def drain(self, name: str, *, stop: bool = False, timeout_s: float | None = None) -> Iterator[DrainProgress]:
        """Cordon a node and hear how much is left there until nothing is; `stop`: and then end its process.

        Raises as `cordon`, and DeadlineExceeded when it takes longer: the node stays cordoned.
        """
        return self._stub.drain(name, stop=stop, timeout_s=timeout_s)

    def events(self, after: int = 0, *, follow: bool = False, timeout_s: float | None = None) -> Iterator[ClusterEvent]:
        """What became of the cluster as this router saw it, the oldest first; `follow`: and what is yet to come of it.

        Raises Unreachable.
        """
        return self._stub.events(after, follow=follow, timeout_s=timeout_s)

    def close(self) -> None:
        self._stub.close()
