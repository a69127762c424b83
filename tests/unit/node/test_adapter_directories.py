"""A node reads adapters in allowed directories only, and nothing that is no file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.errors import AdapterRefused
from baton.model_formats.adapters import AdapterInfo, open_adapter
from baton.node.adapters.adapter_threads import AdapterDirectories
from tests.support.adapter_files import write_simple_adapter


def check(directory: Path) -> AdapterInfo:
    return open_adapter(directory).info()


def test_an_adapter_below_an_allowed_directory_is_read_once_while_it_does_not_change(tmp_path: Path) -> None:
    reads: list[Path] = []

    def counted(directory: Path) -> AdapterInfo:
        reads.append(directory)
        return check(directory)

    directories = AdapterDirectories([tmp_path], counted)
    one = write_simple_adapter(tmp_path / "deep" / "one")
    info = directories.inspect(str(one))
    assert directories.inspect(str(one)) == info
    assert reads == [one]
    directories.check_digest(str(one), info.digest)
    write_simple_adapter(one, seed=1)
    os.utime(one / "adapter_model.safetensors", ns=(1, 1))
    assert directories.inspect(str(one)).digest != info.digest
    with pytest.raises(AdapterRefused, match=f"is {directories.inspect(str(one)).digest}, and {info.digest} is wanted"):
        directories.check_digest(str(one), info.digest)


def test_other_directories_are_refused_whatever_is_there(tmp_path: Path) -> None:
    allowed, other = tmp_path / "allowed", write_simple_adapter(tmp_path / "allowed-not")
    allowed.mkdir()
    (allowed / "link").symlink_to(other)
    directories = AdapterDirectories([allowed], check)
    for place in (other, tmp_path / "missing", allowed / "link", allowed / ".." / "allowed-not", Path("/")):
        with pytest.raises(AdapterRefused, match="in no directory from which this node loads adapters"):
            directories.inspect(str(place))
    for text in ("relative", "", "/x\n", "/" + "x" * 2000):
        with pytest.raises(AdapterRefused, match="must be an absolute path"):
            directories.inspect(text)
    with pytest.raises(AdapterRefused):
        AdapterDirectories([], check).inspect(str(other))


def test_links_within_allowed_directories_are_followed(tmp_path: Path) -> None:
    blobs, snapshot = write_simple_adapter(tmp_path / "blobs"), tmp_path / "snapshot"
    snapshot.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (snapshot / name).symlink_to(blobs / name)
    found = AdapterDirectories([tmp_path], check).inspect(str(snapshot))
    assert found == check(blobs)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_link_that_leads_elsewhere_once_it_was_checked_is_not_followed(tmp_path: Path, name: str) -> None:
    one, secret = write_simple_adapter(tmp_path / "allowed" / "one"), write_simple_adapter(tmp_path / "secret")

    def check_late(directory: Path) -> AdapterInfo:
        (one / name).unlink()
        (one / name).symlink_to(secret / name)
        return check(directory)

    with pytest.raises(AdapterRefused, match="leads out of the directories"):
        AdapterDirectories([tmp_path / "allowed"], check_late).inspect(str(one))
    check(one)


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _link_outside(path: Path) -> None:
    path.symlink_to(path.parents[1] / "secret")


def _directory(path: Path) -> None:
    path.mkdir()


def _truncated(path: Path) -> None:
    path.write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{")


@pytest.mark.parametrize("make", [_fifo, _device, _link_outside, _directory, _truncated])
@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_what_is_no_sound_file_is_refused_without_a_hang(
    tmp_path: Path, name: str, make: Callable[[Path], None]
) -> None:
    (tmp_path / "secret").write_text("{}")
    one = write_simple_adapter(tmp_path / "allowed")
    (one / name).unlink()
    make(one / name)
    with pytest.raises(AdapterRefused):
        AdapterDirectories([one], check).inspect(str(one))
