"""What the driver of NVIDIA's GPUs says of them, read without touching a GPU: no memory is allocated for it."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from baton.runner.gpu_limits import GpuFacts, GpuProcess

_DRIVER = Path("/proc/driver/nvidia/version")
_DRIVER_VERSION = re.compile(r"\b([0-9]{3,4}\.[0-9.]*[0-9])\b")
_GPUS = "--query-gpu=uuid,name,memory.total,memory.free,compute_mode"
_PROCESSES = "--query-compute-apps=gpu_uuid,pid,process_name,used_memory"
_FORMAT = "--format=csv,noheader,nounits"
_MIB = 1 << 20
_ANSWER_S = 20.0
_MOST_PROCESSES = 8
"""So many are named; more make a message no clearer."""

Ask = Callable[[str], str]
"""Asks the driver's program nvidia-smi, and returns its lines; empty if there is none."""


def driver_version(file: Path = _DRIVER) -> str:
    """The version of the driver that is loaded; empty if there is none, or if it can't be read."""
    try:
        found = _DRIVER_VERSION.search(file.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return ""
    return found[1] if found else ""


def gpus_here(ask: Ask | None = None) -> dict[str, GpuFacts]:
    """The GPUs of this machine with memory of their own, by their UUID; none where nvidia-smi does not answer."""
    ask = ask or _ask
    processes: dict[str, list[GpuProcess]] = {}
    for on, pid, *words, used in _rows(ask(_PROCESSES), 4):
        found = processes.setdefault(on, [])
        if pid.isdecimal() and int(pid) != os.getpid() and len(found) < _MOST_PROCESSES:
            # A name may contain commas.
            found.append(GpuProcess(int(pid), ", ".join(words), _bytes(used)))
    gpus: dict[str, GpuFacts] = {}
    for uuid, name, all_memory, free_memory, mode in _rows(ask(_GPUS), 5):
        total, free = _bytes(all_memory), _bytes(free_memory)
        # Of a GPU that shares the host's memory the driver says nothing.
        if total is not None and free is not None:
            gpus[uuid] = GpuFacts(name, total, free, mode, processes.get(uuid, ()))
    return gpus


def facts_of(device: torch.device, ask: Ask | None = None) -> GpuFacts | None:
    """The facts of one GPU; None if the driver's program does not name it."""
    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    return gpus_here(ask).get(f"GPU-{uuid.removeprefix('GPU-')}")


def _rows(lines: str, least: int) -> list[Sequence[str]]:
    rows = ([cell.strip() for cell in line.split(",")] for line in lines.splitlines())
    return [row for row in rows if len(row) >= least]


def _bytes(mebibytes: str) -> int | None:
    """A number of MiB; None for what the driver writes instead of one: [N/A]."""
    return int(mebibytes) * _MIB if mebibytes.isdecimal() else None


def _ask(query: str) -> str:
    try:
        done = subprocess.run(
            ["nvidia-smi", query, _FORMAT], capture_output=True, text=True, timeout=_ANSWER_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout
