"""A child process that does untrusted work (`bounded_workers`); it ends when a piece of work exceeds its limits.

The child reads work from its standard input, which is a socket, and writes an answer to each there. A message is, in
both directions, a length in four bytes, big-endian, and then UTF-8. Work is the name of the job
(`bounded_workers.Job`), a blank, and its content. An answer is "+" and the result, or the reason why there is none
behind "-", or behind "!" if the work exceeded the memory limit. The child ends when its parent ends, when the socket is
closed, or by a signal: SIGABRT when an allocation of Rust exceeds the memory limit, SIGPROF when a piece of work has
used its CPU time, SIGSEGV when it needs more stack.

Arguments: the parent's process id, seconds of CPU time for a piece of work, bytes of memory for it.
"""

from __future__ import annotations

import signal
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import cast

from baton.errors import ConfigError, InvalidRequest
from baton.messages.sampling import ConstraintKind
from baton.processes.bounded_process import limit_memory, limit_powers
from baton.processes.ends import die_with
from baton.text.chat_template import TemplateWork, load_all
from baton.text.constraints.schema_compiling import JSON_OBJECT, check_constraint

LENGTH_BYTES = 4
MAX_MESSAGE_BYTES = 16 << 20
"""The longest message that is read. Work is as long as a request, which JSON may write with six bytes a character."""
_STACK_BYTES = 2 << 20
"""The stack of this process: much less than that of a node's thread, which compiles what was compiled here."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a piece of work ended."""

    result: str = ""
    reason: str = ""
    """Why there is no result; empty if there is one."""
    is_lasting: bool = True
    """Whether the same work would end the same way again, so that the outcome may be cached."""
    exceeds_limits: bool = False
    """Whether the work needs more CPU time, memory or stack than a child has."""


def main(arguments: list[str]) -> None:
    """Serve until the other end of the socket is closed."""
    parent, cpu_s, memory_bytes = int(arguments[0]), float(arguments[1]), int(arguments[2])
    # Ctrl-C in a terminal is for the parent.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with(parent)
    # One-time initialisation must not count against the limits of the first work, and it opens files.
    check_constraint(JSON_OBJECT)
    with suppress(InvalidRequest):
        check_constraint("{")
    load_all()
    limit_memory(memory_bytes, _STACK_BYTES)
    with socket.socket(fileno=sys.stdin.fileno()) as channel:
        # A sandbox of Jinja has been escaped from before.
        limit_powers()
        send(channel, answer_to("json_schema " + JSON_OBJECT, memory_bytes))
        while (work := receive(channel)) is not None:
            signal.setitimer(signal.ITIMER_PROF, cpu_s)
            answer = answer_to(work, memory_bytes)
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            send(channel, answer)


def send(channel: socket.socket, text: str) -> None:
    """Send one message; raises OSError."""
    content = text.encode()
    channel.sendall(len(content).to_bytes(LENGTH_BYTES, "big") + content)


def receive(channel: socket.socket) -> str | None:
    """The next message; None when the other end has closed. Raises OSError, and ValueError for what is no message."""
    head = _exactly(channel, LENGTH_BYTES)
    if head is None:
        return None
    length = int.from_bytes(head, "big")
    if length > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {length} bytes")
    content = _exactly(channel, length)
    return None if content is None else content.decode()


def parse_answer(answer: str) -> Outcome:
    """The outcome that an answer tells. Raises ValueError for what is no answer."""
    match answer[:1]:
        case "+":
            return Outcome(answer[1:])
        case "-":
            return Outcome(reason=answer[1:])
        case "!":
            return Outcome(reason=answer[1:], exceeds_limits=True)
    raise ValueError("a message that is no answer")


def out_of_memory(memory_bytes: int) -> str:
    """The reason for work that exceeds the memory limit."""
    return f"needs more than {memory_bytes >> 20} MiB of memory: make it simpler"


def answer_to(work: str, memory_bytes: int) -> str:
    """Do a piece of work and return the answer to it. Takes any time, and any memory up to that of this process."""
    job, _, content = work.partition(" ")
    try:
        if job in ("chat_template", "template_traits"):
            template = TemplateWork.of_json(content)
            text = template.render() if job == "chat_template" else template.traits()
            text.encode()
            return "+" + text
        check_constraint(content, cast(ConstraintKind, job))
    except InvalidRequest as error:
        return "-" + error.reason.encode(errors="backslashreplace").decode()
    except ConfigError as error:
        return "-" + str(error).encode(errors="backslashreplace").decode()
    except UnicodeEncodeError:
        return "-is not valid UTF-8 when it is rendered"
    except MemoryError:
        return "!" + out_of_memory(memory_bytes)
    return "+"


def _exactly(channel: socket.socket, count: int) -> bytes | None:
    received = bytearray()
    while len(received) < count:
        piece = channel.recv(count - len(received))
        if not piece:
            return None
        received += piece
    return bytes(received)


if __name__ == "__main__":
    main(sys.argv[1:])
