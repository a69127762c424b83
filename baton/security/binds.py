"""Where a process may listen. Loopback needs nothing; any other address needs protection, or a word that it is safe."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from baton.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Protection:
    """What a process was given against callers that it does not know."""

    has_tls: bool
    has_keys: bool
    insecure: bool
    """Whoever started it said that it needs none."""


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches HOST. Names other than localhost may be anything and count as reachable."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_bind(host: str, protection: Protection, *, needs_keys: bool) -> None:
    """Raises ConfigError for an address that others reach, without TLS, or without keys where people call.

    `needs_keys`: it has ports for others than the cluster's own processes.
    """
    if protection.insecure or is_loopback(host):
        return
    missing = []
    if not protection.has_tls:
        missing.append("--tls-cert, --tls-key and --tls-ca (`baton certs init DIR` makes them)")
    if needs_keys and not protection.has_keys:
        missing.append("--api-keys (`baton keys add FILE` makes one)")
    if missing:
        raise ConfigError(
            f"others reach {host}: give {' and '.join(missing)}, listen on --host 127.0.0.1, "
            "or say --insecure if this network is trusted"
        )
