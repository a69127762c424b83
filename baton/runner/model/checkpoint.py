"""A model directory on disk: what must be in it, and which model it is. Needs no torch, so a check is cheap.

Only safetensors are read, since opening a pickle can run code.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from baton.errors import ConfigError
from baton.model_formats.end_tokens import read_end_tokens
from baton.model_formats.images import IMAGE_FAMILIES, read_processor
from baton.model_formats.json_files import read_object
from baton.model_formats.safetensors_header import UnsoundSafetensors, read_header
from baton.runner.model.pooling_files import pooling_fields

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_READ_BYTES = 1 << 22
_MOST_FILES = 10_000
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,250}\.safetensors")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checked model directory: every file named here exists and every safetensors header is sound."""

    directory: Path
    config: Mapping[str, Any]
    weight_files: tuple[Path, ...]
    fingerprint: str
    """SHA-256 over configuration, tokenizer and every weight byte: equal fingerprints mean equal models."""
    eos_token_ids: frozenset[int]


def open_checkpoint(directory: Path) -> Checkpoint:
    """Check a model directory and compute its fingerprint; raises ConfigError that says what is wrong, and the fix."""
    config = _checked_config(directory)
    weight_files = _weight_files(directory)
    headers = [_safetensors_header(path) for path in weight_files]
    return Checkpoint(
        directory=directory,
        config=config,
        weight_files=weight_files,
        fingerprint=_fingerprint(directory, config, weight_files, headers),
        eos_token_ids=read_end_tokens(directory, config),
    )


def check_model_dir(directory: Path) -> Mapping[str, Any]:
    """The directory's config.json, after those checks of `open_checkpoint` that read no weights; raises ConfigError."""
    config = _checked_config(directory)
    for path in _weight_files(directory):
        _safetensors_header(path)
    return config


def _checked_config(directory: Path) -> Mapping[str, Any]:
    if not directory.is_dir():
        raise ConfigError(
            f"model directory {directory} {'is a file' if directory.exists() else 'does not exist'}; "
            "name a directory with config.json and *.safetensors"
        )
    config = _read_json(directory / "config.json")
    if "auto_map" in config and "model_type" not in config:
        raise ConfigError(
            f"{directory} can be loaded only with its own code (auto_map), and Baton runs no code from model "
            "directories; use a model of an architecture that transformers has"
        )
    return config


def _read_json(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        raise ConfigError(f"{path.parent} has no {path.name}; is it a transformers model directory?")
    return read_object(path)


def _weight_files(directory: Path) -> tuple[Path, ...]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        names = _files_of_index(index)
        missing = [name for name in names if not (directory / name).is_file()]
        if missing or not names:
            lacking = ", ".join(missing) or "the files"
            raise ConfigError(f"{directory} lacks {lacking} that {index.name} names; copy them there")
        return tuple(directory / name for name in names)
    single = directory / "model.safetensors"
    if single.is_file():
        return (single,)
    pickled = sorted(path.name for pattern in _PICKLES for path in directory.glob(pattern))
    if pickled:
        raise ConfigError(
            f"{directory} has only pickled weights ({pickled[0]}), which could run code; "
            "convert them with save_pretrained(safe_serialization=True)"
        )
    raise ConfigError(f"{directory} has no model.safetensors; copy the weights there")


def _files_of_index(index: Path) -> list[str]:
    """The files that an index names; raises ConfigError for names that lead out of its directory, or too many."""
    found = _read_json(index).get("weight_map")
    if not isinstance(found, dict):
        raise ConfigError(f"{index} has no weight_map; copy it again")
    names = sorted({str(name) for name in found.values()})
    if len(names) > _MOST_FILES:
        raise ConfigError(f"{index} names {len(names)} files; at most {_MOST_FILES} are read")
    for name in names:
        if not _FILE_NAME.fullmatch(name):
            raise ConfigError(f"{index} names {name!r:.80}, which is not the name of a safetensors file beside it")
    return names


def _safetensors_header(path: Path) -> bytes:
    """The bytes of a file's header; raises ConfigError unless its tensors fill the rest of the file exactly."""
    try:
        return read_header(path).content
    except UnsoundSafetensors as error:
        raise ConfigError(str(error)) from error


def _fingerprint(
    directory: Path, config: Mapping[str, Any], weight_files: tuple[Path, ...], headers: list[bytes]
) -> str:
    digest = hashlib.sha256(b"baton model 1")
    fields = [json.dumps(config, sort_keys=True).encode()]
    tokenizer = directory / "tokenizer.json"
    fields.append(tokenizer.read_bytes() if tokenizer.is_file() else b"")
    if config.get("model_type") in IMAGE_FAMILIES:
        # How an image becomes pixels decides the rows that stand for it.
        fields.append(json.dumps(read_processor(directory), sort_keys=True).encode())
    fields += pooling_fields(directory)
    for path, header in zip(weight_files, headers, strict=True):
        fields += [path.name.encode(), header, str(path.stat().st_size).encode(), _content_hash(path)]
    for field in fields:
        digest.update(len(field).to_bytes(8, "little"))
        digest.update(field)
    return digest.hexdigest()


def _content_hash(path: Path) -> bytes:
    state = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while piece := file.read(_READ_BYTES):
            state.update(piece)
    return bytes(state.digest())
