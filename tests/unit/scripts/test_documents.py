"""Files, headings, modules, functions, commands and options that the documents refer to exist; no line is too long."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from baton.cli.main import command_tree

ROOT = Path(__file__).parents[3]
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")
OUR_FOLDERS = (
    "baton/",
    "router/",
    "kv_transfer/",
    "prefill_node/",
    "decode_node/",
    "proto/",
    "scripts/",
    "tests/",
    "deploy/",
)
DEFINITION = re.compile(r"([\w/]+\.py):([\w.]+)")
COMMAND = re.compile(r"^ *\$ (?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?baton (.*)$", re.MULTILINE)


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def anchors(page: str) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    titles = re.findall(r"^#+ (.+)$", FENCE.sub("", text_of(page)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@cache
def tracked() -> frozenset[str]:
    """All files and folders of the repository."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    files = [Path(line) for line in listed.stdout.splitlines()]
    return frozenset(part.as_posix() for file in files for part in (file, *file.parents))


@cache
def options() -> dict[str, frozenset[str]]:
    """The options of each command, by the command's words."""

    def walk(command: Any, path: tuple[str, ...]) -> Iterator[tuple[str, frozenset[str]]]:
        names = (name for option in command.params for name in (*option.opts, *option.secondary_opts))
        yield " ".join(path), frozenset(names) | {"-h", "--help"}
        for name, subcommand in getattr(command, "commands", {}).items():
            yield from walk(subcommand, (*path, name))

    return dict(walk(command_tree(), ()))


@pytest.mark.parametrize("page", PAGES)
def test_links_have_a_target(page: str) -> None:
    wrong = []
    for link in LINK.finditer(FENCE.sub("", text_of(page))):
        target, _, heading = (link[1] or link[2]).partition("#")
        if target.startswith(("http:", "https:")):
            continue
        file = (ROOT / page).parent / target if target else ROOT / page
        path = file.resolve().relative_to(ROOT).as_posix()
        if path.rstrip("/") not in tracked() or (heading and heading not in anchors(path)):
            wrong.append(link[0])
    assert not wrong


@pytest.mark.parametrize("page", PAGES)
def test_named_paths_exist(page: str) -> None:
    named = (code for code in CODE.findall(FENCE.sub("", text_of(page))) if code.startswith(OUR_FOLDERS))
    paths = {re.split(r"[ :#]", path)[0].rstrip("/") for path in named if not re.search(r"[*{]|[A-Z]{3}", path)}
    assert not paths - tracked()


@pytest.mark.parametrize("page", PAGES)
def test_named_functions_exist(page: str) -> None:
    """`file.py:Class.method` names a definition in that file."""
    wrong = []
    for named in filter(None, map(DEFINITION.fullmatch, CODE.findall(FENCE.sub("", text_of(page))))):
        source, names = text_of(named[1]), named[2].split(".")
        definitions = (rf"^\s*((async )?def|class) {name}\b|^{name}\b.*?=" for name in names)
        if not all(re.search(definition, source, re.MULTILINE) for definition in definitions):
            wrong.append(named[0])
    assert not wrong


@pytest.mark.parametrize("page", PAGES)
def test_shown_commands_exist_with_their_options(page: str) -> None:
    wrong = []
    for line in COMMAND.findall(text_of(page).replace("\\\n", " ")):
        line = re.split(r" (?:&&|\|) ", re.sub(r"\$\(.*\)", "", line))[0]
        words = shlex.split(line)
        name = next((" ".join(words[:n]) for n in (2, 1) if " ".join(words[:n]) in options()), None)
        flags = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        if name is None or flags - options()[name]:
            wrong.append(line)
    assert not wrong


@pytest.mark.parametrize("page", [page for page in PAGES if not page.startswith("docs/decisions/")])
def test_lines_have_at_most_120_columns(page: str) -> None:
    """Rows of tables may be longer, since they can't be broken; so may what a program printed."""
    lines = FENCE.sub("", text_of(page)).splitlines()
    assert not [line for line in lines if len(line) > 120 and not line.lstrip().startswith("|")]


def test_every_decision_has_a_number_of_its_own() -> None:
    records = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
    assert [int(record.name[:4]) for record in records] == list(range(1, len(records) + 1))
    for record in records:
        assert record.read_text().startswith(f"# {int(record.name[:4])}. "), record.name
