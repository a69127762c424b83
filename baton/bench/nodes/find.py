"""Finds a running cluster by a router's operator port, or in the registry that its hosts share."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

from baton.client import OperatorClient
from baton.errors import BatonError, Unreachable
from baton.messages.operator import NodeStatus
from baton.registry.registry import Registry, with_authority
from baton.security.access import default_access


@dataclass(frozen=True, slots=True)
class FoundCluster:
    """A running cluster that a load can be put on."""

    grpc_address: str
    """Address of a router."""
    nodes: Sequence[NodeStatus]


def find_by_operator(grpc_address: str, operator_address: str) -> FoundCluster:
    """The cluster as a router sees it; raises Unreachable."""
    with closing(OperatorClient(operator_address)) as client:
        return FoundCluster(grpc_address, [node for node in client.status().nodes if node.role != "router"])


def find_in_registry(url: str, cluster: str) -> FoundCluster:
    """The first router of the registry that answers, and all nodes on all hosts; raises Unreachable."""
    routers = asyncio.run(_routers(with_authority(url, default_access.get().tls_ca), cluster))
    for grpc_address, operator_address in routers:
        try:
            return find_by_operator(grpc_address, operator_address)
        except BatonError:
            continue
    raise Unreachable(f"no router of cluster {cluster!r} answers; the registry lists {len(routers)}")


async def _routers(url: str, cluster: str) -> list[tuple[str, str]]:
    registry = Registry.connect(url, cluster)
    try:
        await registry.ping()
        snapshot = await registry.read()
    finally:
        await registry.close()
    records = [record for record in snapshot.values() if record.role == "router" and record.operator_address]
    return [(record.address, record.operator_address) for record in sorted(records, key=lambda one: one.name)]
