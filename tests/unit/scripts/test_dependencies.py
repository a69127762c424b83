"""Every dependency has its reason in docs/decisions/0024-dependencies.md."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

REPOSITORY = Path(__file__).parents[3]


def test_every_dependency_has_a_row() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    needed = {Requirement(line).name for group in groups for line in group}
    record = (REPOSITORY / "docs/decisions/0024-dependencies.md").read_text()
    rows = [line.split("|")[1] for line in record.splitlines() if line.startswith("| ")]
    named = set(re.findall(r"[\w-]+", " ".join(rows)))
    missing = {name for name in needed if name not in named and not name.startswith("opentelemetry-")}
    assert not missing
