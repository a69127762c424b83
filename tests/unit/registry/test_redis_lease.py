"""The order in which a lease writes its record."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import cast

from baton.registry import NodeRecord
from baton.registry.registry import RedisLease, Registry
from tests.support.router_parts import prefill, record_of

RECORD = record_of(prefill())


class SlowRegistry:
    """Writes one record whenever the test allows it; the latest write is done first."""

    def __init__(self) -> None:
        self.written: list[str] = []
        self._waiting: list[asyncio.Future[None]] = []

    async def publish(self, record: NodeRecord) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        await turn
        self.written.append(record.state)

    async def let_one(self) -> None:
        while not self._waiting:  # noqa: ASYNC110 - a publication begins without saying so
            await asyncio.sleep(0)
        for _ in range(10):  # another one may begin beside it
            await asyncio.sleep(0)
        self._waiting.pop().set_result(None)

    def forget(self, lease: RedisLease) -> None:
        pass


async def test_an_update_during_a_renewal_is_not_overwritten() -> None:
    registry = SlowRegistry()
    lease = RedisLease(cast(Registry, registry), RECORD)
    renewal = asyncio.create_task(lease.publish())
    update = asyncio.create_task(lease.update(replace(RECORD, state="draining")))
    for _ in range(2):
        await registry.let_one()
    await asyncio.gather(renewal, update)
    assert registry.written == [RECORD.state, "draining"]
    await lease.abandon()
