"""An interrupt that arrives between two operations is deferred until both are done."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from baton.cli.waiting import interrupts_deferred


@pytest.fixture(autouse=True)
def interrupts_raise() -> Iterator[None]:
    """Let interrupts raise KeyboardInterrupt, which a process that a shell runs in the background ignores."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("numbers", [(), (signal.SIGINT, signal.SIGTERM)])
def test_an_interrupt_is_deferred_until_both_operations_are_done(numbers: tuple[signal.Signals, ...]) -> None:
    handlers = [signal.getsignal(number) for number in numbers]
    done = []

    def both() -> None:
        with interrupts_deferred(*numbers):
            done.append("the first")
            signal.raise_signal(numbers[-1] if numbers else signal.SIGINT)
            done.append("the second")

    with pytest.raises(KeyboardInterrupt):
        both()
    assert done == ["the first", "the second"]
    assert [signal.getsignal(number) for number in numbers] == handlers


def test_nothing_is_raised_without_an_interrupt() -> None:
    with interrupts_deferred():
        pass
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_an_ignored_signal_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with interrupts_deferred():
        signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_an_error_inside_has_precedence_over_the_interrupt() -> None:
    def fails() -> None:
        with interrupts_deferred():
            signal.raise_signal(signal.SIGINT)
            raise OSError("no process")

    with pytest.raises(OSError, match="no process"):
        fails()
