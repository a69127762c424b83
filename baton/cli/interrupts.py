"""Defers signals, so that an interrupt does not separate two operations that belong together."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupts_deferred(*numbers: signal.Signals) -> Iterator[None]:
    """Defer these signals, by default SIGINT: one that arrives meanwhile is raised as KeyboardInterrupt at the end.

    Signals that are ignored stay ignored. Must be called on the main thread.
    """
    arrived = False

    def defer(*_: object) -> None:
        nonlocal arrived
        arrived = True

    deferred = [number for number in numbers or (signal.SIGINT,) if signal.getsignal(number) is not signal.SIG_IGN]
    handlers = [(number, signal.signal(number, defer)) for number in deferred]
    try:
        yield
    finally:
        for number, handler in handlers:
            signal.signal(number, handler)
    if arrived:
        raise KeyboardInterrupt
