"""The synchronous client of the operator's service."""

from __future__ import annotations

from collections.abc import Sequence

from baton.rpc.explanations import PlacementDecision
from baton.rpc.messages import ClusterStatus
from baton.rpc.operator_client import OperatorStub


class OperatorClient:
    """Speaks to a router's operator port at HOST:PORT."""

    def __init__(self, address: str) -> None:
        self._stub = OperatorStub(address)

    def status(self, timeout_s: float = 5.0) -> ClusterStatus:
        """How the router sees the cluster; raises Unreachable."""
        return self._stub.status(timeout_s)

    def explain(self, request_id: str, timeout_s: float = 5.0) -> Sequence[PlacementDecision]:
        """Why a request went where it went, attempt by attempt; raises RequestNotFound or Unreachable."""
        return self._stub.explain(request_id, timeout_s)

    def close(self) -> None:
        self._stub.close()
