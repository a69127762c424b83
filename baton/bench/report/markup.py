"""HTML and SVG elements as `markupsafe.Markup`: every other text that is put into them is escaped."""

from __future__ import annotations

from typing import TypeAlias

from markupsafe import Markup

__all__ = ["Child", "Markup", "join", "tag", "unbroken"]

Child: TypeAlias = "str | None"
_EMPTY = frozenset({"meta", "br", "line", "path", "rect"})


def tag(name: str, /, *children: Child, **attributes: str | float | bool | None) -> Markup:
    """One element. An attribute `class_` is written `class`, `aria_label` `aria-label`; None and False are left out."""
    written = join(
        *(
            _attribute(key.rstrip("_").replace("_", "-"), value)
            for key, value in attributes.items()
            if value is not None and value is not False
        )
    )
    if name in _EMPTY:
        return Markup("<{0}{1}/>").format(name, written)
    return Markup("<{0}{1}>{2}</{0}>").format(name, written, join(*children))


def join(*children: Child) -> Markup:
    """Concatenates the children; None is left out."""
    return Markup().join(child for child in children if child is not None)


def _attribute(name: str, value: str | float) -> Markup:
    if value is True:
        return Markup(" {}").format(name)
    return Markup(' {}="{}"').format(name, f"{value:.6g}" if isinstance(value, float) else value)


def unbroken(text: str) -> list[str]:
    """The words of a text, those of which are kept in one line that a browser would break, such as addresses."""
    parts: list[str] = []
    for word in text.split(" "):
        parts += [" "] if parts else []
        parts.append(tag("span", word, class_="word") if any(mark in word for mark in "-/:.") else word)
    return parts
