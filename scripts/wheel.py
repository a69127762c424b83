"""Builds the wheel from what a commit of this checkout would have, checks what is in it, and tries it.

Run by scripts/wheel. The same commit and compiler give the same bytes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIBRARY = "baton/runner/backends/cpu/kernels/libkernels.so"
NEEDED = (
    LIBRARY,
    "baton/py.typed",
    "baton/demo_model/model.safetensors",
    "baton/demo_model/tokenizer.json",
    "baton/bench/report/page.css",
    "baton/bench/report/page.js",
    "baton/cli/cluster/emit/baton.sbatch",
    "router/http/pages/chat.html",
    "router/http/pages/chat_page/page.css",
    "router/http/pages/chat_page/page.js",
    "router/http/pages/docs.html",
    "router/http/pages/live.html",
)
"""Files besides Python's that must be in the wheel."""
PACKAGES = frozenset({"baton", "router", "prefill_node", "decode_node", "kv_transfer"})
PYTHONS = ("3.11", "3.12", "3.13")
COMMANDS = (("version",), ("doctor",), ("demo",))
_DOCTOR_WARNS = 1


def build(directory: Path) -> Path:
    """Build the wheel into the directory; return its path. Raises SystemExit when it lacks a part."""
    with tempfile.TemporaryDirectory(prefix="baton-wheel-") as temporary:
        source, built = Path(temporary, "source"), Path(temporary, "built")
        copy_tracked(source)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps"]
        # Offline: setuptools is in this environment.
        command = [*pip, "--no-build-isolation", "--wheel-dir", str(built), str(source)]
        subprocess.run(command, env={"SOURCE_DATE_EPOCH": commit_time(), **os.environ}, check=True)
        (wheel,) = built.glob("*.whl")
        if problems := list(problems_of(wheel)):
            sys.exit(f"scripts/wheel: {wheel.name}: {'; '.join(problems)}")
        directory.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(wheel, directory))


def commit_time() -> str:
    """The time of the last commit, in seconds, which all files in the wheel get: that of a build would differ."""
    return subprocess.run(
        ["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def copy_tracked(target: Path) -> None:
    """Copy what a commit of this checkout would have, so that no file that was built earlier gets into the wheel."""
    listed = subprocess.run(
        [
            "git",
            "ls-files",
            "-z",
            "-co",
            "--exclude-standard",
            *sorted(PACKAGES),
            "setup.py",
            "*.toml",
            "*.md",
            "LICENSE",
        ],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def problems_of(wheel: Path) -> Iterator[str]:
    """What is wrong with the content or the name of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    yield from (f"{name} is missing" for name in NEEDED if name not in names)
    folders = {name.split("/")[0] for name in names} - PACKAGES
    yield from (f"{name} does not belong into it" for name in folders if not name.endswith(".dist-info"))
    python, abi, platform = wheel.stem.split("-")[-3:]
    if (python, abi) != ("py3", "none") or (sys.platform == "linux" and not platform.startswith("manylinux_")):
        yield "its tag is neither py3-none nor manylinux"


def try_with(version: str, wheel: Path) -> str:
    """Install the wheel for this version of Python, run its commands, and say how that went."""
    python = shutil.which(f"python{version}")
    asked = subprocess.run([python, "--version"], capture_output=True, check=False) if python else None
    if python is None or asked is None or asked.returncode:
        return "skipped: it is not installed here"
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="baton-try-") as temporary:
        folder = Path(temporary)
        subprocess.run([python, "-m", "venv", str(folder / "env")], check=True)
        pip = [str(folder / "env/bin/python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        pip += ["--no-compile", "--only-binary", ":all:", "-c", str(ROOT / "constraints.txt")]
        torch = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
        for wanted in (torch, str(wheel)):
            if subprocess.run([*pip, wanted], check=False).returncode:
                return f"failed: {Path(wanted).name} can't be installed from wheels alone (above is why)"
        installed_s = time.monotonic() - started
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("BATON_", "PYTHON"))}
        for words in COMMANDS:
            command = [str(folder / "env/bin/baton"), *words]
            code = subprocess.run(
                command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, check=False
            ).returncode
            if code and not (words == ("doctor",) and code == _DOCTOR_WARNS):
                return f"failed: baton {' '.join(words)} ended with {code}"
    return f"passed: installed in {installed_s:.0f} s, all in {time.monotonic() - started:.0f} s"


def main() -> int:
    """Build, and try if asked to. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="scripts/wheel", description=__doc__)
    parser.add_argument("directory", nargs="?", type=Path, default=ROOT / "dist")
    parser.add_argument("--try", dest="tried", action="store_true", help="install it in new environments, and run it")
    arguments = parser.parse_args()
    wheel = build(arguments.directory)
    print(f"{wheel} ({wheel.stat().st_size >> 20} MiB)", flush=True)
    verdicts = {version: try_with(version, wheel) for version in PYTHONS} if arguments.tried else {}
    for version, verdict in verdicts.items():
        print(f"Python {version}: {verdict}")
    return int(any(verdict.startswith("failed") for verdict in verdicts.values()))


if __name__ == "__main__":
    sys.exit(main())
