"""Fixtures for every test: at its end the block accounts of all pools that it made must agree."""

from __future__ import annotations

import gc
import logging
import os
import zlib
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import HealthCheck, settings

from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.kv_cache.manager import KVCacheManager
from baton.security.access import default_access
from baton.security.callers import current_caller

# Waiting OpenMP threads release their cores: several tests run at a time, and torch's threads would spin.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Without a GPU Triton's kernels run in its interpreter, as this says when triton is imported.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The duration of an example depends on what else runs on this machine, so it has no deadline.
settings.register_profile("baton", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("baton")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while millions of objects are made that stay, and don't look at them again.

    Afterwards it is collected less often than usual: that took 7 % of the tests' time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        gc.set_threshold(10_000, 20, 20)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mix the files of all folders but the unit tests, which come last, in an order that is always the same.

    Files that wait for processes then run beside files that compute, and all workers end with short files.
    """

    def place(item: pytest.Item) -> tuple[bool, int]:
        name = item.nodeid.partition("::")[0]
        return name.startswith("tests/unit/"), zlib.crc32(name.encode())

    items.sort(key=place)


@pytest.fixture(autouse=True)
def block_accounts_agree(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[BlockPool | KVCacheManager]]:
    """Checks every BlockPool and KVCacheManager made in a test. Clear the yielded list to break one on purpose."""
    made: list[BlockPool | KVCacheManager] = []
    for kind in (BlockPool, KVCacheManager):
        _record_instances(kind, made, monkeypatch)
    yield made
    for books in made:
        books.check_invariant()


@pytest.fixture(autouse=True)
def caller_is_reset() -> Iterator[None]:
    """Reset the current caller and the default access after each test."""
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


@pytest.fixture
def logging_as_it_was() -> Iterator[None]:
    """Undoes what a test's `configure_logging` does to this process."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()
