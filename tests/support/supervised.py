"""A trivial process for a supervisor: `python supervised.py MODE JOURNAL [--flag value]...`.

It writes its start and the signals that it gets into JOURNAL, one line each. Modes: serve, refuse (announces why it
can't start), crash (ends with an error), crash-later (serves, ends at the first byte on its FIFO), stubborn (serves and
ignores SIGTERM), deaf (serves and does not watch its supervisor).
"""

from __future__ import annotations

import os
import signal
import sys

from baton.observe.ready import Failed, Ready, announce
from baton.processes.death_pipe import end_with_pipe


def main() -> int:
    mode, journal, *words = sys.argv[1:]
    flags = dict(zip(words[::2], words[1::2], strict=True))
    name, notify_fd = flags["--name"], int(flags["--notify-fd"])

    def write(line: str) -> None:
        with open(journal, "a") as file:
            file.write(f"{name} {line}\n")

    def on_signal(number: int, _frame: object) -> None:
        write(signal.Signals(number).name)
        if mode != "stubborn":
            sys.exit(0)

    signal.signal(signal.SIGTERM, on_signal)
    if mode != "deaf":
        end_with_pipe(int(flags["--parent-fd"]))
    write(f"started {os.environ.get('OMP_NUM_THREADS', '')} {flags.get('--port', '')}".rstrip())
    if mode == "refuse":
        announce(notify_fd, Failed("no model: name one with --model", 78))
        return 78
    if mode == "crash":
        sys.stderr.write("this is the end\n")
        return 3
    announce(notify_fd, Ready(f"{name}.{os.getpid()}", "127.0.0.1:4321", "127.0.0.1:4322"))
    if mode == "crash-later":
        with open(flags["--fifo"], "rb") as fifo:
            fifo.read(1)
        return 9
    while True:
        signal.pause()


if __name__ == "__main__":
    sys.exit(main())
