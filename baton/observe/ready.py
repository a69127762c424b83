"""The line with which a process tells whoever started it that it is ready, or why it never will be.

One JSON object and a newline on an inherited descriptor, as in s6: nobody has to ask again and again, or to sleep.
systemd names a socket instead (sd_notify(3)), and only wants to know that it serves.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Ready:
    """The process serves."""

    incarnation: str
    address: str
    """HOST:PORT where it really listens."""
    operator_address: str = ""
    http_address: str = ""


@dataclass(frozen=True, slots=True)
class Failed:
    """The process can't start."""

    error: str
    """One line: what, and how to fix it."""
    exit_code: int


def announce(fd: int | None, news: Ready | Failed, environ: Mapping[str, str] = os.environ) -> None:
    """Write the line and close the descriptor; does nothing without one or when nobody listens any more."""
    if isinstance(news, Ready) and environ.get("NOTIFY_SOCKET"):
        _tell_systemd(environ["NOTIFY_SOCKET"])
    if fd is None:
        return
    with suppress(OSError):
        os.write(fd, json.dumps(asdict(news)).encode() + b"\n")
        os.close(fd)


def _tell_systemd(address: str) -> None:
    # An @ stands for the zero byte of a name that is in no file system.
    name = "\0" + address[1:] if address.startswith("@") else address
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.sendto(b"READY=1", name)


def parse_announcement(line: bytes) -> Ready | Failed:
    """What `announce` wrote; raises ValueError for anything else."""
    found = json.loads(line)
    try:
        return Failed(**found) if "error" in found else Ready(**found)
    except TypeError as error:
        raise ValueError(str(error)) from None


class AnnouncementReader:
    """Puts the line together from the pieces that arrive."""

    def __init__(self) -> None:
        self._seen = b""

    def feed(self, piece: bytes) -> Iterator[Ready | Failed]:
        """The announcements that this piece completes; lines that are none are skipped."""
        *lines, self._seen = (self._seen + piece).split(b"\n")
        for line in lines:
            with suppress(ValueError):
                yield parse_announcement(line)
