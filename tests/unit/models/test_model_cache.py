"""The cache of model directories: each is made once, whole, and by one of several processes only."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from baton.errors import ConfigError
from baton.models.model_cache import ModelCache, default_cache_dir, sha256_of
from tests.support.named_models import CONTENT, DIGEST, entries, write_directory


@contextmanager
def no_source(_scratch: Path) -> Iterator[Path]:
    yield Path("none")


def test_a_directory_is_made_once(tmp_path: Path) -> None:
    made: list[Path] = []

    def convert(source: Path, directory: Path) -> None:
        made.append(source)
        write_directory(source, directory)

    cache = ModelCache(tmp_path / "cache", convert)
    first = cache.directory_of(DIGEST, no_source)
    assert cache.directory_of(DIGEST, no_source) == first
    assert (first / "config.json").read_text() == "{}"
    assert made == [Path("none")]
    assert entries(tmp_path / "cache") == [first.name]
    assert cache.directory_of("0" * 64, no_source) != first


def test_a_conversion_that_fails_or_is_interrupted_leaves_nothing(tmp_path: Path) -> None:
    for error in (ConfigError("bad file"), KeyboardInterrupt()):

        def convert(_source: Path, directory: Path, error: BaseException = error) -> None:
            (directory / "config.json").touch()
            raise error

        with pytest.raises(type(error)):
            ModelCache(tmp_path, convert).directory_of(DIGEST, no_source)
        assert entries(tmp_path) == []
    assert ModelCache(tmp_path, write_directory).directory_of(DIGEST, no_source).is_dir()


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    directory = ModelCache(tmp_path, write_directory).directory_of(DIGEST, no_source)
    left = tmp_path / f".{directory.name}.killed" / "made"
    left.mkdir(parents=True)
    directory.rename(tmp_path / "elsewhere")
    ModelCache(tmp_path, write_directory).directory_of(DIGEST, no_source)
    assert entries(tmp_path) == [directory.name, "elsewhere"]


def test_two_at_once_make_one_directory(tmp_path: Path) -> None:
    entered, go_on, made = threading.Event(), threading.Event(), []

    def convert(source: Path, directory: Path) -> None:
        made.append(source)
        entered.set()
        assert go_on.wait(60)
        write_directory(source, directory)

    cache = ModelCache(tmp_path, convert)
    threads = [threading.Thread(target=cache.directory_of, args=(DIGEST, no_source)) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert entered.wait(60)
    assert entries(tmp_path) != [f"{DIGEST}-5"]  # nothing is in its place before it is whole
    go_on.set()
    for thread in threads:
        thread.join()
    assert (len(made), entries(tmp_path)) == (1, [f"{DIGEST}-5"])


def test_a_cache_that_can_not_be_written_is_an_error_that_names_the_place_and_the_variable(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    root = tmp_path / "file" / "cache"
    with pytest.raises(ConfigError) as caught:
        ModelCache(root, write_directory).directory_of(DIGEST, no_source)
    assert str(caught.value) == (
        f"the cache {root} can't be written (Not a directory: {root}): choose a writable directory: "
        "XDG_CACHE_HOME=DIRECTORY"
    )


def test_a_cache_without_room_is_refused_before_anything_is_fetched(tmp_path: Path) -> None:
    def fetch(_scratch: Path) -> AbstractContextManager[Path]:
        raise AssertionError("it fetched a model that has no room")

    with pytest.raises(ConfigError, match=r"takes 1099511627776.0 MiB: choose a larger .*: XDG_CACHE_HOME=DIRECTORY"):
        ModelCache(tmp_path, write_directory).directory_of(DIGEST, fetch, 1 << 60)
    assert entries(tmp_path) == []


def test_whoever_waits_for_another_process_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Told(io.StringIO):
        """A stderr that knows when somebody was told to wait."""

        def write(self, text: str) -> int:
            if "Waiting for another process" in text:
                told.set()
            return super().write(text)

    cache, inner, told = ModelCache(tmp_path, write_directory), threading.Event(), threading.Event()
    monkeypatch.setattr(sys, "stderr", Told())

    def wait_for_it() -> None:
        cache.directory_of(DIGEST, no_source)
        inner.set()

    def convert(_source: Path, directory: Path) -> None:
        threading.Thread(target=wait_for_it).start()
        assert told.wait(60)
        assert not inner.is_set()
        (directory / "config.json").touch()

    ModelCache(tmp_path, convert).directory_of(DIGEST, no_source)
    assert inner.wait(60)


def test_without_a_home_the_error_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(ConfigError, match="no home directory for the cache of models: set XDG_CACHE_HOME"):
        default_cache_dir({})


def test_the_cache_is_where_the_xdg_specification_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert default_cache_dir({"XDG_CACHE_HOME": "/cache"}) == Path("/cache/baton/models")
    assert default_cache_dir({}) == Path("/home/somebody/.cache/baton/models")
    assert default_cache_dir({"XDG_CACHE_HOME": "relative"}) == Path("/home/somebody/.cache/baton/models")


def test_hashes_are_those_of_the_content(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(CONTENT)
    assert sha256_of(tmp_path / "file") == DIGEST
