"""Renders the fields of bodies that are not simply served into docs/http.md. Run by scripts/http_fields."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from generated_parts import keep

import router.http.app  # noqa: F401  all bodies are defined then
from router.http.bodies.fields import Strict, Treatment

PAGE = Path(__file__).parent.parent / "docs" / "http.md"
BEGIN, END = "<!-- fields -->\n", "<!-- end -->\n"
COLUMNS = ("object", *(treatment.value for treatment in Treatment))


def main(arguments: list[str]) -> int:
    """Writes the page; with `--check` compares it and returns 1 if it is out of date."""
    head, begin, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    rendered = head + begin + table() + END + rest.partition(END)[2]
    return keep(PAGE, rendered, only_compare="--check" in arguments)


def table() -> str:
    bodies = sorted(set(_marked(Strict)), key=lambda body: (_about(body), body.__module__))
    rows = [COLUMNS, ("---",) * len(COLUMNS), *map(_row, bodies)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _marked(base: type[Strict]) -> Iterator[type[Strict]]:
    """The bodies, and objects in bodies, that declare such fields themselves."""
    for body in base.__subclasses__():
        if any(_names(body, treatment) for treatment in Treatment):
            yield body
        yield from _marked(body)


def _row(body: type[Strict]) -> tuple[str, ...]:
    return _about(body), *(", ".join(f"`{name}`" for name in _names(body, treatment)) for treatment in Treatment)


def _about(body: type[Strict]) -> str:
    """What the object is: the first sentence about it, with the API if it is that of one alone."""
    about = (body.__doc__ or "").partition("\n")[0].partition(". ")[0].rstrip(".")
    api = next((api for api in ("messages", "responses") if f".{api}." in body.__module__), "")
    return f"/v1/{api}: {about}" if api and not about.startswith("POST") else about


def _names(body: type[Strict], treatment: Treatment) -> list[str]:
    own = [body.model_fields[name].alias or name for name in body.__annotations__ if name in body.model_fields]
    fields = {field.alias or name: field for name, field in body.model_fields.items()}
    return sorted(name for name in own if treatment in fields[name].metadata)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
