"""Where a configuration's values come from: flag, then environment, then file, then default.

A key that nobody knows is an error that names it and what was probably meant. The environment is read when a command
starts, never at import.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from baton.config.node import NodeConfig, RouterConfig, UpConfig
from baton.config.setting import flag_of
from baton.did_you_mean import did_you_mean
from baton.errors import ConfigError, UsageError
from baton.security.redaction import without_password

C = TypeVar("C", bound=BaseModel)

DEFAULT_FILE = "baton.toml"
PREFIX = "BATON_"
_TABLES: Mapping[str, type[BaseModel]] = {"node": NodeConfig, "router": RouterConfig, "up": UpConfig}
_NOT_OURS = frozenset({"config", "run_dir", "log", "log_format", "address", "api_key"})
"""BATON_ variables that commands read themselves."""
NOT_FROM_OUTSIDE = frozenset({"notify_fd"})


@dataclass(frozen=True, slots=True)
class Loaded(Generic[C]):
    """A configuration, and for each key who said so: a flag, a variable, a file, or `default`."""

    config: C
    origins: Mapping[str, str]


def load(
    model: type[C],
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
    file: Path | None = None,
    fallbacks: Mapping[str, Any] | None = None,
) -> Loaded[C]:
    """Put a configuration together. Flags that are None were not given; `file` is read only when it is named.

    `fallbacks` are defaults that the caller knows better than the model, such as a name made from the host's.

    Raises ConfigError with the key, its origin, and what is wrong with it; UsageError when only flags are to blame.
    """
    values: dict[str, Any] = dict(fallbacks or {})
    origins = dict.fromkeys(model.model_fields, "default")
    layers = (
        _from_file(model, file) if file is not None else {},
        _from_environment(model, environ),
        {key: (value, flag_of(key)) for key, value in flags.items() if value is not None},
    )
    for layer in layers:
        for key, (value, origin) in layer.items():
            values[key], origins[key] = value, origin
    try:
        return Loaded(model.model_validate(values), origins)
    except ValidationError as error:
        blame = UsageError if all(_is_usage(dict(problem), origins) for problem in error.errors()) else ConfigError
        raise blame(_explain(error, model, origins)) from None


def view(model: type[BaseModel], environ: Mapping[str, str], file: Path | None = None) -> dict[str, tuple[Any, str]]:
    """Every key of a configuration that is not complete yet: what it would be without flags, and who says so.

    A key that must be given and is not has the value None, from `required`. Raises ConfigError as `load`.
    """
    found: dict[str, tuple[Any, str]] = {}
    for key, field in model.model_fields.items():
        if key not in NOT_FROM_OUTSIDE:
            given = None if field.is_required() else field.get_default(call_default_factory=True)
            found[key] = (given, "required" if field.is_required() else "default")
    for layer in (_from_file(model, file) if file is not None else {}, _from_environment(model, environ)):
        found.update(layer)
    values = {key: value for key, (value, origin) in found.items() if origin not in ("default", "required")}
    try:
        model.model_validate(values)
    except ValidationError as error:
        problems = [problem for problem in error.errors() if problem["type"] != "missing" and problem["loc"]]
        if problems:
            raise ConfigError(_explain(error, model, {key: origin for key, (_, origin) in found.items()})) from None
    return found


def config_file(flag: Path | None, environ: Mapping[str, str]) -> Path | None:
    """The file to read: the one named by flag or BATON_CONFIG, else ./baton.toml if there is one.

    Raises ConfigError when a named file is missing.
    """
    named = flag or (Path(environ["BATON_CONFIG"]) if environ.get("BATON_CONFIG") else None)
    if named is not None:
        if not named.is_file():
            raise ConfigError(f"configuration file {named} does not exist")
        return named
    here = Path(DEFAULT_FILE)
    return here if here.is_file() else None


def _from_file(model: type[BaseModel], file: Path) -> dict[str, tuple[Any, str]]:
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: {error}") from None
    everything = _known_keys()
    found: dict[str, tuple[Any, str]] = {}
    for key, value in content.items():
        if isinstance(value, dict):
            if key not in _TABLES:
                raise ConfigError(f"{file}: unknown table [{key}]{did_you_mean(key, _TABLES)}")
            continue
        if key not in everything:
            raise ConfigError(f"{file}: unknown key {key!r}{did_you_mean(key, everything | set(_TABLES))}")
        if key in model.model_fields:
            found[key] = (value, str(file))
    for table, owner in _TABLES.items():
        known = set(owner.model_fields) - NOT_FROM_OUTSIDE
        for key, value in content.get(table, {}).items():
            if key not in known:
                raise ConfigError(f"{file}: unknown key {key!r} in [{table}]{did_you_mean(key, known)}")
            if owner is model:
                found[key] = (value, f"{file} [{table}]")
    return found


def _from_environment(model: type[BaseModel], environ: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    everything = _known_keys() | _NOT_OURS
    found: dict[str, tuple[str, str]] = {}
    for variable, value in environ.items():
        if not variable.startswith(PREFIX):
            continue
        key = variable.removeprefix(PREFIX).lower()
        if key in everything:
            # Kubernetes sets BATON_PORT=tcp://… in every pod beside a service named baton: no port of ours looks so.
            if key in model.model_fields and key not in NOT_FROM_OUTSIDE and not value.startswith("tcp://"):
                found[key] = (value, variable)
        elif difflib.get_close_matches(key, everything, n=1, cutoff=0.85):
            # Only a near miss is an error: whoever runs Baton may have BATON_ variables of his own.
            known = {PREFIX + name.upper() for name in everything}
            raise ConfigError(f"unknown variable {variable}{did_you_mean(variable, known)}")
    return found


def _known_keys() -> frozenset[str]:
    return frozenset(key for owner in _TABLES.values() for key in owner.model_fields) - NOT_FROM_OUTSIDE


def _is_usage(problem: Mapping[str, Any], origins: Mapping[str, str]) -> bool:
    """Whether the command line is to blame: a bad flag, or a flag that lacks."""
    key = str(problem["loc"][0]) if problem["loc"] else ""
    return problem["type"] == "missing" or origins.get(key, "").startswith("--")


def _explain(error: ValidationError, model: type[BaseModel], origins: Mapping[str, str]) -> str:
    told = []
    for problem in error.errors(include_url=False):
        key = str(problem["loc"][0]) if problem["loc"] else ""
        reason = str(problem["msg"]).removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            told.append(f"unknown key {key!r}{did_you_mean(key, model.model_fields)}")
        elif problem["type"] == "missing":
            told.append(f"{flag_of(key)} is required")
        else:
            given = without_password(repr(problem["input"]))
            said = f" {given:.80} from {origins[key]}" if key in origins else ""
            told.append(f"{key}{said}: {reason}" if key else reason)
    return "; ".join(told)
