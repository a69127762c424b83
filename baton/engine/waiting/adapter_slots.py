"""Which adapters the running requests may have: at most `max_loras` different ones.

Every running request may take part in every step, so this bounds the different adapters of a step. A request whose
adapter would be one more is skipped, and others are tried. So that it does not wait for ever while requests with the
running adapters come and go, the next slot is kept for it once it was passed often: until it has a seat, no request
with another adapter gets one. Requests whose KV has arrived are tried first, and are not held up by requests without
blocks: they hold blocks that those may lack.
"""

from __future__ import annotations

from collections.abc import Iterable

from baton.engine.request import Request


class AdapterSlots:
    """The slots for different adapters while one step is decided."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._used: set[str] | None = None
        """The adapters of the running requests; None: not counted yet in this step."""
        self._kept_for = ""
        """The adapter for which the next slot is kept; empty: none is kept."""

    def begin_step(self) -> None:
        """Forget the running adapters, and for whom a slot is kept."""
        self._used = None
        self._kept_for = ""

    def is_free_for(self, adapter: str) -> bool:
        """Whether no slot is kept for another adapter."""
        return not adapter or self._kept_for in ("", adapter)

    def fits(self, adapter: str, running: Iterable[Request]) -> bool:
        """Whether a request with this adapter may run beside those that run."""
        if not self.is_free_for(adapter):
            return False
        if self._used is None:
            self._used = {request.adapter for request in running if request.adapter}
        return adapter in self._used or len(self._used) < self._most

    def keep_for(self, adapter: str) -> None:
        """Keep the next slot for this adapter, unless one is kept already."""
        self._kept_for = self._kept_for or adapter

    def take(self, adapter: str) -> None:
        """A request with this adapter runs from now on."""
        if self._used is not None:
            self._used.add(adapter)
