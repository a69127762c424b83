"""The watch of background work, whose faults end a process."""

from __future__ import annotations

import queue
from collections.abc import Iterator

import pytest

from baton.background import BackgroundWatch, current_watch
from baton.errors import BackgroundFault


@pytest.fixture
def faults() -> Iterator[queue.SimpleQueue[BackgroundFault]]:
    """The faults that would end the process."""
    met: queue.SimpleQueue[BackgroundFault] = queue.SimpleQueue()
    token = current_watch.set(BackgroundWatch(met.put))
    yield met
    current_watch.reset(token)
