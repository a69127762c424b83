"""Options of commands that are made of the fields of the dataclasses which they configure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import typer
from typer.testing import CliRunner

from baton.bench.flag import Flag
from baton.cli.bench.flags import NOT_GIVEN, FlagsOf, Given, with_flags


@dataclass(frozen=True)
class Load:
    rate: Annotated[float, Flag("Requests per second.", min=0)]
    length: Annotated[int, Flag("Tokens.", "--tokens --length", max=9)] = 4
    size_bytes: Annotated[float, Flag("Size.", "--size-gb", convert=lambda size: size * 1e9)] = 2e9
    path: Annotated[str, Flag("File.", kind=Path, convert=str)] = ""
    kind: Annotated[str, Flag("Kind.", kind=Literal["a", "b"])] = "a"
    is_steady: Annotated[bool, Flag("Steady.")] = False


def given(words: str, flags: FlagsOf) -> Any:
    """What a command with these flags gets for this command line; what it says if that is wrong."""
    got: list[Given] = []
    app = typer.Typer()

    def command(load: Given = NOT_GIVEN) -> None:
        got.append(load)

    command.__annotations__["load"] = Annotated[Given, flags]
    app.command()(with_flags(command))
    answer = CliRunner().invoke(app, words.split())
    return got[0] if got else answer.output


def test_an_option_has_the_default_of_its_field_and_its_values_are_converted() -> None:
    flags = FlagsOf(Load, "rate length size_bytes path kind is_steady", defaults={"size_bytes": 1.5})
    assert given("--rate 2", flags) == {"rate": 2.0, "length": 4, "size_bytes": 1.5e9, "kind": "a", "is_steady": False}
    assert given("--rate 2 --length 5 --path x/y --kind b --is-steady", flags) == {
        "rate": 2.0,
        "length": 5,
        "size_bytes": 1.5e9,
        "path": "x/y",
        "kind": "b",
        "is_steady": True,
    }


@pytest.mark.parametrize("words", ["", "--rate -1", "--rate 1 --tokens 10", "--rate 1 --kind c"])
def test_a_field_without_a_default_and_the_bounds_of_values_are_required(words: str) -> None:
    assert "Usage" in given(words, FlagsOf(Load, "rate length kind"))


def test_optional_flags_hand_on_only_what_was_given() -> None:
    flags = FlagsOf(Load, "rate length kind is_steady", are_optional=True, flags={"length": Flag("Other.", max=20)})
    assert given("", flags) == {}
    assert given("--length 12", flags) == {"length": 12}
