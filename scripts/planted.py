"""Plants known faults in a copy of the code, one by one, and says which of them the tests notice.

A fault of `tests/planted/*.toml` replaces a piece of text that occurs exactly once in the product, and names the tests
that notice it. So a test may be cut or merged as long as all faults are still found. Texts rather than patches, since
they stay valid when code moves to another file (docs/decisions/0065).

The working tree is copied, so a run changes nothing in it and may be interrupted. First the named tests must pass
without any fault. Exits with 0 if all faults were noticed, and with 1 otherwise.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FAULTS = ROOT / "tests/planted"
PRODUCT = ("baton", "router", "prefill_node", "decode_node", "kv_transfer")
_MARK = "BATON_PLANTED"
KERNELS = Path("baton/runner/backends/cpu/kernels")
BOUND_S = 900.0
"""The longest run of a fault's tests. One that hangs has its own time limit in pytest, which is much shorter."""
FAILED, PASSED = 1, 0
"""What pytest exits with after a run in which a test failed, or none did. Other numbers mean that no test ran."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A piece of the product's text, what replaces it, and which tests then fail."""

    name: str
    old: str
    new: str
    tests: Sequence[str]
    """Arguments of pytest: files, or ids of tests."""
    cpu_flag: str = ""
    """The flag of processors that run this text, as /proc/cpuinfo names it; empty: all do."""


class Unusable(Exception):
    """A fault that can't be planted, or tests that say nothing about it."""


def read_faults(folder: Path = FAULTS) -> list[Fault]:
    """All faults, in the order of their files. Raises Unusable if two have one name or one lacks a field."""
    faults: list[Fault] = []
    for file in sorted(folder.glob("*.toml")):
        for entry in tomllib.loads(file.read_text())["fault"]:
            try:
                faults.append(Fault(**entry))
            except TypeError as error:
                raise Unusable(f"{file.name}: {entry.get('name', '?')}: {error}") from None
    names = [fault.name for fault in faults]
    if twice := {name for name in names if names.count(name) > 1}:
        raise Unusable(f"several faults are called {', '.join(sorted(twice))}")
    return faults


def sources(root: Path) -> dict[Path, str]:
    """The text of each source file of the product, by its path in `root`."""
    files = (file for top in PRODUCT for file in sorted((root / top).rglob("*")) if file.suffix in {".py", ".c", ".h"})
    return {file.relative_to(root): file.read_text() for file in files if "v1" not in file.parts}


def place_of(fault: Fault, texts: dict[Path, str]) -> Path:
    """The one file that has the fault's old text. Raises Unusable if it occurs nowhere or several times."""
    counts = {file: text.count(fault.old) for file, text in texts.items() if fault.old in text}
    if sum(counts.values()) != 1:
        where = ", ".join(map(str, counts)) or "no file"
        raise Unusable(f"{fault.name}: its old text occurs {sum(counts.values())} times, in {where}")
    return next(iter(counts))


@contextmanager
def copied_tree() -> Iterator[Path]:
    """A copy of the working tree, whose `.venv` has this one's packages but the copy's code."""
    with tempfile.TemporaryDirectory(prefix="baton-planted-") as name:
        copy = Path(name) / "baton"
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        for path in subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0"):
            if path and (ROOT / path).is_file():
                (copy / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / path, copy / path)
        for library in (ROOT / KERNELS).glob("*.so"):
            shutil.copy2(library, copy / KERNELS)
        if (shared := ROOT.parent / "shared").is_dir():
            (copy.parent / "shared").symlink_to(shared)
        _make_environment(copy)
        yield copy


def _make_environment(copy: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", copy / ".venv"], check=True)
    ours, theirs = Path(sys.prefix), copy / ".venv"
    packages = next((ours / "lib").glob("python3*/site-packages"))
    # The copy's own code comes before the code to which the packages' editable installation leads.
    paths = f"{copy}\nimport site; site.addsitedir({str(packages)!r})\n"
    (theirs / packages.relative_to(ours) / "copy.pth").write_text(paths)
    for program in (ours / "bin").iterdir():
        here = theirs / "bin" / program.name
        if here.exists() or not program.is_file():
            continue
        if program.read_bytes().startswith(b"#!"):
            here.write_text(program.read_text().replace(str(ours), str(theirs)))
            here.chmod(0o755)
        else:
            here.symlink_to(program)
    shutil.copy2(ours / ".baton-setup", theirs)


def run_tests(copy: Path, tests: Sequence[str], *more: str) -> tuple[int, str]:
    """Run tests of the copy; returns pytest's exit status and output. Raises Unusable if they don't end."""
    command = [
        str(copy / ".venv/bin/python"),
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--no-header",
        *more,
        *tests,
    ]
    mark = f"{_MARK}={secrets.token_hex(8)}"
    environment = os.environ | dict([mark.split("=")])
    # Ctrl-C reaches pytest as well, which ends what its tests have started.
    try:
        with subprocess.Popen(
            command, cwd=copy, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            try:
                output, _ = process.communicate(timeout=BOUND_S)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)
                process.communicate()
                raise Unusable(f"{' '.join(tests)}: not over after {BOUND_S:g} s") from None
    finally:
        _end_marked(mark)
    return process.returncode, output


def _end_marked(mark: str) -> None:
    """Kill the processes that have this variable: a fault may keep its tests from ending what they start."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark.encode() in (process / "environ").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGKILL)


def build_kernels(copy: Path) -> None:
    """Compile the copy's C kernels. Raises Unusable if they are wrong C."""
    command = [str(copy / ".venv/bin/python"), "setup.py", "--quiet", "build_ext", "--inplace"]
    built = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)
    if built.returncode:
        raise Unusable(f"the kernels do not compile: {built.stderr[-2000:]}")


def noticed(copy: Path, fault: Fault, texts: dict[Path, str]) -> str:
    """Plant one fault, run its tests, and take it out again. Returns the first test that failed; empty if none did."""
    file = place_of(fault, texts)
    is_kernel = file.is_relative_to(KERNELS / "csrc")
    try:
        (copy / file).write_text(texts[file].replace(fault.old, fault.new))
        if is_kernel:
            build_kernels(copy)
        status, output = run_tests(copy, fault.tests, "-x")
    finally:
        (copy / file).write_text(texts[file])
        if is_kernel:
            for library in (ROOT / KERNELS).glob("*.so"):
                shutil.copy2(library, copy / KERNELS)
    if status < 0:  # as a worker that crashes makes a run fail
        return f"signal {-status} ended the tests"
    if status not in {FAILED, PASSED}:
        raise Unusable(f"{fault.name}: pytest exits with {status}:\n{output[-2000:]}")
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    return failed[1] if failed and status == FAILED else ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/planted", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="only faults whose names contain one of these words")
    parser.add_argument("--check", action="store_true", help="only see whether each fault can still be planted")
    chosen = parser.parse_args()
    try:
        faults = [f for f in read_faults() if not chosen.names or any(word in f.name for word in chosen.names)]
        texts = sources(ROOT)
        for fault in faults:
            place_of(fault, texts)
            if missing := [test for test in fault.tests if not (ROOT / test.partition("::")[0]).exists()]:
                raise Unusable(f"{fault.name}: there is no {', '.join(missing)}")
        return 0 if chosen.check else _run(faults, texts)
    except Unusable as error:
        print(f"scripts/planted: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _run(faults: Sequence[Fault], texts: dict[Path, str]) -> int:
    missed, num_run = [], len(faults)
    with copied_tree() as copy:
        status, output = run_tests(copy, sorted({test for fault in faults for test in fault.tests}), "-n", "2")
        if status != PASSED:
            raise Unusable(f"the tests fail without any fault:\n{output[-4000:]}")
        flags = Path("/proc/cpuinfo").read_text().split()
        for fault in faults:
            if fault.cpu_flag and fault.cpu_flag not in flags:
                print(f"not run, since this processor has no {fault.cpu_flag}: {fault.name}", flush=True)
                num_run -= 1
                continue
            began = time.monotonic()
            try:
                tests = noticed(copy, fault, texts)
                took = time.monotonic() - began
                print(
                    f"noticed {took:6.1f} s  {fault.name}: {tests}" if tests else f"MISSED   {fault.name}", flush=True
                )
            except Unusable as error:
                tests = ""
                print(f"UNUSABLE {error}", flush=True)
            if not tests:
                missed.append(fault.name)
    print(f"{num_run - len(missed)} of {num_run} faults were noticed")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
