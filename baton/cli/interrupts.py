"""Handles Ctrl-C: a last line that says what became of the work, and operations that it must not separate."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from baton.cli.output import print_note


@contextmanager
def closing_line(what_became: str) -> Iterator[None]:
    """If the block is interrupted, say so and `what_became` of its work in one line on stderr, and raise it on."""
    try:
        yield
    except KeyboardInterrupt:
        # A terminal has written ^C into the current line.
        print_note(f"{chr(10) if sys.stderr.isatty() else ''}baton: interrupted: {what_became}")
        raise


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
