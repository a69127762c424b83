"""Checks JSON schemas before anything is allocated, without keeping the loop from others."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from baton.errors import QueueFull
from baton.text.grammar import check_json_schema

MAX_WAITING = 256
_MAX_KNOWN = 64


class SchemaCheck:
    """One at a time, in a thread of its own, so that a flood of them takes one core and no more. Known ones at once."""

    def __init__(self, check: Callable[[str], None] = check_json_schema) -> None:
        """`check` raises InvalidRequest for a schema that can't be served."""
        self._check = check
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="router-schemas")
        self._known: OrderedDict[str, None] = OrderedDict()
        """Good ones, the last used last."""
        self._num_waiting = 0

    async def check(self, json_schema: str) -> None:
        """Raises InvalidRequest, and QueueFull when too many wait for their turn."""
        if json_schema not in self._known:
            await self._checked(json_schema)
        self._known[json_schema] = None
        self._known.move_to_end(json_schema)
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)

    async def _checked(self, json_schema: str) -> None:
        if self._num_waiting >= MAX_WAITING:
            raise QueueFull(f"{self._num_waiting} JSON schemas wait to be checked")
        self._num_waiting += 1
        try:
            await asyncio.get_running_loop().run_in_executor(self._pool, self._check, json_schema)
        finally:
            self._num_waiting -= 1
