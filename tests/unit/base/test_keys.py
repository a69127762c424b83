"""API keys: the file of hashes, the caller of a key, and changes that a running process notices."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from baton.errors import ConfigError, Unauthenticated
from baton.security.http_access import key_from_authorization
from baton.security.keys import MAX_KEY_CHARS, KeyRing, bearer_key, new_key, read_keys, write_keys
from baton.security.matrix import CallerRole


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def add(
    file: Path,
    tenant: str = "acme",
    role: CallerRole = CallerRole.CLIENT,
    most: int | None = None,
    min_priority: int | None = None,
) -> str:
    key, entry = new_key(tenant, role, "2026-01-02", most, min_priority)
    write_keys(file, [*(read_keys(file) if file.exists() else ()), entry])
    return key


def test_the_file_has_hashes_only_and_is_readable_by_its_owner_only(file: Path) -> None:
    key = add(file)
    assert key not in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    assert len(key) > 43
    assert key != add(file)


def test_a_key_identifies_its_tenant_and_role(file: Path) -> None:
    client, operator = add(file, "acme", most=3), add(file, "ops", CallerRole.OPERATOR)
    ring = KeyRing(file)
    found = ring.caller(client, 0.0)
    assert (found.tenant, found.role, found.max_concurrent) == ("acme", CallerRole.CLIENT, 3)
    assert ring.caller(operator, 0.0).role is CallerRole.OPERATOR
    assert found.key_id == read_keys(file)[0].sha256[:8]
    for wrong in ("", client[:-1], client + "x", client.upper(), read_keys(file)[0].sha256, "\ud800", "ß"):
        with pytest.raises(Unauthenticated):
            ring.caller(wrong, 0.0)


def test_a_key_may_have_a_smallest_priority_and_others_are_written_as_before(file: Path) -> None:
    urgent, other = add(file, min_priority=-(2**31)), add(file)
    ring = KeyRing(file)
    assert [ring.caller(key, 0.0).min_priority for key in (urgent, other)] == [-(2**31), None]
    assert ["min_priority" in entry for entry in json.loads(file.read_text())["keys"]] == [True, False]


def test_a_key_that_is_too_long_is_not_hashed(file: Path) -> None:
    key = add(file)
    ring = KeyRing(file)
    assert len(key) <= MAX_KEY_CHARS
    with pytest.raises(Unauthenticated, match="is unknown or has been removed"):
        ring.caller("x" * MAX_KEY_CHARS, 0.0)
    with pytest.raises(Unauthenticated, match="the API key has 1048576 characters"):
        ring.caller("x" * (1 << 20), 0.0)


def test_a_change_of_the_file_is_seen_within_a_second(file: Path) -> None:
    first = add(file)
    ring = KeyRing(file)
    ring.caller(first, 10.0)
    second = add(file, "other")
    with pytest.raises(Unauthenticated):
        ring.caller(second, 10.5)
    assert ring.caller(second, 11.0).tenant == "other"
    write_keys(file, read_keys(file)[1:])
    with pytest.raises(Unauthenticated):
        ring.caller(first, 12.0)
    assert ring.caller(second, 12.0).tenant == "other"


def test_an_unreadable_file_leaves_the_known_keys_valid(file: Path) -> None:
    key = add(file)
    ring = KeyRing(file)
    file.write_text("{")
    assert ring.caller(key, 10.0).tenant == "acme"
    os.unlink(file)
    assert ring.caller(key, 20.0).tenant == "acme"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": 2}, "version"),
        ({"keys": 1}, "not a file of API keys"),
        ({"keys": [{}]}, "has the fields"),
        ({"role": "router"}, "a key can.t have the role router"),
        ({"role": "king"}, "king"),
        ({"sha256": "ab"}, "sha256 has a wrong length"),
        ({"max_concurrent": 0}, "max_concurrent"),
        ({"min_priority": -(2**31) - 1}, "min_priority must be"),
        ({"min_priority": True}, "min_priority must be"),
        ({"tenant": "Acme Inc."}, "tenant"),
        ({"tenant": "a/b"}, "tenant"),
        ({"tenant": ""}, "tenant"),
        ({"extra": 1}, "has the fields"),
    ],
)
def test_an_invalid_file_is_refused_with_its_name(file: Path, change: dict[str, object], said: str) -> None:
    add(file)
    content = json.loads(file.read_text())
    (content if {"version", "keys"} & set(change) else content["keys"][0]).update(change)
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=said):
        KeyRing(file)


def test_a_missing_file_is_an_error(file: Path) -> None:
    with pytest.raises(ConfigError, match="baton keys add"):
        KeyRing(file)


def test_a_key_is_read_from_bearer_and_basic_headers() -> None:
    assert bearer_key("Bearer k") == bearer_key("bearer  k ") == "k"
    assert bearer_key("Basic k") == bearer_key("k") == bearer_key("") == ""
    assert key_from_authorization("Basic eDpr") == "k"
    assert key_from_authorization("Basic !") == key_from_authorization("Basic /w==") == ""
