"""The sockets on which a process listens, read from /proc."""

from __future__ import annotations

import ipaddress
import os
import re
from pathlib import Path

_LISTEN = "0A"
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def listening_sockets(pid: int) -> set[tuple[Address, int]]:
    """Return address and port of every TCP socket on which the process listens."""
    inodes = _sockets(pid)
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTEN and fields[9] in inodes:
                host, _, port = fields[1].partition(":")
                found.add((_address(host), int(port, 16)))
    return found


def _sockets(pid: int) -> set[str]:
    found = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            named = re.match(r"socket:\[(\d+)\]", os.readlink(descriptor))
        except OSError:
            continue
        if named:
            found.add(named[1])
    return found


def _address(text: str) -> Address:
    """Parse an address of /proc/net/tcp: words of four bytes in host order. IPv4-mapped IPv6 addresses become IPv4."""
    words = [bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8)]
    address = ipaddress.ip_address(b"".join(words))
    return getattr(address, "ipv4_mapped", None) or address
