"""The flags of a command, derived from the fields of its configuration."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import typer
from pydantic import BaseModel, ByteSize
from pydantic.fields import FieldInfo

from baton.config import config_file, load
from baton.config.setting import flag_of, switches

C = TypeVar("C", bound=BaseModel)

_HIDDEN = frozenset({"notify_fd"})


def config_flags(
    model: type[C],
    run: Callable[..., None],
    more: Sequence[inspect.Parameter] = (),
    fallbacks: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda _flags: {},
) -> Callable[..., None]:
    """A typer callback with a flag for each field of `model`, `--config`, and `more`.

    It calls `run(loaded, file, **more)` with the configuration from flags, environment and file. `fallbacks` takes the
    flags that were given and returns defaults that depend on the machine.
    """
    fields = model.model_fields

    def command(**values: Any) -> None:
        environ = os.environ
        file = config_file(values.pop("config"), environ)
        flags = {key: values.pop(key) for key in fields}
        run(load(model, flags, environ, file, fallbacks(flags)), file, **values)

    parameters = [_parameter(key, field) for key, field in sorted(fields.items(), key=_optional_last)]
    parameters.append(
        option(
            "config", Path | None, None, metavar="PATH", help="Configuration file. Default: ./baton.toml if it exists."
        )
    )
    parameters += more
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def option(name: str, kind: Any, default: Any, *flags: str, **settings: Any) -> inspect.Parameter:
    """One more flag for `config_flags`; `flags` and `settings` as for typer.Option."""
    words = flags or (flag_of(name),)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind, typer.Option(*words, **settings)],
    )


LOG_FORMAT = option(
    "log_format",
    str | None,
    None,
    metavar="auto|text|json",
    help="How to write logs. Default: auto, which is text on a terminal and JSON elsewhere.",
    show_default=False,
)


def _optional_last(item: tuple[str, FieldInfo]) -> bool:
    return not item[1].is_required()


def _parameter(key: str, field: FieldInfo) -> inspect.Parameter:
    shown = "" if field.is_required() else default_text(field)
    said = f"{field.description or ''}{f' Default: {shown}.' if shown else ''}"
    if field.annotation is bool:
        # A flag without a value. In the environment and in the file the value is written out.
        return option(key, bool | None, None, "/".join(switches(key, field)), help=said, show_default=False)
    # Values stay text here. The model converts and checks them, wherever they come from.
    return option(key, str | None, None, metavar=metavar(field), help=said, show_default=False, hidden=key in _HIDDEN)


def default_text(field: FieldInfo) -> str:
    value = field.default
    if field.default_factory is not None or value in (None, "") or value is False:
        return ""
    if value is True:
        return "yes"
    if isinstance(value, float):
        return f"{value:g}"
    # Default sizes are whole numbers of MiB.
    return f"{value >> 20}MiB" if isinstance(value, ByteSize) else str(value)


def metavar(field: FieldInfo) -> str:
    if get_origin(field.annotation) is Literal:
        return "|".join(map(str, get_args(field.annotation)))
    found = kinds(field.annotation)
    if float in found:
        return "SECONDS" if (field.description or "").startswith("Seconds") else "X"
    if int in found:
        return "N"
    if ByteSize in found:
        return "SIZE"
    return "PATH" if Path in found else "TEXT"


def kinds(annotation: Any) -> set[Any]:
    """Every type that an annotation is made of."""
    inner = get_args(annotation)
    return {kind for part in inner for kind in kinds(part)} if inner else {annotation}
