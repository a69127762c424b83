"""What every test gets: at its end the block books of all pools it made must agree."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.kv_cache.manager import KVCacheManager
from baton.security.access import default_access
from baton.security.callers import current_caller

# Threads that wait for each other give up their cores: several tests run at a time, and torch's would spin.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# How long one example takes says something of who else runs on this machine.
settings.register_profile("baton", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("baton")


@pytest.fixture(autouse=True)
def block_books_agree(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[BlockPool | KVCacheManager]]:
    """Checks every BlockPool and KVCacheManager made in a test. Clear the yielded list to break one on purpose."""
    made: list[BlockPool | KVCacheManager] = []
    for kind in (BlockPool, KVCacheManager):
        _record_instances(kind, made, monkeypatch)
    yield made
    for books in made:
        books.check_invariant()


@pytest.fixture(autouse=True)
def nobody_is_calling() -> Iterator[None]:
    """Who a test called as, or meant to, is forgotten at its end."""
    caller, access = current_caller.set(current_caller.get()), default_access.set(default_access.get())
    yield
    current_caller.reset(caller)
    default_access.reset(access)


def _record_instances(kind: type[Any], made: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    original = kind.__init__

    def recording(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(kind, "__init__", recording)
