"""The table of permitted calls: every RPC and every role; and the authenticators that enforce it."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from baton.errors import PermissionDenied, Unauthenticated
from baton.security.http_access import PageAuthenticator
from baton.security.keys import ApiKey, KeyRing, new_key, write_keys
from baton.security.matrix import (
    CERTIFICATE_ROLES,
    KEY_ROLES,
    CallerRole,
    callers_of_page,
    callers_of_rpc,
    certificate_name,
    certificate_role,
    current_caller,
)
from baton.wire.authenticator import Authenticator
from tests.support.rpc_methods import METHODS

EXPECTED = {
    "/baton.v1.Generation/": {"client", "operator"},
    "/baton.v1.Operator/GetStatus": {"router", "operator"},
    "/baton.v1.Operator/": {"operator"},
    "/baton.v1.Node/Attach": {"router"},
    "/baton.v1.Node/Describe": {"router", "node", "operator"},
    "/baton.v1.Node/": {"router", "operator"},
    "/baton.v1.KvLink/": {"node"},
    "/baton.v1.EncoderRows/": {"node"},
    "/grpc.health.": {"anyone"},
    "/grpc.reflection.": {"router", "node", "operator", "client", "monitor"},
}
"""Written once more, and differently: the first prefix that fits counts."""
PAGES = {
    "/livez": None,
    "/readyz": None,
    "/health": None,
    "/metrics": {"monitor", "operator"},
    "/metrics/": {"monitor", "operator"},
    "/ui": {"monitor", "operator"},
    "/ui/data": {"monitor", "operator"},
    "/": None,
    "/docs": None,
    "/openapi.json": None,
    "//": {"client", "monitor", "operator"},
    "/version": {"client", "monitor", "operator"},
    "/tokenize": {"client", "operator"},
    "/detokenize": {"client", "operator"},
    "/v1/models": {"client", "operator"},
    "/v1/load_lora_adapter": {"operator"},
    "/v1/unload_lora_adapter": {"operator"},
    "/v1//load_lora_adapter/": {"operator"},
    "/v1/completions": {"client", "operator"},
    "/nothing": {"client", "monitor", "operator"},
    "/livez/../metrics": None,
    "//metrics": {"client", "monitor", "operator"},
    "/Metrics": {"client", "monitor", "operator"},
}


def expected(method: str) -> set[str]:
    return next(roles for prefix, roles in EXPECTED.items() if method.startswith(prefix))


def context(*names: str) -> Any:
    return SimpleNamespace(auth_context=lambda: {"peer_dns": [name.encode() for name in names]} if names else {})


@pytest.fixture
def keys(tmp_path: Path) -> tuple[KeyRing, dict[CallerRole, str]]:
    made: list[tuple[str, ApiKey]] = [new_key(role.value, role, "") for role in KEY_ROLES]
    write_keys(tmp_path / "keys", [entry for _, entry in made])
    return KeyRing(tmp_path / "keys"), {entry.role: key for key, entry in made}


@pytest.mark.parametrize("method", METHODS)
def test_every_rpc_is_in_the_table(method: str) -> None:
    assert {role.value for role in callers_of_rpc(method)} == expected(method)


def test_calls_that_are_not_in_the_table_are_refused() -> None:
    for method in ("/baton.v1.Node/Reboot", "/other.Service/Do", "", "/", "baton.v1.Node", "/baton.v1.Node/*"):
        assert callers_of_rpc(method) == frozenset()


@pytest.mark.parametrize(("method", "role"), list(itertools.product(METHODS, CERTIFICATE_ROLES)))
def test_a_certificate_allows_the_calls_of_its_role(method: str, role: CallerRole) -> None:
    authenticator = Authenticator(cluster="c")
    caller = context("some.host", certificate_name(role, "c"))
    if role.value in expected(method):
        authenticator.check_certificate(method, caller)
    else:
        with pytest.raises(PermissionDenied):
            authenticator.check_certificate(method, caller)


def test_certificates_of_other_clusters_or_without_a_role_are_refused() -> None:
    authenticator = Authenticator(cluster="c")
    for names in ((), ("router.d.baton",), ("router.c.baton.evil",), ("*.c.baton",), ("client.c.baton",), ("router",)):
        assert certificate_role(list(names), "c") is None
        with pytest.raises(PermissionDenied):
            authenticator.check_certificate("/baton.v1.Node/Attach", context(*names))
    Authenticator().check_certificate("/baton.v1.Node/Attach", context())


@pytest.mark.parametrize(("method", "role"), list(itertools.product(METHODS, KEY_ROLES)))
def test_a_key_allows_the_calls_of_its_role(
    keys: tuple[KeyRing, dict[CallerRole, str]], method: str, role: CallerRole
) -> None:
    ring, by_role = keys
    authenticator = Authenticator(ring, now=lambda: 0.0)
    metadata = [("user-agent", "x"), ("authorization", f"Bearer {by_role[role]}")]
    if expected(method) & {role.value, "anyone"}:
        authenticator.check_key(method, metadata)
        assert "anyone" in expected(method) or current_caller.get().tenant == role.value
    else:
        with pytest.raises(PermissionDenied):
            authenticator.check_key(method, metadata)
    for wrong in (None, [], [("authorization", "Bearer nonsense")], [("authorization", b"\xff")]):
        if "anyone" in expected(method):
            authenticator.check_key(method, wrong)
        else:
            with pytest.raises(Unauthenticated):
                authenticator.check_key(method, wrong)
    Authenticator().check_key(method, None)


@pytest.mark.parametrize(("path", "role"), list(itertools.product(PAGES, KEY_ROLES)))
def test_a_key_allows_the_pages_of_its_role(
    keys: tuple[KeyRing, dict[CallerRole, str]], path: str, role: CallerRole
) -> None:
    ring, by_role = keys
    authenticator, allowed = PageAuthenticator("127.0.0.1", "", ring, now=lambda: 0.0), PAGES[path]
    assert callers_of_page(path)
    sent = [(b"host", b"localhost:8000"), (b"authorization", f"Bearer {by_role[role]}".encode())]
    if allowed is None:
        authenticator.check(path, [])
        authenticator.check(path, sent)
        return
    if role.value in allowed:
        assert authenticator.check(path, sent).tenant == role.value
    else:
        with pytest.raises(PermissionDenied):
            authenticator.check(path, sent)
    for wrong in ([], [(b"authorization", b"Bearer x")], [(b"authorization", b"\xff")]):
        with pytest.raises(Unauthenticated):
            authenticator.check(path, wrong)


@pytest.mark.parametrize(
    ("host", "allowed", "served", "refused"),
    [
        (
            "127.0.0.1",
            "",
            ["localhost", "127.0.0.1:8000", "[::1]:8000", "LOCALHOST:1"],
            ["evil.example", "10.0.0.1", ""],
        ),
        ("127.0.0.1", "chat.example, b", ["localhost", "chat.example:443", "b"], ["evil.example", "xchat.example"]),
        ("0.0.0.0", "", ["anything", "10.0.0.1"], []),
        ("0.0.0.0", "chat.example", ["chat.example", "localhost"], ["10.0.0.1", "localhost.evil.example"]),
        ("127.0.0.1", "*", ["evil.example"], []),
    ],
)
def test_a_forged_host_is_refused_on_loopback(host: str, allowed: str, served: list[str], refused: list[str]) -> None:
    authenticator = PageAuthenticator(host, allowed)
    for name in served:
        authenticator.check("/livez", [(b"host", name.encode())])
    for name in refused:
        with pytest.raises(PermissionDenied):
            authenticator.check("/livez", [(b"host", name.encode())])
        with pytest.raises(PermissionDenied):
            authenticator.check("/livez", [(b"host", b"localhost"), (b"host", name.encode())])
    authenticator.check("/livez", [])
