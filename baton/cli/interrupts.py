"""Ctrl-C, where it must not come between two things that belong together."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupts_held(*numbers: signal.Signals) -> Iterator[None]:
    """One of these signals (none: SIGINT) that comes meanwhile is raised as KeyboardInterrupt on exit; who ignores it
    goes on ignoring it. For the main thread.
    """
    came = False

    def note(*_: object) -> None:
        nonlocal came
        came = True

    heard = [number for number in numbers or (signal.SIGINT,) if signal.getsignal(number) is not signal.SIG_IGN]
    handlers = [(number, signal.signal(number, note)) for number in heard]
    try:
        yield
    finally:
        for number, handler in handlers:
            signal.signal(number, handler)
    if came:
        raise KeyboardInterrupt
