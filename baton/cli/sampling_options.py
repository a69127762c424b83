"""Options of the commands that generate text: how tokens are sampled, and what the text must be."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypedDict

import typer

from baton.errors import UsageError

TemperatureOption = Annotated[
    float | None,
    typer.Option(
        help="Sampling temperature from 0 (greedy) to 2. Default: the model's own, else 1.",
        metavar="X",
        show_default=False,
    ),
]
TopPOption = Annotated[
    float | None, typer.Option(help="Nucleus sampling: probability mass that is kept, in (0, 1].", metavar="X")
]
TopKOption = Annotated[int | None, typer.Option(help="Sample from the K most likely tokens; -1 for all.", metavar="K")]
MinPOption = Annotated[
    float | None, typer.Option(help="Smallest probability relative to the most likely token, in [0, 1].", metavar="X")
]


JsonSchemaOption = Annotated[
    str | None,
    typer.Option(
        help="Generate JSON that matches this schema; {} matches any JSON, @FILE reads the schema from a file.",
        metavar="SCHEMA",
    ),
]
RegexOption = Annotated[
    str | None,
    typer.Option(
        help="Generate a text that matches this regular expression as a whole; the syntax is that of Rust's crate "
        "regex.",
        metavar="PATTERN",
    ),
]
ChoiceOption = Annotated[
    list[str] | None,
    typer.Option(help="Generate one of these texts, exactly. May be repeated.", metavar="TEXT"),
]
GrammarOption = Annotated[
    str | None,
    typer.Option(
        help="Generate a text that follows this grammar, in Lark's notation or in GBNF; @FILE reads it from a file.",
        metavar="GRAMMAR",
    ),
]


class ConstraintFields(TypedDict):
    """The fields of a `GenerateRequest` that say what its output must be."""

    json_schema: str | None
    regex: str | None
    choice: Sequence[str]
    grammar: str | None


def constraint_fields(
    json_schema: str | None, regex: str | None, choice: Sequence[str] | None, grammar: str | None
) -> ConstraintFields:
    """The fields that the options ask for.

    Raises UsageError if several kinds are asked for, or a text is empty, which would constrain nothing, or unreadable.
    """
    options = {"--json-schema": [json_schema], "--regex": [regex], "--choice": choice or [], "--grammar": [grammar]}
    given = {name: texts for name, texts in options.items() if any(text is not None for text in texts)}
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} don't go together: use one of them")
    for name, texts in given.items():
        if "" in texts:
            raise UsageError(f"{name}: an empty text constrains nothing; leave the option out")
    return {
        "json_schema": _text("--json-schema", json_schema),
        "regex": regex,
        "choice": tuple(choice or ()),
        "grammar": _text("--grammar", grammar),
    }


def _text(option: str, text: str | None) -> str | None:
    """The text of an option, or that of the file which it names."""
    if text is None or not text.startswith("@"):
        return text
    try:
        content = Path(text[1:]).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(f"{option}: {text[1:]} can't be read ({error})") from None
    if not content:
        raise UsageError(f"{option}: {text[1:]} is empty")
    return content
