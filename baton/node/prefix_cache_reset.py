"""Forgets a node's cached KV, for a caller on the event loop."""

from __future__ import annotations

import asyncio
import contextlib

from baton.errors import CacheInUse, DeadlineExceeded
from baton.node.driver import EngineDriver

_RESET_S = 4.0
"""So long may a step that is being computed keep the engine from it: less than routers wait."""


async def forget_cached_blocks(driver: EngineDriver) -> int:
    """Forget all cached KV; returns how many blocks it was.

    Raises CacheInUse, DeadlineExceeded when the engine does not get to it.
    """
    loop = asyncio.get_running_loop()
    answered: asyncio.Future[int | CacheInUse] = loop.create_future()

    def answer(found: int | CacheInUse) -> None:
        # On the engine's thread, which may outlive the loop by its last step.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_resolve, answered, found)

    driver.reset_prefix_cache(answer)
    try:
        found = await asyncio.wait_for(answered, _RESET_S)
    except TimeoutError:
        raise DeadlineExceeded(f"the engine was busy for {_RESET_S:g} s: try again") from None
    if isinstance(found, CacheInUse):
        raise found
    return found


def _resolve(answered: asyncio.Future[int | CacheInUse], found: int | CacheInUse) -> None:
    # Who asked may have given up.
    if not answered.done():
        answered.set_result(found)
