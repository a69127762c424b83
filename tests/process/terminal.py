"""A command at a pseudo-terminal: its screen, and keys pressed by a test."""

from __future__ import annotations

import fcntl
import os
import select
import struct
import subprocess
import termios
import time
from types import TracebackType

from baton.processes.process_stat import process_stat
from tests.process.shell import BOUND_S, Shell


class Terminal:
    """A pseudo-terminal of 80 columns with one command in its foreground."""

    def __init__(self, shell: Shell, *words: object, as_program: bool = False) -> None:
        self._ours, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
        self.process: subprocess.Popen[bytes] = shell.start(
            *words,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            as_program=as_program,
        )
        os.close(theirs)
        self.screen = ""

    def wait_for_text(self, text: str) -> str:
        """Wait until the text has been printed; return everything that was printed."""
        while text not in self.screen:
            assert self._read(), f"{text!r} never came: {self.screen}"
        return self.screen

    def paste(self, text: str) -> None:
        """Paste a text, as terminals do that were asked to mark where it begins and ends; then press Enter."""
        os.write(self._ours, f"\x1b[200~{text}\x1b[201~\r".encode())

    def ctrl_c(self) -> None:
        os.write(self._ours, b"\x03")

    def wait_until_idle(self) -> None:
        """Wait until the command's main thread sleeps, as it does while it reads a line.

        A prompt is on the screen a moment earlier, and a Ctrl-C in between is only noticed at the next key: CPython's
        readline module looks for signals once, and then waits.
        """
        deadline = time.monotonic() + BOUND_S
        while process_stat(self.process.pid).state != "S":
            assert time.monotonic() < deadline, f"it never waited: {self.screen}"
            os.sched_yield()

    def end(self) -> int:
        """Wait for the command to end; return its exit code."""
        while self._read():
            pass
        return self.process.wait(BOUND_S)

    def _read(self) -> bool:
        assert select.select([self._ours], [], [], BOUND_S)[0], f"nothing more came: {self.screen}"
        try:
            piece = os.read(self._ours, 65536)
        except OSError:
            # Linux raises this when the other side is closed.
            return False
        text = piece.decode(errors="replace").replace("\r\n", "\n")
        # What asks a terminal to mark pasted text is not seen on it.
        self.screen += text.replace("\x1b[?2004h", "").replace("\x1b[?2004l\r", "")
        return bool(piece)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.end()
        os.close(self._ours)
