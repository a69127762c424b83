"""What every test gets: at its end the block books of all pools it made must agree.

And who shares a worker where tests run in parallel (scripts/test without arguments): who starts the same cluster.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from baton.engine.block_pool import BlockPool
from baton.engine.kv_cache_manager import KVCacheManager


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Two lots: what makes processes fail, which waits much and computes little, and everything else."""
    for item in items:
        lot = "faults" if "fault" in item.path.parts else "others"
        item.add_marker(pytest.mark.xdist_group(lot))


@pytest.fixture(autouse=True)
def block_books_agree(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[BlockPool | KVCacheManager]]:
    """Checks every BlockPool and KVCacheManager made in a test. Clear the yielded list to break one on purpose."""
    made: list[BlockPool | KVCacheManager] = []
    for kind in (BlockPool, KVCacheManager):
        _record_instances(kind, made, monkeypatch)
    yield made
    for books in made:
        books.check_invariant()


def _record_instances(kind: type[Any], made: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    original = kind.__init__

    def recording(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(kind, "__init__", recording)
