"""The types of values that settings have, each with the check that a value of it must pass."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from baton.errors import ConfigError
from baton.messages.adapters import (
    MAX_ADAPTERS,
    MAX_DIRECTORY_BYTES,
    MAX_NAME_CHARS,
    is_adapter_directory,
    is_adapter_name,
)
from baton.messages.speculation import SpeculationConfig

_ORIGIN = re.compile(
    r"[a-z][a-z0-9+.-]*://[a-z0-9.-]+(:[0-9]{1,5})?\Z|[a-z][a-z0-9+.-]*://\[[0-9a-f:]+\](:[0-9]{1,5})?\Z"
)
"""An origin as browsers write it in their header `origin`: in lower case, without a path or a slash at its end."""
_URL_PREFIX = re.compile(r"https?://([a-z0-9.-]+|\[[0-9a-f:]+\])(:[0-9]{1,5})?(/[A-Za-z0-9_.~/-]*)?\Z")
"""The beginning of URLs: a scheme, a host in lower case, and a path."""
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}\Z")


def _name(value: str) -> str:
    if value and not _NAME.match(value):
        raise ValueError("must be up to 64 letters, digits, '_', '.' and '-'")
    return value


def _host_port(value: str) -> str:
    host, mark, port = value.rpartition(":")
    if value and not (mark and host and port.isdigit() and 0 < int(port) < 65536):
        raise ValueError("must be HOST:PORT")
    return value


def _origins(value: str) -> str:
    for origin in parts_of(value):
        if origin != "*" and not _ORIGIN.match(origin):
            raise ValueError(f"{origin[:80]!r} must be * or an origin such as https://chat.example.org:8443")
    return value


def _url_prefixes(value: str) -> str:
    for prefix in parts_of(value):
        if not _URL_PREFIX.match(prefix):
            raise ValueError(f"{prefix[:80]!r} must be a URL such as https://images.example.org/public/")
    return value


def _adapter_modules(value: str) -> str:
    modules: dict[str, str] = {}
    for part in parts_of(value):
        name, mark, directory = part.partition("=")
        if not (mark and directory and is_adapter_name(name)):
            raise ValueError(
                f"{part[:80]!r} must be NAME=DIRECTORY, with a name of up to {MAX_NAME_CHARS} letters, digits and "
                "_ . : / -"
            )
        if name in modules:
            raise ValueError(f"the name {name!r} is given twice")
        modules[name] = _absolute(directory)
    if len(modules) > MAX_ADAPTERS:
        raise ValueError(f"has {len(modules)} adapters; at most {MAX_ADAPTERS} have a name")
    return ",".join(f"{name}={directory}" for name, directory in modules.items())


def _adapter_directories(value: str) -> str:
    return ",".join(map(_absolute, parts_of(value)))


def _absolute(directory: str) -> str:
    """The directory as any process on this machine can find it."""
    absolute = os.path.abspath(os.path.expanduser(directory))
    if not is_adapter_directory(absolute):
        raise ValueError(f"{directory[:80]!r} is no path of at most {MAX_DIRECTORY_BYTES} bytes")
    return absolute


def parts_of(value: str) -> list[str]:
    """The parts of a setting that has several, separated by commas."""
    return [part for text in value.split(",") if (part := text.strip())]


def checked_speculation(value: str) -> str:
    """A valid `SpeculationConfig` in JSON, or nothing; raises ValueError."""
    if value:
        try:
            SpeculationConfig.from_json(value)
        except ConfigError as error:
            raise ValueError(str(error)) from None
    return value


class Several:
    """Marks, in `Annotated`, a setting whose flag may be given several times: its values are joined by commas."""


Name = Annotated[str, AfterValidator(_name)]
Origins = Annotated[str, AfterValidator(_origins)]
UrlPrefixes = Annotated[str, AfterValidator(_url_prefixes), Several]
SpeculativeConfig = Annotated[str, AfterValidator(checked_speculation)]
AdapterModules = Annotated[str, AfterValidator(_adapter_modules), Several]
AdapterDirectories = Annotated[str, AfterValidator(_adapter_directories), Several]
HostPort = Annotated[str, AfterValidator(_host_port)]
Port = Annotated[int, Field(ge=0, le=65535)]
Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
SecondsToAnHour = Annotated[float, Field(ge=0, le=3600)]
SecondsFromOneToAnHour = Annotated[float, Field(ge=1, le=3600)]
Milliseconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
OnOff = Literal["on", "off"]
Dtype = Literal["auto", "float32", "bfloat16"]
KVCacheDtype = Literal["auto", "int8", "fp8"]
KVDigests = Literal["on", "sampled", "off"]


@dataclass(frozen=True, slots=True)
class OnGpu:
    """Marks, in `Annotated`, a setting that has another default on a node that computes on a GPU.

    Such a setting is given to another process only if it was given to this one, which may not know the other's device.
    """

    default: int
    text: str
    """How the default is written for users."""


class Internal:
    """Marks, in `Annotated`, a setting that only Baton's own processes give each other; it is hidden from users."""
