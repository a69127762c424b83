"""What the driver knows of its machine without importing torch: the GPU, the commit, the environment of the stages."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from datetime import datetime
from pathlib import Path

from gpu.results import Line
from gpu.stage import Device, Size

ROOT = Path(__file__).parents[2]
SITE = ROOT / ".gpu" / "site"
"""Where the packed packages are unpacked."""


def card() -> str | None:
    """The name of the first GPU, or None without one."""
    answer = _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    return answer.splitlines()[0].strip() if answer else None


def default_results(device: Device, name: str | None, now: datetime) -> Path:
    """Figures of a card stay in the repository; those of a CPU mean nothing."""
    if device == "cpu" or name is None:
        return ROOT / ".gpu" / "cpu.jsonl"
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower().removeprefix("nvidia")).strip("-")
    return ROOT / "docs" / "performance" / "gpu" / f"{slug}-{now:%Y-%m-%d}.jsonl"


def describe(device: Device, size: Size, name: str | None, now: datetime) -> Line:
    """What the first line of a run says."""
    return {
        "device": device,
        "size": size,
        "card": name,
        "date": f"{now:%Y-%m-%d}",
        "python": platform.python_version(),
        "commit": _output("git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"),
    }


def stage_environment(device: Device, size: Size) -> dict[str, str]:
    """The environment of the stages' processes, which import Baton, the scripts and what was packed."""
    paths = [str(SITE)] if SITE.exists() else []
    paths += [str(ROOT), str(ROOT / "scripts"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    if device == "cpu":
        environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    return environment


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None
