"""Hardware of this machine, read from Linux. What can't be read is zero or empty."""

from __future__ import annotations

import os
import re
from pathlib import Path

_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def available_memory(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Bytes that a new process could use without swapping."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB$", _text(meminfo), re.MULTILINE)
    return int(match[1]) << 10 if match else 0


def last_level_cache(cpu: Path = Path("/sys/devices/system/cpu/cpu0")) -> int:
    """Bytes of the largest cache."""
    sizes = [re.fullmatch(r"(\d+)([KMG]?)\s*", _text(path)) for path in cpu.glob("cache/index*/size")]
    return max((int(size[1]) * _UNITS.get(size[2], 1) for size in sizes if size), default=0)


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name."""
    match = re.search(r"^model name\s*:\s*(.+)$", _text(cpuinfo), re.MULTILINE)
    return match[1].strip() if match else ""


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def set_compute_threads(threads: int) -> None:
    """Makes this process compute with as many threads as a node does; call it before anything loads torch."""
    os.environ["OMP_NUM_THREADS"] = str(threads)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
