"""How a setting appears to users: its flag, its environment variable, its default, and how its values are written.

All of it is derived from the fields of the settings' classes (`baton.config.node`, `router`, `cluster`, `up`).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ByteSize
from pydantic.fields import FieldInfo

from baton.config.kinds import Internal, OnGpu, Several

PREFIX = "BATON_"
"""The prefix of the environment variables of all settings."""
_COMPUTED_DEFAULT = " Default: "


def flag_of(key: str) -> str:
    """The flag of a setting, `--max-num-seqs` for `max_num_seqs`."""
    return "--" + key.replace("_", "-")


def key_of(flag: str) -> str:
    """The setting of a flag, `max_num_seqs` for `--max-num-seqs`, or of a flag that switches it off."""
    return flag.removeprefix("--").removeprefix("no-").replace("-", "_")


def variable_of(key: str) -> str:
    """The environment variable of a setting."""
    return PREFIX + key.upper()


def value_text(value: Any) -> str:
    """A value as it is written after its flag. Paths are absolute, so that they are valid in any working directory."""
    if isinstance(value, Path):
        return str(value.absolute())
    if isinstance(value, bool):
        return str(value).lower()
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of a process."""

    key: str
    """The setting's name in the configuration file, and its field's name in the model."""
    field: FieldInfo
    heading: str
    """The title of the group that it belongs to."""

    @property
    def flag(self) -> str:
        """The flag that gives the setting a value, or switches it on."""
        return flag_of(self.key)

    @property
    def flags(self) -> tuple[str, ...]:
        """All flags of the setting. A switch that is on by default also has a flag that switches it off."""
        return (self.flag, flag_of("no_" + self.key)) if self.field.default is True else (self.flag,)

    @property
    def variable(self) -> str:
        """The environment variable of the setting."""
        return variable_of(self.key)

    @property
    def is_switch(self) -> bool:
        """Whether the setting's flags take no value."""
        return self.field.annotation is bool

    @property
    def is_path(self) -> bool:
        """Whether the setting's values are paths of files or directories."""
        return Path in _types(self.field.annotation)

    @property
    def is_internal(self) -> bool:
        """Whether the setting is hidden from users: only Baton's own processes give it to each other."""
        return Internal in self.field.metadata

    @property
    def on_gpu(self) -> OnGpu | None:
        """The default on a GPU; None if it is the same everywhere."""
        return next((mark for mark in self.field.metadata if isinstance(mark, OnGpu)), None)

    @property
    def is_several(self) -> bool:
        """Whether the setting's flag may be given several times."""
        return Several in self.field.metadata

    @property
    def is_required(self) -> bool:
        """Whether the setting has no default and must be given."""
        return self.field.is_required()

    @property
    def default(self) -> Any:
        """The default; None if the setting is required."""
        return None if self.is_required else self.field.get_default(call_default_factory=True)

    @property
    def default_text(self) -> str:
        """The default as text for help and documentation; empty if there is none worth mentioning."""
        computed = (self.field.description or "").partition(_COMPUTED_DEFAULT)[2].removesuffix(".")
        value = self.default
        if computed or value is None or value == "" or value is False:
            return computed
        if value is True:
            return "yes"
        # Default sizes are whole numbers of MiB.
        text = f"{value >> 20}MiB" if isinstance(value, ByteSize) and value else value_text(value)
        return text if self.on_gpu is None else f"{text}; on a GPU {self.on_gpu.text}"

    @property
    def description(self) -> str:
        """The description of the setting, without its default."""
        return (self.field.description or "").partition(_COMPUTED_DEFAULT)[0]

    @property
    def value_name(self) -> str:
        """The placeholder for a value in help, such as SECONDS, or the choices; empty for a switch."""
        if self.is_switch:
            return ""
        if get_origin(self.field.annotation) is Literal:
            return "|".join(map(str, get_args(self.field.annotation)))
        types = _types(self.field.annotation)
        if float in types:
            return "MILLISECONDS" if self.key.endswith("_ms") else "SECONDS" if self.key.endswith("_s") else "X"
        names = {int: "N", ByteSize: "SIZE", Path: "PATH"}
        return next((name for kind, name in names.items() if kind in types), "TEXT")

    def with_value(self, value: Any) -> dict[str, str]:
        """The flag that gives this value to another process, and its text, "" for a switch.

        Empty for a value that no flag can give: None, an empty text, and False where that is the default.
        """
        if self.is_switch:
            on, *off = self.flags
            return {on: ""} if value else dict.fromkeys(off, "")
        return {} if value is None or value == "" else {self.flag: value_text(value)}


@cache
def settings_of(model: type[BaseModel]) -> Mapping[str, Setting]:
    """The settings of a process or a group, by key. The settings that the class itself adds come first."""
    own, *bases = (base for base in model.__mro__ if issubclass(base, BaseModel))
    fields = model.model_fields
    return {
        key: Setting(key, fields[key], getattr(group, "heading", ""))
        for group in (own, *reversed(bases))
        for key in inspect.get_annotations(group)
        if key in fields
    }


def flags_of(config: BaseModel, group: type[BaseModel]) -> dict[str, str]:
    """The flags that give another process the values that `config` has for the settings of `group`."""
    settings = settings_of(group)
    return {
        flag: text
        for key in group.model_fields
        if settings[key].on_gpu is None or key in config.model_fields_set
        for flag, text in settings[key].with_value(getattr(config, key)).items()
    }


def settings_for(kind: type[Any], config: BaseModel) -> dict[str, Any]:
    """The settings for which a dataclass has fields of the same names, as arguments for it."""
    names = {field.name for field in fields(kind)} & type(config).model_fields.keys()
    return {name: getattr(config, name) for name in names}


def _types(annotation: Any) -> set[Any]:
    """All types that an annotation consists of."""
    inner = get_args(annotation)
    return {kind for part in inner for kind in _types(part)} if inner else {annotation}
