"""Writes the description of the HTTP API and the help of groups of commands into tests/outside. Run by scripts/outside.

docs/cli-reference.md has the help of all other commands, and docs/configuration.md their settings.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

from baton.cli.main import command_tree
from baton.cli.main import main as run_command
from router.http.pages.openapi import description
from tests.support.outside import difference, write


def main(arguments: list[str]) -> int:
    """Writes the files; with `--check` compares them and returns 1 after printing how they differ."""
    os.environ["COLUMNS"] = "80"
    files = {
        "openapi.json": json.dumps(description(), indent=1, sort_keys=True, ensure_ascii=False) + "\n",
        "help.txt": "\n".join(helps(command_tree())),
    }
    if "--check" not in arguments:
        for name, text in files.items():
            write(name, text)
        return 0
    changed = "".join(difference(name, text) for name, text in files.items())
    if changed:
        print(f"{changed}scripts/outside: users see a change; if it is meant, run scripts/outside", file=sys.stderr)
    return 1 if changed else 0


def helps(command: Any, words: Sequence[str] = ()) -> Iterator[str]:
    """Yields how the help of each group of commands is asked for, and the answer in 80 columns."""
    if hasattr(command, "commands"):
        asked = [*words, "-h"]
        with redirect_stdout(StringIO()) as answer:
            run_command(asked)
        yield f"$ baton {' '.join(asked)}\n{answer.getvalue()}"
        for name, inner in command.commands.items():
            yield from helps(inner, [*words, name])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
