"""Resets the prefix cache of a node's engine, for a caller on the event loop."""

from __future__ import annotations

import asyncio
import contextlib

from baton.errors import CacheInUse, DeadlineExceeded
from baton.node.driver import EngineDriver

_RESET_S = 4.0
"""How long the step that is being computed may delay the reset; routers wait longer than that."""


async def forget_cached_blocks(driver: EngineDriver) -> int:
    """Forget all cached KV; returns how many blocks that were.

    Raises CacheInUse while blocks are in use, and DeadlineExceeded when a step takes too long.
    """
    loop = asyncio.get_running_loop()
    answered: asyncio.Future[int | CacheInUse] = loop.create_future()

    def answer(found: int | CacheInUse) -> None:
        # This runs on the engine's thread, which may outlive the event loop by its last step.
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
    # The caller may have given up.
    if not answered.done():
        answered.set_result(found)
