"""One contract for the lock of the router that plans moves, in Redis and in the in-memory registry."""

from __future__ import annotations

from pathlib import Path

import pytest
from redis import asyncio as redis_client

from baton.errors import NotLeader, Unreachable
from baton.registry.base import LEAD_S
from baton.registry.desired import DesiredState, cordon, uncordon
from tests.contract.test_registry import RedisServer, Server, server

__all__ = ["server"]


async def test_one_router_leads_until_it_resigns(server: Server) -> None:
    first, second = server.connect(), server.connect()
    term = await first.lead("router-0.a")
    assert term is not None
    assert term.incarnation == "router-0.a"
    assert await second.lead("router-1.b") is None
    assert await first.lead("router-0.a") == term
    assert await server.connect("another").lead("router-1.b") is not None, "each cluster has its own leader"
    await first.resign(term)
    await first.resign(term)
    other = await second.lead("router-1.b")
    assert other is not None
    assert other.number > term.number
    await first.resign(term)
    assert await second.lead("router-1.b") == other, "a term that is over ends no other one"


async def test_only_the_leader_changes_what_is_wanted_as_a_leader(server: Server) -> None:
    first, second = server.connect(), server.connect()
    term = await first.lead("router-0.a")
    assert term is not None
    await first.want(cordon(["a"]), term)
    assert await second.desired() == DesiredState(cordoned=frozenset("a"))
    await first.resign(term)
    with pytest.raises(NotLeader, match="has ended"):
        await first.want(uncordon(["a"]), term)
    assert await second.lead("router-1.b") is not None
    with pytest.raises(NotLeader, match="has ended"):
        await first.want(uncordon(["a"]), term)
    assert await second.desired() == DesiredState(cordoned=frozenset("a"))
    await first.want(uncordon(["a"]))  # operators lead nothing


async def test_a_leader_that_is_gone_leads_for_some_seconds_only(tmp_path: Path) -> None:
    """The fake has no clock of a server."""
    server = RedisServer(tmp_path)
    await server.start_empty()
    try:
        registry = server.connect()
        for _ in range(2):
            assert await registry.lead("router-0.a") is not None
            async with redis_client.Redis.from_url(server.url) as client:
                assert 0 < await client.pttl("baton:c:planner") <= LEAD_S * 1e3
                await client.pexpire("baton:c:planner", 60_000)
    finally:
        await server.close()


async def test_nobody_leads_in_a_registry_that_is_away_or_has_lost_its_data(server: Server) -> None:
    registry = server.connect()
    term = await registry.lead("router-0.a")
    assert term is not None
    await server.flush()
    with pytest.raises(NotLeader):
        await registry.want(cordon(["a"]), term)
    again = await registry.lead("router-0.a")
    assert again is not None
    await registry.want(cordon(["a"]), again)
    await server.stop()
    for asking in (registry.lead("router-0.a"), registry.resign(again), registry.want(cordon(["b"]), again)):
        with pytest.raises(Unreachable):
            await asking
