"""Metrics of a process from the kernel and the event loop, such as memory and descriptors: leaks show here first."""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Iterator
from pathlib import Path

from baton.background import current_watch
from baton.observe.loop_probe import ProbedEventLoop
from baton.observe.metrics import Distribution, Figure, by_label
from baton.processes.process_stat import process_stat

_PROC = Path("/proc/self")
_RESIDENT = 1
"""Position in /proc/self/statm of the resident memory in pages (proc_pid_statm(5))."""


def process_figures() -> Iterator[Figure | Distribution]:
    """The metrics of this process; call it on the event loop. Without /proc there are only those of the event loop."""
    loop = asyncio.get_running_loop()
    tasks = len(asyncio.all_tasks(loop))
    yield Figure("event_loop_tasks", "Tasks of the event loop that have not ended.", tasks, {})
    if isinstance(loop, ProbedEventLoop):
        yield from loop.probe.figures()
    faults = current_watch.get().faults
    yield from by_label("background_faults_total", "Background tasks that raised, by kind.", "kind", faults)
    if _PROC.is_dir():
        yield from _kernel_figures()


def resident_bytes() -> int:
    """Bytes of memory of this process that are in use and not swapped out; 0 on a system without /proc."""
    try:
        fields = (_PROC / "statm").read_text().split()
    except OSError:
        return 0
    return int(fields[_RESIDENT]) * resource.getpagesize()


def _kernel_figures() -> Iterator[Figure]:
    stat = process_stat(os.getpid())
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    # One descriptor is that of the directory that is being read.
    descriptors = len(os.listdir(_PROC / "fd")) - 1
    for name, text, value in (
        ("process_cpu_seconds_total", "Processor time of all threads.", stat.cpu_s),
        ("process_resident_memory_bytes", "Memory that is in use and not swapped out.", resident_bytes()),
        ("process_open_fds", "Open file descriptors.", descriptors),
        ("process_max_fds", "How many file descriptors may be open.", soft_limit),
        ("process_threads", "Threads.", stat.num_threads),
    ):
        yield Figure(name, text, value, {})
