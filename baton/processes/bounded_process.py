"""Limits that a child process for untrusted work puts on itself, and the environment that its parent gives it."""

from __future__ import annotations

import os
import resource
import sys

_KEPT_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "SYSTEMROOT")
"""Environment variables that children inherit. The others may hold secrets, and the work needs none of them."""


def child_environment() -> dict[str, str]:
    """The environment of a child process, which imports what its parent can."""
    kept = {name: os.environ[name] for name in _KEPT_ENVIRONMENT if name in os.environ}
    return {**kept, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}


def limit_memory(more_bytes: int, stack_bytes: int) -> None:
    """Limit the stack, and the further memory of this process to `more_bytes`, and write no core file."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    resource.setrlimit(resource.RLIMIT_STACK, (stack_bytes, hard))
    if not sys.platform.startswith("linux"):
        return
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + more_bytes, size + more_bytes))


def limit_powers() -> None:
    """Let this process open no file or connection, write to no file, and start no other process, except as root.

    Root's processes may fork whatever the limit, but load no program, since its files can't be opened.
    What gets out of a sandbox or takes a decoder over finds no key, no weights and no network here.
    """
    for kind, most in ((resource.RLIMIT_NOFILE, 0), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_NPROC, 0)):
        resource.setrlimit(kind, (most, most))
