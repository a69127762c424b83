"""deploy/Containerfile: its instructions and stages exist, and it copies what is here. No test builds the image."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
INSTRUCTIONS = {
    *("ARG", "FROM", "WORKDIR", "COPY", "RUN", "ENV", "USER", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK"),
    *("ENTRYPOINT", "CMD"),
}


def instructions() -> list[tuple[str, str]]:
    """Each instruction and its arguments, without comments and continued lines."""
    text = (ROOT / "deploy" / "Containerfile").read_text()
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line and not line.startswith("#")]
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in lines]


def test_every_line_is_an_instruction_with_arguments() -> None:
    assert {name for name, _ in instructions()} <= INSTRUCTIONS
    assert instructions()[0] == ("ARG", "BUILD=source")


def test_stages_exist_before_they_are_used() -> None:
    known: set[str] = set()
    for name, rest in instructions():
        for stage in re.findall(r"--from=(\S+)", rest):
            assert stage in known
        if name == "FROM":
            base = rest.split()[0]
            bases = [base.replace("${BUILD}", build) for build in ("source", "wheel")]
            assert all(one in known or one.startswith("python:") for one in bases)
            known |= {rest.split()[2]} if " AS " in rest else set()
    assert {"build-source", "build-wheel", "build"} <= known


def test_what_is_copied_is_in_the_checkout() -> None:
    for name, rest in instructions():
        if name == "COPY" and "--from" not in rest and "dist/" not in rest:
            *sources, _ = rest.split()
            assert all((ROOT / source).exists() for source in sources)


def test_what_is_copied_is_sent_to_the_builder() -> None:
    lines = (ROOT / ".containerignore").read_text().splitlines()
    assert "*" in lines, "all that is not named is left out"
    sent = {line.removeprefix("!") for line in lines if line.startswith("!")}
    copied = {
        source
        for name, rest in instructions()
        if name == "COPY" and "--from" not in rest
        for source in rest.split()[:-1]
    }
    assert copied == sent
