"""A program for fork servers to start, which at its end still has threads, exit functions, output and objects."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Sequence


class _Freed:
    """Tells when it is freed, as Python does with all objects at the end of a program."""

    def __del__(self) -> None:
        os.write(2, b"freed ")


_kept = _Freed()


def main(arguments: Sequence[str]) -> int:
    """`CODE`: write to the standard output what happens, in its order, and to the standard error; returns CODE."""
    atexit.register(_write, "exit function")
    threading.Thread(target=_write_after_main).start()
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    _write("main")
    sys.stderr.write("error ")
    return int(arguments[0])


def _write_after_main() -> None:
    threading.main_thread().join()
    _write("thread")


def _write(text: str) -> None:
    sys.stdout.write(f"{text}, ")
