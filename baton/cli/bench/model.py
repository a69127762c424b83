"""The model of a benchmark: what --model names, or --shape."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from baton.config import bundled_model_dir
from baton.errors import ConfigError, UsageError
from baton.models.resolve import FoundModel, find_model

ModelOption = Annotated[
    Path | None, typer.Option(help="What `baton up --model` takes. Default: the bundled model.", metavar="MODEL")
]


def named_model(model: Path | None) -> FoundModel:
    """The directory and the name of the model, fetched and converted first if need be. Raises ConfigError."""
    found = find_model(model or bundled_model_dir(), os.environ)
    if not (found.directory / "config.json").is_file():
        # Said here once, and not by each cluster that is started for a part of the measurement.
        raise ConfigError(f"model {found.directory} is no directory with a config.json; give --model another one")
    return found


@contextmanager
def chosen_model(model: Path | None, shape: str) -> Iterator[FoundModel]:
    """The model that is named, or one of a shape with random weights, for the duration of the block.

    Raises UsageError if both are given, and ConfigError.
    """
    if model is not None and shape:
        raise UsageError("--model and --shape exclude each other")
    if not shape:
        yield named_model(model)
        return
    from baton.bench.micro.shapes import shape_dir

    with shape_dir(shape) as directory:
        yield FoundModel(directory, shape)
