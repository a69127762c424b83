"""Packs what a GPU machine without a package index lacks, and compiles Baton's GPU kernels here.

`.gpu/site.tar.xz` holds the Python packages that Baton and its tests need and the machine lacks, for its version of
Python, the built C kernels and the name of the commit: carry it along with the working tree, and `scripts/gpu_check`
unpacks it there. `.gpu/kernels.jsonl` says which registers, spills and matrix instructions the GPU kernels have, and
which don't compile.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Final

from packaging.utils import canonicalize_name, parse_wheel_filename

from gpu.machine import COMMIT, KERNELS, PACK, PACKED, ROOT, commit, name_of_packed_kernels
from gpu.nixl_parts import needed_parts
from gpu.packages import Machine, missing_packages, read_machine

WHEELS = ROOT / ".gpu" / "wheels"
FINDINGS = ROOT / ".gpu" / "kernels.jsonl"
LIMIT_MIB = 36
"""The pack and the working tree, of 26 MiB, must travel within 64 MiB."""
PRESET: Final = 1
"""The preset of xz. A higher one takes several times as long, for a tenth less."""
_GLIBC = range(17, 40)
_ABIS = ("abi3", "none")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-kernels", action="store_true", help="pack only")
    parser.add_argument("--no-packages", action="store_true", help="compile kernels only")
    arguments = parser.parse_args()
    machine = read_machine()
    if not arguments.no_packages:
        started = time.monotonic()
        missing = missing_packages(ROOT / "pyproject.toml", machine)
        _download(missing, machine)
        mib = _pack(missing) / (1 << 20)
        print(f"{PACK}: {len(missing)} packages, {mib:.1f} MiB, {time.monotonic() - started:.0f} s", flush=True)
        if mib > LIMIT_MIB:
            sys.exit(f"scripts/gpu_pack: {PACK} is larger than {LIMIT_MIB} MiB: it may not fit with the working tree")
    if not arguments.no_kernels:
        sys.exit(_compile_kernels(machine))


def _download(packages: Mapping[str, str], machine: Machine) -> None:
    """Make WHEELS hold the wheels of exactly these packages."""
    WHEELS.mkdir(parents=True, exist_ok=True)
    here = {}
    for path in WHEELS.glob("*.whl"):
        name, version, _, _ = parse_wheel_filename(path.name)
        if packages.get(canonicalize_name(name)) == str(version):
            here[canonicalize_name(name)] = path
        else:
            path.unlink()
    lacking = [f"{name}=={version}" for name, version in packages.items() if name not in here]
    if lacking:
        _pip(machine, WHEELS, "download", "--dest", str(WHEELS), *lacking)


def _pip(machine: Machine, folder: Path, verb: str, *arguments: str) -> None:
    """Run pip for the machine's Python and platform, whatever they are here. It takes nothing but wheels."""
    abis = (f"cp{machine.python.replace('.', '')}", *_ABIS)
    platforms = [*(f"manylinux_2_{minor}_x86_64" for minor in _GLIBC), "manylinux2014_x86_64", "linux_x86_64"]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", verb, "--no-deps"]
    command += ["--only-binary=:all:", "--python-version", machine.python, "--implementation", "cp"]
    command += [word for abi in abis for word in ("--abi", abi)]
    command += [word for platform in platforms for word in ("--platform", platform)]
    subprocess.run([*command, *arguments], check=True)


def _pack(packages: Mapping[str, str]) -> int:
    """Write PACK, and return its size in bytes. The same wheels, kernels and commit give the same archive."""
    if not KERNELS.exists():
        sys.exit(f"scripts/gpu_pack: there is no {KERNELS}: the C compiler failed when Baton was installed here")
    unfinished = PACK.with_suffix(".unfinished")
    with tarfile.open(unfinished, "w:xz", preset=PRESET) as archive:
        for path in sorted(WHEELS.glob("*.whl")):
            with zipfile.ZipFile(path) as wheel:
                names = [name for name in wheel.namelist() if not name.endswith("/")]
                kept = needed_parts(wheel) if path.name.startswith("nixl_cu") else set(names)
                for name in sorted(kept):
                    _add(archive, _place(name), wheel.read(name), wheel.getinfo(name).external_attr >> 16)
        _add(archive, f"{PACKED}/{name_of_packed_kernels()}", KERNELS.read_bytes(), 0o755)
        _add(archive, f"{PACKED}/{COMMIT}", (commit() or "unknown").encode(), 0o644)
    os.replace(unfinished, PACK)
    return PACK.stat().st_size


def _place(name: str) -> str | None:
    """Where a wheel's file is installed, under the folder of packages; None for what isn't installed there."""
    parts = PurePosixPath(name).parts
    if not parts[0].endswith(".data"):
        return name
    return "/".join(parts[2:]) if parts[1] in ("purelib", "platlib") else None


def _add(archive: tarfile.TarFile, name: str | None, content: bytes, mode: int) -> None:
    if name is None:
        return
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), 0o755 if mode & 0o100 else 0o644
    archive.addfile(entry, io.BytesIO(content))


def _compile_kernels(machine: Machine) -> int:
    """Compile with the machine's release of Triton, in a process that finds it first; return the exit status."""
    release = machine.versions["triton"]
    folder = ROOT / ".gpu" / f"triton-{release}"
    if not folder.exists():
        tag = f"{sys.version_info.major}.{sys.version_info.minor}"
        here = Machine(tag, machine.versions)
        _pip(here, folder, "install", "--target", str(folder), f"triton=={release}")
    # The kernels are compiled, not interpreted.
    environment = {name: value for name, value in os.environ.items() if not re.match("TRITON_", name)}
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), str(ROOT), str(ROOT / "scripts")])
    environment["TRITON_CACHE_DIR"] = str(ROOT / ".gpu" / "triton-cache")
    command = [sys.executable, "-m", "gpu.compile_kernels", str(FINDINGS)]
    return subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    main()
