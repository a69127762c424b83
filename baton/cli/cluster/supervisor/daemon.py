"""Runs a supervisor in the background. Its command returns when the cluster is ready, or when its start has failed."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from baton.cli.cluster.state import ClusterState
from baton.cli.interrupts import interrupts_deferred
from baton.errors import BatonError, ExitCode

Report = Callable[[ClusterState], None]


class DetachedStartFailed(BatonError):
    """The cluster in the background did not start. None of its processes runs any more."""

    def __init__(self, reason: str, exit_code: int) -> None:
        super().__init__(reason)
        self.exit_code = ExitCode(exit_code)


def serve_detached(serve: Callable[[Report], None], log: Path) -> ClusterState:
    """Run `serve(report)` in a background process with a session of its own, and wait until it reports.

    `serve` calls `report` once, when the cluster is ready, and returns when the cluster has ended. Raises
    DetachedStartFailed. This process must not have threads yet, because it forks.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    read_end, write_end = os.pipe()
    background, on_interrupt = 0, signal.getsignal(signal.SIGINT)
    with os.fdopen(read_end, "rb") as messages:
        try:
            # An interrupt must not arrive before the process that it is to end is known.
            with interrupts_deferred():
                middle = os.fork()
                if middle == 0:
                    os.setsid()
                    if os.fork() != 0:
                        os._exit(0)
                    os.close(read_end)
                    signal.signal(signal.SIGINT, on_interrupt)
                    _run(serve, write_end, log)
                os.close(write_end)
                os.waitpid(middle, 0)
                found = _receive(messages)
                background = found.get("pid", 0)
            while "state" not in found:
                if "error" in found:
                    # The pipe ends with the background process, so nothing of it is left when the command returns.
                    messages.read()
                    raise DetachedStartFailed(found["error"], found["exit_code"])
                found = _receive(messages)
        except KeyboardInterrupt:
            if background:
                with suppress(ProcessLookupError):
                    os.kill(background, signal.SIGTERM)
            messages.read()
            raise
    return ClusterState.from_json(found["state"])


def _run(serve: Callable[[Report], None], pipe: int, log: Path) -> None:
    """Run as the background process. Never returns."""
    code = int(ExitCode.FAILED)
    try:
        _redirect(log)
        _send(pipe, {"pid": os.getpid()})

        def report(state: ClusterState) -> None:
            _send(pipe, {"state": state.to_json()})
            os.close(pipe)

        serve(report)
        code = int(ExitCode.OK)
    except BatonError as error:
        code = int(error.exit_code)
        _send(pipe, {"error": str(error), "exit_code": code})
    except BaseException as error:
        _send(pipe, {"error": f"the supervisor failed: {error!r} (log: {log})", "exit_code": code})
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _redirect(log: Path) -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)


def _send(pipe: int, message: dict[str, Any]) -> None:
    with suppress(OSError):
        os.write(pipe, json.dumps(message).encode() + b"\n")


def _receive(messages: IO[bytes]) -> dict[str, Any]:
    """The next message of the background process. Raises DetachedStartFailed if it has ended."""
    line = messages.readline()
    if not line:
        raise DetachedStartFailed("the supervisor ended before the cluster was ready", ExitCode.FAILED)
    found: dict[str, Any] = json.loads(line)
    return found
