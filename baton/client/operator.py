"""The synchronous client of the operator's service."""

from __future__ import annotations

from baton.rpc.messages import ClusterStatus
from baton.rpc.operator_client import OperatorStub


class OperatorClient:
    """Speaks to a router's operator port at HOST:PORT."""

    def __init__(self, address: str) -> None:
        self._stub = OperatorStub(address)

    def status(self, timeout_s: float = 5.0) -> ClusterStatus:
        """How the router sees the cluster; raises Unreachable."""
        return self._stub.status(timeout_s)

    def close(self) -> None:
        self._stub.close()
