"""Checks the address on which a process listens: any but a loopback address needs TLS and keys, or --insecure."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from baton.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Protection:
    """The protection against unknown callers with which a process was started."""

    has_tls: bool
    has_keys: bool
    insecure: bool
    """Whether the operator has stated, by --insecure, that no protection is needed."""


def is_loopback(host: str) -> bool:
    """Whether HOST can be reached from this machine alone. All names but localhost count as reachable from others."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_bind(host: str, protection: Protection, *, needs_keys: bool) -> None:
    """Raise ConfigError for an address that other machines reach if TLS is missing, or keys where they are needed.

    `needs_keys`: the process has ports for callers other than the cluster's own processes.
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
            f"other machines can reach {host}: give {' and '.join(missing)}, listen on --host 127.0.0.1, "
            "or give --insecure if this network is trusted"
        )
