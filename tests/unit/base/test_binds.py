"""Loopback addresses may be used unprotected; any other address needs protection, or an explicit --insecure."""

from __future__ import annotations

import pytest

from baton.errors import ConfigError, ExitCode
from baton.security.binds import Protection, check_bind, is_loopback


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "[::1]", "localhost", "LOCALHOST"])
def test_loopback_addresses_need_no_protection(host: str) -> None:
    assert is_loopback(host)
    check_bind(host, Protection(False, False, False), needs_keys=True)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "192.0.2.1", "gpu-1", "localhost.example", "127.0.0.1.example"])
def test_other_addresses_need_tls_and_keys(host: str) -> None:
    def refusal(tls: bool, keys: bool, needs_keys: bool = True) -> str:
        with pytest.raises(ConfigError) as caught:
            check_bind(host, Protection(tls, keys, insecure=False), needs_keys=needs_keys)
        assert caught.value.exit_code is ExitCode.BAD_CONFIG
        return str(caught.value)

    assert "--tls-cert" in refusal(False, False)
    assert "--api-keys" in refusal(False, False)
    assert "--api-keys" not in refusal(False, True)
    assert "--tls-cert" not in refusal(True, False)
    assert "--api-keys" not in refusal(False, False, needs_keys=False)
    assert "--insecure" in refusal(True, False)
    check_bind(host, Protection(True, True, False), needs_keys=True)
    check_bind(host, Protection(True, False, False), needs_keys=False)
    check_bind(host, Protection(False, False, insecure=True), needs_keys=True)
