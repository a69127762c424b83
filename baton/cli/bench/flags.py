"""Options of commands that are derived from the fields of the dataclasses that they configure (`baton.bench.flag`)."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from types import SimpleNamespace
from typing import Annotated, Any, get_type_hints

import typer

from baton.bench.flag import Flag

Given = dict[str, Any]
"""The values of options by the names of their fields; those that were not given are missing."""
NOT_GIVEN: Given = {}
"""The default of such parameters, which stand among others with defaults."""


@dataclass(frozen=True)
class FlagsOf:
    """Marks a parameter `Annotated[Given, FlagsOf(WorkloadSpec, "burstiness time_scale")]` of a command.

    The command has an option for each of these fields, and the parameter gets their values.
    """

    kind: type
    names: str
    """The fields, separated by blanks, in the order of the help."""
    are_optional: bool = False
    """Whether the options have no defaults: the fields belong to a value that another option chooses."""
    flags: Mapping[str, Flag] = field(default_factory=dict)
    """Flags that this command describes otherwise."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults that are not those of the fields."""

    def options(self) -> dict[str, tuple[Flag, inspect.Parameter]]:
        """The flag and the parameter of each field."""
        known = {declared.name: declared for declared in fields(self.kind)}
        # Only these: the types of other fields may be those of large packages, which are not imported for a help.
        annotations = SimpleNamespace(__annotations__={name: known[name].type for name in self.names.split()})
        types = get_type_hints(annotations, vars(sys.modules[self.kind.__module__]), include_extras=True)
        return {name: self._option(name, types[name], known[name].default) for name in self.names.split()}

    def _option(self, name: str, annotation: Any, default: Any) -> tuple[Flag, inspect.Parameter]:
        flag = self.flags.get(name) or next(mark for mark in annotation.__metadata__ if isinstance(mark, Flag))
        kind = annotation.__origin__ if flag.kind is None else flag.kind
        default = self.defaults.get(name, inspect.Parameter.empty if default is MISSING else default)
        if kind is not bool and (self.are_optional or (flag.kind is not None and default in ("", None))):
            kind, default = kind | None, None
        info = typer.Option(
            *(flag.name or f"--{name.replace('_', '-')}").split() if kind is not bool or flag.name else (),
            help=flag.help,
            min=flag.min,
            max=flag.max,
            metavar=flag.metavar,
        )
        return flag, inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info]
        )

    def given(self, options: Mapping[str, Flag], values: dict[str, Any]) -> Given:
        """Takes the values of these options out of those of the command."""
        taken = {name: (flag.convert, values.pop(name)) for name, flag in options.items()}
        return {
            name: value if convert is None else convert(value)
            for name, (convert, value) in taken.items()
            if value is not None and not (self.are_optional and value is False)
        }


def with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """The command with options instead of each parameter that has a `FlagsOf`."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, tuple[FlagsOf, dict[str, Flag]]] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        metadata = getattr(hints[parameter.name], "__metadata__", ())
        group = next((mark for mark in metadata if isinstance(mark, FlagsOf)), None)
        if group is None:
            parameters.append(parameter.replace(annotation=hints[parameter.name], kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        options = group.options()
        groups[parameter.name] = group, {name: flag for name, (flag, _) in options.items()}
        parameters += [option for _, option in options.values()]

    @functools.wraps(command)
    def run(**values: Any) -> None:
        for name, (group, options) in groups.items():
            values[name] = group.given(options, values)
        command(**values)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run
