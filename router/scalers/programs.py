"""Runs a program with bounds: of time, of output, and of what it learns from this process."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress

from baton.processes.ends import how_it_ended
from router.scalers.scaler import CALL_S, ScalerFailed, ScalerFault

MAX_OUTPUT_BYTES = 1 << 20
_MOST_SAID = 300
"""Characters of what a program says about its failure that a message has."""


class _TooLong(Exception):
    pass


class _Program(asyncio.SubprocessProtocol):
    """What a program has written; `over` is done when it and all that has its output have ended."""

    def __init__(self) -> None:
        self.written = {1: bytearray(), 2: bytearray()}
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self.written[fd] += data
        if len(self.written[fd]) > MAX_OUTPUT_BYTES and not self.over.done():
            self.over.set_exception(_TooLong())

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.over.done():
            self.over.set_result(None)


async def run_program(
    words: Sequence[str], subject: str, *, given: bytes = b"", limit_s: float = CALL_S, environ: Mapping[str, str]
) -> bytes:
    """The standard output of a program that ends with 0. It is killed, with what it has started, when time is up.

    `given` is its standard input, `environ` what its environment is made of: settings of Baton, which may have
    passwords, are left out. Raises ScalerFailed about `subject`.
    """
    variables = {name: value for name, value in environ.items() if not name.startswith("BATON_")}
    try:
        transport, program = await asyncio.get_running_loop().subprocess_exec(
            _Program, *words, env=variables, start_new_session=True
        )
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ScalerFailed(ScalerFault.UNREACHABLE, subject, f"{words[0]} can't be started: {reason}") from None
    try:
        stdin = transport.get_pipe_transport(0)
        assert isinstance(stdin, asyncio.WriteTransport)
        stdin.write(given)
        stdin.close()
        async with asyncio.timeout(limit_s):
            await program.over
    except TimeoutError:
        raise ScalerFailed(ScalerFault.TIMEOUT, subject, f"{words[0]} took longer than {limit_s:g} s") from None
    except _TooLong:
        detail = f"{words[0]} wrote more than {MAX_OUTPUT_BYTES} bytes"
        raise ScalerFailed(ScalerFault.INVALID_ANSWER, subject, detail) from None
    finally:
        # Also what it has left in the background.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(transport.get_pid(), signal.SIGKILL)
        transport.close()
    output, said = map(bytes, program.written.values())
    if code := transport.get_returncode():
        text = " ".join((said or output).decode(errors="replace").split())[-_MOST_SAID:]
        raise ScalerFailed(ScalerFault.FAILED, subject, f"{words[0]} {how_it_ended(code)}: {text or 'it said nothing'}")
    return output
