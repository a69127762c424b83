"""API keys: the file of hashes, the caller of a key, and changes that a running process notices."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.errors import ConfigError, Unauthenticated
from baton.security.http_access import key_from_authorization
from baton.security.json_lines import lines_of_values
from baton.security.keys import (
    MAX_KEY_CHARS,
    KeyFile,
    KeyRing,
    bearer_key,
    new_key,
    read_key_file,
    write_keys,
)
from baton.security.matrix import CallerRole
from baton.security.quotas import NO_QUOTAS, KeyClass, Quotas


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
    write_keys(file, [*(read_key_file(file).keys if file.exists() else ()), entry])
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
    assert found.key_id == read_key_file(file).keys[0].sha256[:8]
    for wrong in ("", client[:-1], client + "x", client.upper(), read_key_file(file).keys[0].sha256, "\ud800", "ß"):
        with pytest.raises(Unauthenticated):
            ring.caller(wrong, 0.0)


def test_a_key_may_have_a_smallest_priority_and_others_are_written_as_before(file: Path) -> None:
    urgent, other = add(file, min_priority=-(2**31)), add(file)
    ring = KeyRing(file)
    assert [ring.caller(key, 0.0).min_priority for key in (urgent, other)] == [-(2**31), None]
    content = json.loads(file.read_text())
    assert ["min_priority" in entry for entry in content["keys"]] == [True, False]
    assert set(content) == {"version", "keys"}
    assert set(content["keys"][1]) == {"sha256", "tenant", "role", "max_concurrent", "created"}


def test_a_caller_has_what_the_file_says_of_its_key_and_of_its_tenant(file: Path) -> None:
    limited, other = add(file, most=5), add(file)
    file.write_text(
        json.dumps(
            {
                **json.loads(file.read_text()),
                "tenants": {"acme": {"weight": 3, "max_concurrent": 9, "tokens_per_day": 1000}},
            }
        )
    )
    keys = read_key_file(file)
    own = replace(keys.keys[1], service_class=KeyClass.BATCH, quotas=Quotas(max_concurrent=2, requests_per_minute=7))
    write_keys(file, [keys.keys[0], own], keys.tenants)
    assert read_key_file(file) == KeyFile([keys.keys[0], own], keys.tenants)
    ring = KeyRing(file)
    first, second = ring.caller(limited, 0.0), ring.caller(other, 0.0)
    assert (first.weight, first.service_class, first.max_concurrent, first.key_quotas) == (3.0, "", 5, NO_QUOTAS)
    assert (second.service_class, second.max_concurrent) == ("batch", 9)
    assert second.key_quotas == own.quotas
    assert first.tenant_quotas == second.tenant_quotas == Quotas(max_concurrent=9, tokens_per_day=1000)


def test_all_requests_of_a_tenant_are_counted_if_one_of_its_keys_has_a_limit(file: Path) -> None:
    keys = add(file, most=5), add(file), add(file, "other")
    assert [KeyRing(file).caller(key, 0.0).has_quotas for key in keys] == [True, True, False]


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
    write_keys(file, read_key_file(file).keys[1:])
    with pytest.raises(Unauthenticated):
        ring.caller(first, 12.0)
    assert ring.caller(second, 12.0).tenant == "other"


def test_an_unreadable_file_leaves_the_known_keys_valid(file: Path) -> None:
    key = add(file)
    ring = KeyRing(file)
    for number, broken in enumerate(("{", file.read_text().replace('"role": "client"', '"role": "king"'))):
        file.write_text(broken)
        assert ring.caller(key, 10.0 + number).tenant == "acme"
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
        ({"class": "urgnt"}, "line 4: class must be batch, normal, urgent or null, not 'urgnt'"),
        ({"class": []}, "line 4: class must be"),
        ({"tokens_per_minute": 0}, "line 4: tokens_per_minute must be a whole number of 1 to 1000000000, or null"),
        ({"tokens_per_day": True}, "line 4: tokens_per_day must be"),
        ({"requests_per_minute": 1.5}, "line 4: requests_per_minute must be"),
        ({"max_concurrent_of_key": 10**9 + 1}, "line 4: max_concurrent_of_key must be"),
        ({"tenants": {"a": {}, "b": {"weight": 0}}}, "line 14: tenant 'b': weight must be a number of 0.01 to 1000"),
        ({"tenants": {"b": {"weight": float("nan")}}}, "line 13: tenant 'b': weight must be"),
        ({"tenants": {"b": {"weight": "3"}}}, "line 13: tenant 'b': weight must be"),
        ({"tenants": {"b": {"wait": 1}}}, "line 13: tenant 'b': a tenant may have weight, max_concurrent"),
        ({"tenants": {"b": []}}, "line 13: tenant 'b': a tenant may have"),
        ({"tenants": {"B": {}}}, "line 13: tenant 'B': .*lower-case"),
        ({"tenants": []}, "line 12: tenants must be an object"),
        ({"version": 1, "teants": {}}, "line 12: 'teants' is unknown"),
    ],
)
def test_an_invalid_file_is_refused_with_its_name(file: Path, change: dict[str, object], said: str) -> None:
    add(file)
    content = json.loads(file.read_text())
    (content if {"version", "keys", "tenants"} & set(change) else content["keys"][0]).update(change)
    file.write_text(json.dumps(content, indent=2))
    with pytest.raises(ConfigError, match=said):
        KeyRing(file)


def test_a_file_with_values_that_are_nested_too_deep_is_refused_as_others_are(file: Path) -> None:
    file.write_text('{"version": 1, "keys": ' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(ConfigError, match="nested too deep"):
        KeyRing(file)


class CountedText(str):
    """A text that notes how many of its characters were looked at for line ends."""

    num_counted = 0

    def count(self, sub: str, start: Any = 0, end: Any = None, /) -> int:
        self.num_counted += end - start
        return super().count(sub, start, end)


def test_the_lines_of_a_large_file_are_counted_once() -> None:
    text = CountedText(json.dumps([{"a": number} for number in range(100)], indent=1))
    assert lines_of_values(text)[99, "a"] == 300
    assert text.num_counted <= len(text)


def test_a_missing_file_is_an_error(file: Path) -> None:
    with pytest.raises(ConfigError, match="baton keys add"):
        KeyRing(file)


def test_a_key_is_read_from_bearer_and_basic_headers() -> None:
    assert bearer_key("Bearer k") == bearer_key("bearer  k ") == "k"
    assert bearer_key("Basic k") == bearer_key("k") == bearer_key("") == ""
    assert key_from_authorization("Basic eDpr") == "k"
    assert key_from_authorization("Basic !") == key_from_authorization("Basic /w==") == ""
