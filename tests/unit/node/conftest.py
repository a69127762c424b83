"""A node without gRPC and its stream to a router, as most tests of a node want them; others make their own."""

from __future__ import annotations

import pytest

from baton.node.router_streams import Port
from tests.support.node_rig import NodeRig


@pytest.fixture
async def rig() -> NodeRig:
    return NodeRig()


@pytest.fixture
async def port(rig: NodeRig) -> Port:
    return rig.service.open_port("router-0")
