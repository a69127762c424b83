"""Command-line flags of settings: their names, and the flags that carry a configuration to another process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo


def flag_of(key: str) -> str:
    """The flag of a setting."""
    return "--" + key.replace("_", "-")


def key_of(flag: str) -> str:
    """The setting of a flag."""
    return flag.removeprefix("--").removeprefix("no-").replace("-", "_")


def switches(key: str, field: FieldInfo) -> tuple[str, ...]:
    """The flags without a value of a boolean setting: for True and, if True is the default, for False."""
    word = key.replace("_", "-")
    return (f"--{word}", f"--no-{word}") if field.default is True else (f"--{word}",)


def flag_text(value: Any) -> str:
    """A value as it is written behind its flag, on one machine whatever the directory: paths are absolute."""
    if isinstance(value, Path):
        return str(value.absolute())
    return f"{value:g}" if isinstance(value, float) else str(value)


def flags_of(config: BaseModel, settings: type[BaseModel]) -> dict[str, str]:
    """The flags with which another process gets the values that `config` has for the fields of `settings`.

    A value of "" belongs to a flag that takes none. Values that are None, empty, or False by default have no flag.
    """
    flags: dict[str, str] = {}
    for key, field in settings.model_fields.items():
        value = getattr(config, key)
        if isinstance(value, bool):
            on, *off = switches(key, field)
            flags |= {on: ""} if value else dict.fromkeys(off, "")
        elif value not in (None, ""):
            flags[flag_of(key)] = flag_text(value)
    return flags
