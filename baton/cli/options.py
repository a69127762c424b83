"""The flags of `baton up`, `baton node` and `baton router`, derived from the settings of these processes."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from pydantic import BaseModel

from baton.config import config_file, load
from baton.config.setting import Setting, flag_of, settings_of

C = TypeVar("C", bound=BaseModel)

_OTHER_FLAGS = "Options"


class SettingsCommand(typer.core.TyperCommand):
    """A command whose help lists its flags under the headings of their settings."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the lists."""
        lists: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            line = parameter.get_help_record(ctx)
            if line is not None:
                lists.setdefault(getattr(parameter, "rich_help_panel", None) or _OTHER_FLAGS, []).append(line)
        for heading, lines in lists.items():
            with formatter.section(heading):
                formatter.write_dl(lines)


def settings_command(
    app: typer.Typer,
    name: str,
    text: str,
    model: type[C],
    run: Callable[..., None],
    more: Sequence[inspect.Parameter] = (),
    fallbacks: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda _flags: {},
) -> None:
    """Add a command that has a flag for each setting in `model`, `--config`, and the flags `more`.

    It calls `run(loaded, file, **more)` with the settings from flags, environment and file. `fallbacks` takes the flags
    that were given and returns defaults that depend on the machine.
    """
    settings = settings_of(model)

    def command(**values: Any) -> None:
        environ = os.environ
        file = config_file(values.pop("config"), environ)
        flags = {key: _joined(values.pop(key)) for key in settings}
        run(load(model, flags, environ, file, fallbacks(flags)), file, **values)

    parameters = [*map(_parameter, settings.values()), _CONFIG, *more]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app.command(name, help=text, cls=SettingsCommand)(command)


def option(name: str, kind: Any, default: Any, *flags: str, **attributes: Any) -> inspect.Parameter:
    """One of the other flags of a `settings_command`; `flags` and `attributes` as for typer.Option."""
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind, typer.Option(*(flags or (flag_of(name),)), **attributes)],
    )


_CONFIG = option(
    "config", Path | None, None, metavar="PATH", help="Configuration file. Default: ./baton.toml if it exists."
)
VERBOSE = option("verbose", int, 0, "-v", "--verbose", count=True, help="Log more: -v, -vv.", show_default=False)
LOG_FORMAT = option(
    "log_format",
    str | None,
    None,
    metavar="auto|text|json",
    help="Format of log lines. Default: auto, which is text on a terminal and JSON elsewhere.",
    show_default=False,
)


def _joined(value: Any) -> Any:
    """The value of a flag; the values of one that was given several times, as one text."""
    return (",".join(value) or None) if isinstance(value, list) else value


def _parameter(setting: Setting) -> inspect.Parameter:
    shown = setting.default_text
    return option(
        setting.key,
        # Values stay text here: the model converts and checks them, whether they come from a flag or from elsewhere.
        bool | None if setting.is_switch else list[str] | None if setting.is_several else str | None,
        None,
        "/".join(setting.flags),
        metavar=setting.value_name or None,
        help=setting.description + (f" Default: {shown}." if shown else ""),
        show_default=False,
        hidden=setting.is_internal,
        rich_help_panel=setting.heading,
    )
