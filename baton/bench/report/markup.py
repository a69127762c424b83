"""HTML that can't be broken by what is written into it: every text is escaped, only `Markup` is taken as it is."""

from __future__ import annotations

import html
from typing import TypeAlias


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


Child: TypeAlias = "str | None"
_EMPTY = frozenset({"meta", "br", "line", "path", "rect"})


def tag(name: str, /, *children: Child, **attributes: str | float | bool | None) -> Markup:
    """One element. An attribute `class_` is written `class`, `aria_label` `aria-label`; None and False are left out."""
    written = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{html.escape(_text(value))}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if name in _EMPTY:
        return Markup(f"<{name}{written}/>")
    return Markup(f"<{name}{written}>{join(*children)}</{name}>")


def join(*children: Child) -> Markup:
    """One after the other; None is nothing."""
    return Markup("".join(_escaped(child) for child in children if child is not None))


def _escaped(child: str) -> str:
    return child if isinstance(child, Markup) else html.escape(child)


def _text(value: str | float) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
