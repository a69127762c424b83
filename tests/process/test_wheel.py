"""The wheel: what is in it, its tag, and that it runs from a folder of its own, without the checkout's scripts."""

from __future__ import annotations

import email
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.process.shell import ROOT, Shell

pytestmark = pytest.mark.timeout(400)
LIBRARY = "baton/runner/backends/cpu/kernels/libkernels.so"
COMPILER = f"{sys.executable} {ROOT / 'tests/support/compiled_already.py'} {os.environ.get('CC', 'cc')}"
"""The same sources were compiled when this checkout was set up; again they would take half a minute."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("dist")
    command = [sys.executable, str(ROOT / "scripts" / "wheel.py"), str(directory)]
    done = subprocess.run(command, env=os.environ | {"CC": COMPILER}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = directory.iterdir()
    assert str(built) in done.stdout
    return built


def test_the_wheel_has_all_parts_and_an_honest_tag(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        times = {entry.date_time for entry in archive.infolist()}
        library = archive.read(LIBRARY)
        (info,) = (name.split("/")[0] for name in names if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(f"{info}/METADATA"))
        tag = email.message_from_bytes(archive.read(f"{info}/WHEEL"))["Tag"]
    for isa in (b"avx2", b"avx512", b"amx", b"portable"):
        assert isa in library, f"the library has no kernels of {isa.decode()}"
    packages = {"baton", "router", "prefill_node", "decode_node", "kv_transfer", info}
    assert {name.split("/")[0] for name in names} == packages
    assert len(times) == 1, "two builds of a commit would differ"
    for name in ("baton/py.typed", "router/http/pages/live.html", "baton/demo_model/model.safetensors"):
        assert name in names
    assert not [name for name in names if "test_" in name or name.endswith(".pyc")]
    assert f"-{tag}.whl" in wheel.name
    assert metadata["Requires-Python"] == ">=3.11"
    assert "download.pytorch.org/whl/cpu" in str(metadata.get_payload())
    # Each version of a symbol of glibc that the library needs is one of the platform's in the tag, or older.
    platform = re.fullmatch(r"py3-none-manylinux_2_(\d+)_x86_64", tag)
    assert platform is not None
    used = {int(minor) for minor in re.findall(rb"GLIBC_2\.(\d+)", library)}
    assert max(used) == int(platform[1])


def test_the_installed_wheel_runs_the_doctor_and_the_demo(shell: Shell, wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "installed"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-deps", "--no-index"]
    # The dependencies are those of this environment.
    done = shell.run([*pip, "--no-compile", "--target", str(target), str(wheel)])
    assert done.returncode == 0, done.stderr
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = {"PYTHONPATH": str(target), "TMPDIR": str(temporary)}
    program = "import sys, baton; print(baton.__file__); from baton.cli.main import main; sys.exit(main(sys.argv[1:]))"
    # The demo loads the model.
    doctor = ["doctor", "--model", str(tmp_path / "nowhere"), "-o", "json"]
    seen = shell.run([sys.executable, "-c", program, *doctor], environment)
    file, _, report = seen.stdout.partition("\n")
    assert file == str(target / "baton/__init__.py"), seen
    levels = {check["check"]: check["status"] for check in json.loads(report)["checks"]}
    assert [levels[name] for name in ("kernels", "redis", "nixl", "versions")] == ["OK"] * 4, report
    demo = shell.run([sys.executable, "-m", "baton.cli.main", "demo"], environment)
    assert (demo.returncode, demo.stderr) == (0, "")
    lines = demo.stdout.splitlines()
    table = next(number for number, line in enumerate(lines) if line.startswith("PROMPT"))
    assert all("  prefill-0  " in line and "  decode-0  " in line for line in lines[table + 1 : table + 5])
    assert all(len(line) <= 80 for line in lines[table : table + 5])
    assert lines[-1] == "All processes are stopped."
    assert not list(temporary.glob("baton-demo-*"))
    shell.assert_nothing_left()
