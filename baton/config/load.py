"""Loads the settings of a process from flags, environment and file.

A flag has precedence over the environment, the environment over the file, and the file over the default. An unknown key
is an error, whose message names the key and the one that was probably meant. The environment is read when a command
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

from baton.config.node import NodeConfig
from baton.config.router import RouterConfig
from baton.config.setting import PREFIX, Setting, flag_of, settings_of, variable_of
from baton.config.up import UpConfig
from baton.did_you_mean import did_you_mean
from baton.errors import ConfigError, UsageError
from baton.security.redaction import without_password

C = TypeVar("C", bound=BaseModel)

DEFAULT_FILE = "baton.toml"
MODELS: Mapping[str, type[BaseModel]] = {"up": UpConfig, "node": NodeConfig, "router": RouterConfig}
"""The settings of each command that starts processes, by the command's name. Its table in the file has the same name.
"""
_NOT_SETTINGS = frozenset({"config", "run_dir", "log", "log_format", "address", "api_key"})
"""BATON_ variables that commands read themselves."""
_Found = dict[str, tuple[Any, str]]
"""The value of each key and its origin."""


@dataclass(frozen=True, slots=True)
class Loaded(Generic[C]):
    """The settings of a process, and the origin of each: a flag, a variable, a file, or `default`."""

    config: C
    origins: Mapping[str, str]


def load(
    model: type[C],
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
    file: Path | None = None,
    fallbacks: Mapping[str, Any] | None = None,
) -> Loaded[C]:
    """Load the settings of a process. A flag with the value None was not given. Without `file` no file is read.

    `fallbacks` replace defaults of the model, for example by a name that is derived from the host's.

    Raises ConfigError, whose message names the key, its origin and what is wrong with the value, or UsageError if only
    flags are wrong.
    """
    values: dict[str, Any] = dict(fallbacks or {})
    origins = dict.fromkeys(model.model_fields, "default")
    given = {key: (value, flag_of(key)) for key, value in flags.items() if value is not None}
    for key, (value, origin) in (_from_file_and_environment(model, environ, file) | given).items():
        values[key], origins[key] = value, origin
    try:
        return Loaded(model.model_validate(values), origins)
    except ValidationError as error:
        is_usage_error = all(_concerns_flag(dict(problem), origins) for problem in error.errors())
        error_class = UsageError if is_usage_error else ConfigError
        raise error_class(_explain(error, model, origins)) from None


def view(model: type[BaseModel], environ: Mapping[str, str], file: Path | None = None) -> _Found:
    """The value that each setting would have without flags, and its origin; required ones may be missing.

    A required setting that is not given has the value None and the origin `required`. Raises ConfigError as `load`.
    """
    values = {
        key: (setting.default, _origin_of_default(setting))
        for key, setting in settings_of(model).items()
        if not setting.is_internal
    }
    given = _from_file_and_environment(model, environ, file)
    values |= given
    try:
        model.model_validate({key: value for key, (value, _) in given.items()})
    except ValidationError as error:
        problems = [problem for problem in error.errors() if problem["type"] != "missing" and problem["loc"]]
        if problems:
            raise ConfigError(_explain(error, model, {key: origin for key, (_, origin) in values.items()})) from None
    return values


def config_file(flag: Path | None, environ: Mapping[str, str]) -> Path | None:
    """The file to read: the one that the flag or BATON_CONFIG names, else ./baton.toml if it exists.

    Raises ConfigError when a named file is missing.
    """
    named = flag or (Path(environ["BATON_CONFIG"]) if environ.get("BATON_CONFIG") else None)
    if named is not None:
        if not named.is_file():
            raise ConfigError(f"configuration file {named} does not exist")
        return named
    here = Path(DEFAULT_FILE)
    return here if here.is_file() else None


def _from_file_and_environment(model: type[BaseModel], environ: Mapping[str, str], file: Path | None) -> _Found:
    """The values in the file and the environment, which has precedence."""
    return (_from_file(model, file) if file is not None else {}) | _from_environment(model, environ)


def _from_file(model: type[BaseModel], file: Path) -> _Found:
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: {error}") from None
    all_keys = _all_keys()
    values: _Found = {}
    for key, value in content.items():
        if isinstance(value, dict):
            if key not in MODELS:
                raise ConfigError(f"{file}: unknown table [{key}]{did_you_mean(key, MODELS)}")
            continue
        if key not in all_keys:
            raise ConfigError(f"{file}: unknown key {key!r}{did_you_mean(key, all_keys | set(MODELS))}")
        if key in model.model_fields:
            values[key] = (value, str(file))
    for table, owner in MODELS.items():
        known = _keys(owner)
        for key, value in content.get(table, {}).items():
            if key not in known:
                raise ConfigError(f"{file}: unknown key {key!r} in [{table}]{did_you_mean(key, known)}")
            if owner is model:
                values[key] = (value, f"{file} [{table}]")
    return values


def _from_environment(model: type[BaseModel], environ: Mapping[str, str]) -> _Found:
    all_keys, own_keys = _all_keys() | _NOT_SETTINGS, _keys(model)
    values: _Found = {}
    for variable, value in environ.items():
        if not variable.startswith(PREFIX):
            continue
        key = variable.removeprefix(PREFIX).lower()
        if key in all_keys:
            # Kubernetes sets BATON_PORT=tcp://... in every pod next to a service named baton. No value is so.
            if key in own_keys and not value.startswith("tcp://"):
                values[key] = (value, variable)
        elif difflib.get_close_matches(key, all_keys, n=1, cutoff=0.85):
            # Other programs may have BATON_ variables, so only a name that resembles a setting's is an error.
            raise ConfigError(f"unknown variable {variable}{did_you_mean(variable, set(map(variable_of, all_keys)))}")
    return values


def _origin_of_default(setting: Setting) -> str:
    if setting.is_required:
        return "required"
    return "default" if setting.on_gpu is None else f"default (on a GPU: {setting.on_gpu.text})"


def _keys(model: type[BaseModel]) -> frozenset[str]:
    """The settings that can be given to a process from outside."""
    return frozenset(key for key, setting in settings_of(model).items() if not setting.is_internal)


def _all_keys() -> frozenset[str]:
    return frozenset().union(*map(_keys, MODELS.values()))


def _concerns_flag(problem: Mapping[str, Any], origins: Mapping[str, str]) -> bool:
    """Whether the problem is a wrong or missing flag, and not an error in the environment or the file."""
    key = str(problem["loc"][0]) if problem["loc"] else ""
    return problem["type"] == "missing" or origins.get(key, "").startswith("--")


def _explain(error: ValidationError, model: type[BaseModel], origins: Mapping[str, str]) -> str:
    explanations = []
    for problem in error.errors(include_url=False):
        key = str(problem["loc"][0]) if problem["loc"] else ""
        reason = str(problem["msg"]).removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            explanations.append(f"unknown key {key!r}{did_you_mean(key, model.model_fields)}")
        elif problem["type"] == "missing":
            explanations.append(f"{flag_of(key)} is required")
        else:
            value = without_password(repr(problem["input"]))
            value_and_origin = f" {value:.80} from {origins[key]}" if key in origins else ""
            explanations.append(f"{key}{value_and_origin}: {reason}" if key else reason)
    return "; ".join(explanations)
