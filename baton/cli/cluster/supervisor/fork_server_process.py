"""The process of the fork server: `python -m baton.cli.cluster.supervisor.fork_server_process DESCRIPTOR ROOM`.

Only `ForkServer` starts it. ROOM is a text as long as the longest command line that a forked process shows.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from baton.cli.cluster.supervisor.fork_server import LOADED
from baton.cli.cluster.supervisor.parent import die_with_parent
from baton.cli.cluster.supervisor.plan import flags_of_descriptors, words_of
from baton.cli.main import main as run_command
from baton.runner.lean_imports import import_transformers
from baton.runner.rare_collections import rare_collections

_PRELOADED = (
    "baton.cli.commands.processes",
    "baton.node.process",
    "baton.runner.loading",
    "decode_node.app",
    "prefill_node.app",
    # What the modules of most models import, and what torch does where it computes without memory.
    "torch.fx.experimental.symbolic_shapes",
    "transformers.models.llama.modeling_llama",
)
_MAX_REQUEST = 1 << 17


def main(arguments: Sequence[str]) -> int:
    """Import, then fork on request until the supervisor is gone. Returns the exit code: in a forked process that of its
    command.
    """
    supervisor = os.getppid()
    channel = socket.socket(fileno=int(arguments[0]))
    show_command(["baton", "fork-server"])
    with rare_collections():
        import_transformers()
        for name in _PRELOADED:
            importlib.import_module(name)
    # A collection would write to each object, and so copy pages that forked processes share.
    gc.collect()
    gc.freeze()
    channel.send(LOADED)
    while True:
        request, descriptors, _flags, _address = socket.recv_fds(channel, _MAX_REQUEST, 3)
        if not request:
            return 0
        command = json.loads(request)
        if _fork(supervisor, lambda pid: channel.send(str(pid).encode())):
            channel.close()
            return _run(command, *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _fork(supervisor: int, tell: Callable[[int], object]) -> bool:
    """Start a process whose parent is the supervisor, and `tell` its id; returns whether this is the new process.

    It goes on only once its id was told, so none runs of which the supervisor does not know.
    """
    pid_read, pid_write = os.pipe()
    go_read, go_write = os.pipe()
    between = os.fork()
    if between == 0:
        pid = os.fork()
        if pid != 0:
            os.write(pid_write, str(pid).encode())
            os._exit(0)
        for descriptor in (pid_read, pid_write, go_write):
            os.close(descriptor)
        # The kernel kills this process with its parent, so the parent has to be the supervisor by now.
        told = os.read(go_read, 1)
        die_with_parent()
        if not told or os.getppid() != supervisor:
            os._exit(1)
        os.close(go_read)
        os.setsid()
        return True
    # If the process between can't fork, the pipe has to end.
    os.close(pid_write)
    pid = int(os.read(pid_read, 20))
    os.waitpid(between, 0)
    tell(pid)
    os.write(go_write, b".")
    for descriptor in (pid_read, go_read, go_write):
        os.close(descriptor)
    return False


def _run(command: Sequence[str], output: int, notify: int, parent: int) -> int:
    """Run a planned command in this process, as if it had been started as a program; returns the exit code."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    command = [*command, *flags_of_descriptors(notify, parent)]
    show_command(command)
    return run_command(words_of(command))


def show_command(words: Sequence[str]) -> None:
    """Let `ps` show another command line, cut to the length of the one with which the process was started.

    The kernel reads it from the process's memory, whose addresses /proc/self/stat has (proc(5), arg_start, arg_end).
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    text = b"\0".join(word.encode() for word in words)[: end - start - 1]
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
