"""What the driver knows of its machine without importing torch: the GPU, the commit, the environment of the stages."""

from __future__ import annotations

import ctypes
import hashlib
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
"""The Python packages, and more, that scripts/gpu_pack packs for a machine without a package index."""
SITE = ROOT / ".gpu" / "site"
"""Where the pack is unpacked."""

KERNELS = ROOT / "baton" / "runner" / "backends" / "cpu" / "kernels" / "libkernels.so"
PACKED = "packed"
"""The folder of the pack with what is no Python package: the C kernels, and the file COMMIT."""
COMMIT = "commit"
DRIVER = Path("/dev/nvidiactl")
"""A device file that exists where the driver of a GPU is loaded."""
SMI_S = 60.0
"""The first call of nvidia-smi may have to wake the driver."""
KERNELS_LOG = ROOT / ".gpu" / "c-kernels.log"
"""What the compiler says of the C kernels."""


class NoAnswer(Exception):
    """There is a GPU's driver, but nvidia-smi names no GPU."""


def card(driver: Path = DRIVER) -> str | None:
    """The name of the first GPU, or None without one. Raises NoAnswer, since a GPU that is paid for may be broken."""
    answer = _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader", seconds=SMI_S)
    if answer is None and driver.exists():
        raise NoAnswer(f"nvidia-smi fails, or names no GPU within {SMI_S:.0f} s, and there is {driver}")
    return answer.splitlines()[0].strip() if answer else None


def commit() -> str | None:
    """The commit of this checkout, marked if files differ from it, or else the one that was packed."""
    # Git takes a checkout of another user, as one that was copied here, only if it is named.
    git = ("git", "-c", "core.abbrev=12", "-c", f"safe.directory={ROOT}", "-C", str(ROOT))
    packed = SITE / PACKED / COMMIT
    if (ROOT / ".git").exists() and (described := _output(*git, "describe", "--always", "--exclude=*", "--dirty")):
        return described
    return f"{packed.read_text(encoding='utf-8')} (when packed)" if packed.exists() else None


def name_of_packed_kernels() -> str:
    """The name in the pack of the C kernels of the sources here: those of other sources have another one."""
    digest = hashlib.sha256()
    for path in sorted((KERNELS.parent / "csrc").iterdir()):
        digest.update(path.read_bytes())
    return f"libkernels-{digest.hexdigest()[:16]}.so"


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
        "commit": commit(),
    }


def unpack() -> None:
    """Unpack what was packed, if this machine has no `.venv` and it is not unpacked yet."""
    if (ROOT / ".venv").exists() or not PACK.exists():
        return
    stamp, packed = SITE / ".unpacked", str(PACK.stat().st_mtime_ns)
    if stamp.exists() and stamp.read_text(encoding="utf-8") == packed:
        return
    shutil.rmtree(SITE, ignore_errors=True)
    with tarfile.open(PACK) as archive:
        archive.extractall(SITE, filter="data")
    kernels = SITE / PACKED / name_of_packed_kernels()
    if kernels.exists() and not KERNELS.exists() and _is_loadable(kernels):
        shutil.copy(kernels, KERNELS)
    stamp.write_text(packed, encoding="utf-8")


def _is_loadable(library: Path) -> bool:
    """Whether this machine's glibc is young enough for a library."""
    try:
        ctypes.CDLL(str(library))
    except OSError:
        return False
    return True


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


def _output(*command: str, seconds: float = 20.0) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=seconds)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
