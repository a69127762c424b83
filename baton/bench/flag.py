"""Flags of benchmarks: how a command line names a field of a benchmark's configuration, and what it says about it.

A field has one as `Annotated[int, Flag("Threads of each node.", min=1)]`. `baton.cli.bench.flags` makes an option of
it, also for a help; so a module with such fields imports nothing large.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Flag:
    """The option of a field."""

    help: str
    name: str = ""
    """Its name, or several, separated by blanks; empty: the field's."""
    min: float | None = None
    max: float | None = None
    metavar: str | None = None
    kind: Any = None
    """The type of its value, if that is not the field's; with such a type, an empty default is not shown."""
    convert: Callable[[Any], Any] | None = None
    """Makes the field's value of the option's, such as bytes of gigabytes."""
