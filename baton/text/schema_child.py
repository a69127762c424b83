"""The child process in which a schema is compiled for the first time; it ends when a schema exceeds its limits.

The child reads schemas from its standard input, which is a socket, and writes an answer to each there. A message is,
in both directions, a length in four bytes, big-endian, and then UTF-8. A schema has its kind (`ConstraintKind`) and a
blank before it. An answer is the reason why the schema can't be served, or empty. The child ends when its parent ends,
when the socket is closed, or by a signal: SIGABRT when an allocation exceeds the memory limit (Rust aborts then),
SIGPROF when a schema has used its CPU time, SIGSEGV when it needs more stack.

Arguments: the parent's process id, seconds of CPU time for a schema, bytes of memory for a schema.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import sys
from typing import cast

from baton.errors import InvalidRequest
from baton.messages.sampling import ConstraintKind
from baton.text.schema_compiling import JSON_OBJECT, check_constraint

LENGTH_BYTES = 4
_STACK_BYTES = 2 << 20
"""The stack of this process: much less than that of a node's thread, which compiles what was compiled here."""
_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Serve until the other end of the socket is closed."""
    parent, cpu_s, memory_bytes = int(arguments[0]), float(arguments[1]), int(arguments[2])
    # Ctrl-C in a terminal is for the parent.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _end_with(parent)
    # One-time initialisation must not count against the limits of the first schema.
    check_constraint(JSON_OBJECT)
    _limit_memory(memory_bytes)
    with socket.socket(fileno=sys.stdin.fileno()) as channel:
        send(channel, "")
        while (text := receive(channel)) is not None:
            signal.setitimer(signal.ITIMER_PROF, cpu_s)
            answer = _reason(text, memory_bytes)
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            send(channel, answer)


def send(channel: socket.socket, text: str) -> None:
    """Send one message; raises OSError."""
    content = text.encode()
    channel.sendall(len(content).to_bytes(LENGTH_BYTES, "big") + content)


def receive(channel: socket.socket) -> str | None:
    """The next message; None when the other end has closed. Raises OSError."""
    head = _exactly(channel, LENGTH_BYTES)
    if head is None:
        return None
    content = _exactly(channel, int.from_bytes(head, "big"))
    return None if content is None else content.decode()


def out_of_memory(memory_bytes: int) -> str:
    """The reason why a schema that exceeds the memory limit can't be served."""
    return f"needs more than {memory_bytes >> 20} MiB to compile: join fewer patterns"


def _reason(message: str, memory_bytes: int) -> str:
    kind, _, text = message.partition(" ")
    try:
        check_constraint(text, cast(ConstraintKind, kind))
    except InvalidRequest as error:
        return error.reason
    except MemoryError:
        return out_of_memory(memory_bytes)
    return ""


def _exactly(channel: socket.socket, count: int) -> bytes | None:
    found = bytearray()
    while len(found) < count:
        piece = channel.recv(count - len(found))
        if not piece:
            return None
        found += piece
    return bytes(found)


def _end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, also while a schema is compiled and no socket is read.

    On other systems than Linux the CPU time limit ends such a compilation.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(1)


def _limit_memory(more_bytes: int) -> None:
    """Limit the stack, and the further memory of this process to `more_bytes`, and write no core file."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    resource.setrlimit(resource.RLIMIT_STACK, (_STACK_BYTES, hard))
    if not sys.platform.startswith("linux"):
        return
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + more_bytes, size + more_bytes))


if __name__ == "__main__":
    main(sys.argv[1:])
