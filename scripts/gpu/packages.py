"""Which Python packages a GPU machine without a package index lacks, derived from pyproject.toml and what is there."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import requires, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

MACHINE_PACKAGES = Path(__file__).parent / "machine_packages.txt"
FOR_TESTS = ("hypothesis", "peft", "pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist")
"""What of the extra `dev` the tests on a GPU import."""


@dataclass(frozen=True)
class Machine:
    """A GPU machine: the version of its Python, and of each package that is used as it is there."""

    python: str
    versions: Mapping[str, Version | None]
    """None where a package was seen without its version; it is then taken to be enough."""

    @property
    def cuda(self) -> str:
        """The major version of CUDA for which the machine's torch was built, as `13`."""
        torch = self.versions["torch"]
        assert torch is not None
        assert torch.local is not None
        return torch.local.removeprefix("cu")[:-1]

    def has(self, wanted: Requirement) -> bool:
        """Whether what is there meets a requirement."""
        name = canonicalize_name(wanted.name)
        if name not in self.versions:
            return False
        there = self.versions[name]
        return there is None or wanted.specifier.contains(there, prereleases=True)


def read_machine(path: Path = MACHINE_PACKAGES) -> Machine:
    """Read the list of what a machine has."""
    versions: dict[str, Version | None] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            name, _, number = line.partition("==")
            versions[canonicalize_name(name)] = Version(number) if number else None
    python = versions.pop("python")
    assert python is not None
    return Machine(str(python), versions)


def missing_packages(pyproject: Path, machine: Machine) -> dict[str, str]:
    """The name and version of each package that Baton and its tests need, directly or not, and the machine lacks.

    Versions are those installed here, which constraints.txt decides. A package that is there, but not in a version that
    all requirements allow, is missing.
    """
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    dev = {Requirement(line).name: line for line in project["optional-dependencies"]["dev"]}
    todo = [*project["dependencies"], *(dev[name] for name in FOR_TESTS)]
    missing: dict[str, str] = {}
    while todo:
        wanted = Requirement(todo.pop())
        name = canonicalize_name(wanted.name)
        if name in missing or machine.has(wanted) or not _applies(wanted, machine):
            continue
        missing[name] = version(name)
        todo += _requires(name)
    return missing


def _requires(name: str) -> Iterator[str]:
    yield from requires(name) or ()


def _applies(wanted: Requirement, machine: Machine) -> bool:
    name = canonicalize_name(wanted.name)
    if name.startswith("nixl-cu"):
        return name == f"nixl-cu{machine.cuda}"
    environment = {"python_version": machine.python, "python_full_version": f"{machine.python}.0", "extra": ""}
    return wanted.marker is None or wanted.marker.evaluate(environment)
