"""Writes the effects of the lease and transfer books as text, one line each, and replays cases that are such texts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from baton.messages.ids import AttemptKey
from kv_transfer.effects import Recorded

_OF_WHOLE_BLOCKS = [("digest_parts", 1), ("group", 0), ("local_parts", 1), ("remote_parts", 1), ("partly_filled", ())]
"""Fields that have these values where blocks are moved whole, and are then left out."""


def lines(effects: Iterable[Any]) -> list[str]:
    """Return one line for each effect. `Recorded` effects are left out; they have their own tests."""
    return [_line(effect) for effect in effects if not isinstance(effect, Recorded)]


def names(effects: Iterable[Any]) -> list[str]:
    """Return the names of the `Recorded` effects."""
    return [effect.name for effect in effects if isinstance(effect, Recorded)]


def _line(value: Any) -> str:
    named = ((field.name, getattr(value, field.name)) for field in fields(value))
    words = [_word(content) for name, content in named if (name, content) not in _OF_WHOLE_BLOCKS]
    return " ".join([type(value).__name__, *words])


def _word(value: Any) -> str:
    match value:
        case AttemptKey():
            return str(value)
        case tuple() | list():
            return "[" + ", ".join(_word(item) for item in value) + "]"
        case bool() | int() | str() | None:
            return str(value)
        case _ if is_dataclass(value):
            return "(" + _line(value) + ")"
        case _:
            return str(getattr(value, "name", value))


def read_cases(path: Path) -> list[Any]:
    """The cases of a file, for pytest: paragraphs that begin with `# ` and a sentence, which is the id of the test."""
    paragraphs = path.read_text().strip().split("\n\n")
    return [pytest.param(text, id=text.partition("\n")[0].removeprefix("# ")) for text in paragraphs]


def replay(case: str, say: Callable[[str], Sequence[str]], given: Mapping[str, str]) -> str:
    """The case as the code holds it now. A line of it is an input, which `say` plays, and behind `->` the answers.

    `given NAME` plays the inputs of that name, which are divided by semicolons, and says nothing about them.
    """
    held = []
    for line in case.split("\n"):
        question = line.partition(" -> ")[0]
        answers: Sequence[str] = []
        if question.startswith("given "):
            for arranged in given[question.removeprefix("given ")].split("; "):
                say(arranged)
        elif not line.startswith("#"):
            answers = say(question)
        held.append(f"{question} -> {'; '.join(answers)}" if answers else question)
    return "\n".join(held)


def told(effects: Iterable[Any]) -> list[str]:
    """One text for each effect. `Recorded` effects are their names, all in the first text."""
    recorded = names(effects := list(effects))
    return ([", ".join(recorded)] if recorded else []) + lines(effects)


def numbers(words: Iterable[str]) -> tuple[int, ...]:
    return tuple(map(int, words))
