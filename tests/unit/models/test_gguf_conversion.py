"""The process that converts a GGUF file: its reasons, its end, and a full disk."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from baton.errors import ConfigError
from baton.models.resolve import convert_in_child, find_model


def test_a_file_without_a_sound_header_is_refused_before_a_converter_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/program")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"bad\.gguf is not a sound GGUF file: its header ends before byte 8"):
        find_model(tmp_path / "bad.gguf", {"XDG_CACHE_HOME": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"missing\.gguf can't be read: No such file"):
        find_model(tmp_path / "missing.gguf", {"XDG_CACHE_HOME": str(tmp_path)})
    (tmp_path / "bad.gguf").write_bytes(b"other")
    (tmp_path / "made").mkdir()
    with pytest.raises(ConfigError, match="does not begin with GGUF"):
        convert_in_child(tmp_path / "bad.gguf", tmp_path / "made")


def test_a_converter_that_writes_much_to_stderr_does_not_wait_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gguf_file: Path
) -> None:
    program = tmp_path / "python"
    program.write_text(
        "#!/bin/sh\nyes a warning | head -c 300000 >&2\necho 1 2\necho not a number\necho the reason >&2\nexit 78\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(ConfigError, match="the reason"):
        convert_in_child(gguf_file, tmp_path)


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("#!/bin/sh\nkill -9 $$\n", "was killed: it may have needed more memory than there is"),
        ("#!/bin/sh\nexit 7\n", "ended with 7"),
        ("#!/no/such/program\n", r"can't be run: .*No such file"),
    ],
)
def test_a_converter_that_says_nothing_is_told_by_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gguf_file: Path, program: str, reason: str
) -> None:
    (tmp_path / "python").write_text(program)
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(ConfigError, match=reason):
        convert_in_child(gguf_file, tmp_path)


def test_a_conversion_that_fills_the_disk_names_the_variable(tmp_path: Path, gguf_file: Path) -> None:
    (tmp_path / "config.json").symlink_to("/dev/full")
    with pytest.raises(ConfigError, match=r"\(No space left on device\): it takes .* MiB; .*: XDG_CACHE_HOME="):
        convert_in_child(gguf_file, tmp_path)
