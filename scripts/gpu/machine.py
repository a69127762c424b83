"""What the driver knows of its machine without importing torch: the GPU, the commit, the environment of the stages."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
from datetime import datetime
from pathlib import Path

from gpu.results import Line
from gpu.stage import Device, Size

ROOT = Path(__file__).parents[2]
PACK = ROOT / ".gpu" / "site.tar.xz"
"""The Python packages that scripts/gpu_pack packs for a machine without a package index."""
SITE = ROOT / ".gpu" / "site"
"""Where the pack is unpacked."""

KERNELS = ROOT / "baton" / "runner" / "backends" / "cpu" / "kernels" / "libkernels.so"
KERNELS_LOG = ROOT / ".gpu" / "c-kernels.log"
"""What the compiler says of the C kernels."""


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


def unpack() -> None:
    """Unpack the packages, if this machine has no `.venv` and they are not unpacked yet."""
    if (ROOT / ".venv").exists() or not PACK.exists():
        return
    stamp, packed = SITE / ".unpacked", str(PACK.stat().st_mtime_ns)
    if stamp.exists() and stamp.read_text(encoding="utf-8") == packed:
        return
    shutil.rmtree(SITE, ignore_errors=True)
    with tarfile.open(PACK) as archive:
        archive.extractall(SITE, filter="data")
    stamp.write_text(packed, encoding="utf-8")


def build_kernels() -> subprocess.Popen[bytes] | None:
    """Start to build the C kernels, which installing Baton builds elsewhere; None if they are there."""
    if KERNELS.exists():
        return None
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    # Among the scripts there is one with the name of a package that setuptools imports.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    KERNELS_LOG.parent.mkdir(exist_ok=True)
    with KERNELS_LOG.open("w") as log:
        return subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, process_group=0
        )


def stage_environment(device: Device, size: Size) -> dict[str, str]:
    """The environment of the stages' processes, which import Baton, the scripts and what was packed."""
    paths = [] if (ROOT / ".venv").exists() or not SITE.exists() else [str(SITE)]
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
