"""The SHA-256 of a file is computed once while the file stays as it is, and again after anything else."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from baton.models.model_cache import FileState, KnownDigests

CONTENT = b"GGUF" * 100
LATER_NS = 10_000_000_000


class CountedReads:
    """Hashes files, and counts how often."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, path: Path) -> str:
        self.count += 1
        return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def reads() -> CountedReads:
    return CountedReads()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(CONTENT)
    return path


def ask(root: Path, reads: CountedReads, source: Path, age_ns: int = LATER_NS) -> str:
    """Ask for the digest, as a process that starts `age_ns` after the file changed last."""
    state = FileState.of(source)
    return KnownDigests(root, lambda: state.ctime_ns + age_ns, reads).sha256_of(source, state)


def entry(root: Path) -> Path:
    (found,) = root.iterdir()
    return found


def test_a_file_that_stays_as_it_is_is_read_once(tmp_path: Path, reads: CountedReads, source: Path) -> None:
    root = tmp_path / "a" / "digests"
    digests = [ask(root, reads, source) for _ in range(3)]
    assert digests == [hashlib.sha256(CONTENT).hexdigest()] * 3
    assert reads.count == 1
    assert entry(root).name == f"{source.stat().st_dev}-{source.stat().st_ino}"


def write_in_place(path: Path) -> None:
    before = path.stat()
    # The clock of ctime may tick only every few milliseconds.
    while path.stat().st_ctime_ns == before.st_ctime_ns:
        path.write_bytes(CONTENT[::-1])
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace_by_another(path: Path) -> None:
    other = path.with_suffix(".other")
    other.write_bytes(CONTENT[::-1])
    os.utime(other, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    other.replace(path)


@pytest.mark.parametrize("change", [write_in_place, replace_by_another])
def test_a_changed_file_of_the_same_size_and_mtime_is_read_again(
    tmp_path: Path, reads: CountedReads, source: Path, change: Callable[[Path], None]
) -> None:
    ask(tmp_path / "digests", reads, source)
    change(source)
    assert ask(tmp_path / "digests", reads, source) == hashlib.sha256(CONTENT[::-1]).hexdigest()
    assert reads.count == 2


@pytest.mark.parametrize("field", ["device", "inode", "size", "mtime_ns", "ctime_ns"])
def test_every_part_of_the_state_counts(tmp_path: Path, reads: CountedReads, source: Path, field: str) -> None:
    ask(tmp_path / "digests", reads, source)
    state = FileState.of(source)
    other = replace(state, **{field: getattr(state, field) + 1})
    KnownDigests(tmp_path / "digests", lambda: 0, reads).sha256_of(source, other)
    assert reads.count == 2


def test_a_file_that_changed_a_moment_ago_is_not_remembered(tmp_path: Path, reads: CountedReads, source: Path) -> None:
    """The file could change once more within the same tick of the clock that its ctime comes from."""
    for age_ns in (1_000_000, -LATER_NS):
        ask(tmp_path / "digests", reads, source, age_ns)
        assert not (tmp_path / "digests").exists()
    assert reads.count == 2


def test_a_file_that_changes_while_it_is_read_is_not_remembered(tmp_path: Path, source: Path) -> None:
    def read(path: Path) -> str:
        path.write_bytes(CONTENT * 2)
        return "0" * 64

    state = FileState.of(source)
    KnownDigests(tmp_path / "digests", lambda: state.ctime_ns + LATER_NS, read).sha256_of(source, state)
    assert not (tmp_path / "digests").exists()


@pytest.mark.parametrize("damage", [b"", b"\xff" * 50, b"0 0 0 " + b"a" * 64, b"x" * 100_000])
def test_a_corrupt_entry_costs_one_more_hash(tmp_path: Path, reads: CountedReads, source: Path, damage: bytes) -> None:
    root = tmp_path / "digests"
    expected = ask(root, reads, source)
    whole = entry(root).read_bytes()
    for content in (damage, whole[:-1], whole + b"0", whole.replace(expected.encode(), b"g" * 64)):
        entry(root).write_bytes(content)
        before = reads.count
        assert ask(root, reads, source) == expected
        assert reads.count == before + 1
        assert entry(root).read_bytes() == whole, "it was mended"


def test_a_place_that_can_not_be_written_costs_one_more_hash(tmp_path: Path, reads: CountedReads, source: Path) -> None:
    (tmp_path / "file").touch()
    for _ in range(2):
        assert ask(tmp_path / "file" / "digests", reads, source) == hashlib.sha256(CONTENT).hexdigest()
    state, root = FileState.of(source), tmp_path / "digests"
    (root / f"{state.device}-{state.inode}" / "in the way").mkdir(parents=True)
    ask(root, reads, source)
    assert reads.count == 3
    assert entry(root).is_dir()


def test_a_person_is_told_what_a_large_file_is_read_for(
    tmp_path: Path, reads: CountedReads, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ask(tmp_path / "digests", reads, source)
    assert capsys.readouterr().err == ""
    os.truncate(source, 512 << 20)
    state = FileState.of(source)
    KnownDigests(tmp_path / "digests", lambda: 0, lambda _path: "0" * 64).sha256_of(source, state)
    assert capsys.readouterr().err == "Reading model.gguf (512.0 MiB) to identify it …\n"
