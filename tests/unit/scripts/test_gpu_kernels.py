"""The record of what GPU kernels need: it is of these sources, nothing is spilled, and a compiler agrees with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.load_script import SCRIPTS, load_script

record = load_script("gpu/kernel_record")
COMPILED_HERE = ("product in tiles of 128 x 128", "normed heads of 128")
"""A second for each; scripts/gpu_kernels compiles all."""


def test_the_record_is_of_these_sources() -> None:
    about, needs = record.parse(record.RECORD.read_text(encoding="utf-8"))
    assert about["sources"] == record.digest_of_sources(), "run scripts/gpu_kernels"
    assert {need.capability for need in needs} == set(record.CAPABILITIES)


def test_nothing_is_spilled_and_shared_memory_suffices() -> None:
    needs = record.parse(record.RECORD.read_text(encoding="utf-8"))[1]
    assert [need for need in needs if need.stack_bytes] == []
    assert [need for need in needs if need.shared_bytes > record.SHARED_BYTES[need.capability]] == []


@pytest.mark.triton
def test_kernels_compile_to_what_is_recorded() -> None:
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    if triton.__version__ != record.parse(record.RECORD.read_text(encoding="utf-8"))[0]["Triton"]:
        pytest.skip("another release of Triton than that of the record")
    cases = [word for case in COMPILED_HERE for word in ("--case", case)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPTS / "gpu_kernels.py"), "--check", *cases]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_comments_change_no_digest(tmp_path: Path) -> None:
    folder = tmp_path / "baton/runner/backends/cuda"
    folder.mkdir(parents=True)
    digests = []
    for text in ("x = 1\n", "# why\nx  =  1\n'Which.'\n", "x = 2\n"):
        (folder / "triton_x.py").write_text(text)
        digests.append(record.digest_of_sources(tmp_path))
    assert digests[0] == digests[1] != digests[2]


def test_a_record_is_read_as_it_was_written() -> None:
    needs = [
        record.Need(90, 255, 0, 147456, 8, "_product", "product, gated, of 2048"),
        record.Need(80, 24, 8, 0, 4, "_heads", "rotation"),
    ]
    about, read = record.parse(record.render(needs, "3.7.1", "c0ffee"))
    assert (about, read) == ({"Triton": "3.7.1", "sources": "c0ffee"}, needs)
