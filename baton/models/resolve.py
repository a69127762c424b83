"""Finds the model directory of what `--model` or `LLM` names, and makes or fetches it where that is needed.

In this order: a directory; a GGUF file, or a directory with one; a named model (`NAMED_MODELS`); ORG/NAME[@REVISION] of
the Hugging Face Hub. Anything else stays as it is, and the check of the directory refuses it.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from baton.config.cluster import ClusterSettings
from baton.config.node import NodeSettings
from baton.errors import ConfigError
from baton.messages.speculation import SpeculationConfig
from baton.model_formats.gguf.container import open_gguf
from baton.models.hub import HubName, fetched_directory
from baton.models.model_cache import FileState, KnownDigests, ModelCache, default_cache_dir
from baton.models.named_models import (
    NAMED_MODELS,
    known_facts,
    make_directory,
    source_of,
)
from baton.models.progress import bar_of_bytes, mebibytes, say

C = TypeVar("C", bound=ClusterSettings)

_MAX_NAME_CHARS = 64


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model directory, and the name under which clients know the model unless they are told another."""

    directory: Path
    name: str
    dequantize: bool = False
    """Whether its quantised weights are made plain, even if no setting says so."""


def with_model_directory(config: C) -> C:
    """The settings with model directories in place of other names of models. Raises ConfigError."""
    if config.runner != "torch":
        return config
    changes: dict[str, object] = {}
    model = find_model(config.model, os.environ)
    if model.directory != config.model:
        changes = {"model": model.directory, "model_name": config.model_name or model.name}
        if model.dequantize and isinstance(config, NodeSettings):
            changes["dequantize"] = True
    if isinstance(config, NodeSettings) and config.speculative_config:
        changes["speculative_config"] = _with_draft_directory(config.speculative_config)
    return config.model_copy(update=changes) if changes else config


def _with_draft_directory(speculative_config: str) -> str:
    """The setting with a directory in place of another name of the model that drafts."""
    config = SpeculationConfig.from_json(speculative_config)
    if not config.model:
        return speculative_config
    # A path relative to here may be read by processes that run elsewhere.
    directory = find_model(Path(config.model), os.environ).directory.absolute()
    return replace(config, model=str(directory)).to_json()


def find_model(named: Path, environ: Mapping[str, str]) -> FoundModel:
    """The model directory of a GGUF file, a named model or one of the hub; any other path is taken for a directory.

    What happens meanwhile is told on stderr. Raises ConfigError if the directory can't be made or fetched.
    """
    try:
        return _found(named, environ)
    except OSError as error:
        raise ConfigError(f"model {named} can't be read: {error.strerror or error}") from error


def _found(named: Path, environ: Mapping[str, str]) -> FoundModel:
    if named.is_dir():
        named = _only_gguf_file(named) or named
        if named.is_dir():
            return FoundModel(named, named.resolve().name)
    if named.suffix == ".gguf":
        if named.exists() and not named.is_file():
            # A pipe would be read for ever.
            raise ConfigError(f"{named} is not a regular file")
        source, state = named, FileState.of(named)
        digests = KnownDigests(default_cache_dir(environ).with_name("digests"), time.time_ns)
        sha256 = digests.sha256_of(source, state)
        cache = _cache(environ, sha256)
        directory = cache.directory_of(sha256, lambda _scratch: _while_unchanged(source, state), state.size)
        return FoundModel(directory, _client_name(source.stem))
    model = NAMED_MODELS.get(str(named))
    if model is not None:
        if model.beside:
            cache = ModelCache(default_cache_dir(environ), partial(make_directory, model))
        else:
            cache = _cache(environ, model.sha256)
        directory = cache.directory_of(model.sha256, lambda scratch: source_of(model, scratch), model.num_bytes_to_make)
        return FoundModel(directory, _client_name(str(named)), model.dequantize)
    # A name whose first part is a folder here is a path with a mistake in it, never a model of a stranger.
    hub = None if named.is_absolute() or Path(named.parts[0]).is_dir() else HubName.parse(str(named))
    if hub is not None:
        return FoundModel(fetched_directory(hub), _client_name(hub.repository.partition("/")[2]))
    return FoundModel(named, named.name)


def _cache(environ: Mapping[str, str], sha256: str) -> ModelCache:
    """The cache of models; what it makes of the GGUF file with this SHA-256 has what is known of it."""

    def convert(source: Path, directory: Path) -> None:
        convert_in_child(source, directory)
        for file, more in known_facts(sha256).items():
            add_to_json(directory / file, more)

    return ModelCache(default_cache_dir(environ), convert)


def _only_gguf_file(directory: Path) -> Path | None:
    """The GGUF file of a directory that is no model directory itself; None if there is none."""
    if (directory / "config.json").is_file():
        return None
    files = sorted(directory.glob("*.gguf"))
    if len(files) > 1:
        raise ConfigError(f"{directory} has {len(files)} GGUF files: name one of them, such as {files[0]}")
    return files[0] if files else None


@contextmanager
def _while_unchanged(source: Path, state: FileState) -> Iterator[Path]:
    """The file for the duration of the block; raises ConfigError at its end if its state is another one by then."""
    yield source
    if FileState.of(source) != state:
        raise ConfigError(f"{source} was changed while it was converted; start again when it is complete")


def _client_name(text: str) -> str:
    """The text as a name of a model for clients."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", text)[:_MAX_NAME_CHARS]


_PROGRESS_LINE = re.compile(r"(\d+) (\d+)\n?")
"""A line of the converter about its progress: bytes that are done, and all bytes."""
_MAX_REASON_CHARS = 500


def convert_in_child(source: Path, directory: Path) -> None:
    """Write the model directory of a GGUF file into an empty directory; raises ConfigError with the reason.

    The conversion is announced on stderr when the converter has found the file's header sound. Its progress is shown
    there, too, as a bar if that is a terminal.
    """
    try:
        _convert(source, directory)
    except OSError as error:
        raise ConfigError(f"the converter of {source} can't be run: {error}") from error


def add_to_json(path: Path, more: Mapping[str, object]) -> None:
    """Write further keys to a JSON file of a model directory, and flush it."""
    with path.open("r+", encoding="utf-8") as file:
        content = json.load(file)
        file.seek(0)
        file.truncate()
        json.dump({**content, **more}, file, indent=2)
        file.flush()
        os.fsync(file.fileno())


def _convert(source: Path, directory: Path) -> None:
    # A file without a sound header is refused at once, not only when the converter has imported torch.
    with open_gguf(source):
        pass
    command = [sys.executable, "-P", "-m", "baton.runner.model.stored.convert_gguf", str(source), str(directory)]
    with (
        # A file, since a child that fills a pipe which nobody reads would wait for ever.
        tempfile.TemporaryFile("w+", errors="replace") as stderr,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True) as child,
    ):
        try:
            assert child.stdout is not None
            matches = (_PROGRESS_LINE.fullmatch(line) for line in child.stdout)
            reports = ((int(report[1]), int(report[2])) for report in matches if report)
            if next(reports, None) is not None:
                say(f"Converting {source.name} ({mebibytes(source.stat().st_size)}) once …")
                with bar_of_bytes() as show:
                    for done, total in reports:
                        show(done, total)
            child.wait()
        except BaseException:
            child.kill()
            raise
        if child.returncode:
            stderr.seek(0)
            lines = [line for line in stderr.read().splitlines() if line.strip()]
            raise ConfigError(
                lines[-1][:_MAX_REASON_CHARS] if lines else _reason_from_exit_code(source, child.returncode)
            )


def _reason_from_exit_code(source: Path, code: int) -> str:
    """Why a converter that wrote nothing to stderr has failed."""
    if code == -signal.SIGKILL:
        return f"the converter of {source} was killed: it may have needed more memory than there is"
    return f"the converter of {source} ended with {code}"
