"""How a process tells the one that started it that it is ready, or why it can't start.

It writes one JSON object and a newline to an inherited descriptor, as with s6, so that the parent neither polls nor
sleeps. systemd passes a socket instead (sd_notify(3)), and is told only that the process serves.
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
    """HOST:PORT where it listens, with the port that it got."""
    operator_address: str = ""
    http_address: str = ""


@dataclass(frozen=True, slots=True)
class Failed:
    """The process can't start."""

    error: str
    """One line: what failed, and how to fix it."""
    exit_code: int


def announce(fd: int | None, news: Ready | Failed, environ: Mapping[str, str] = os.environ) -> None:
    """Write the line and close the descriptor; does nothing without a descriptor, or when nobody reads from it."""
    if isinstance(news, Ready) and environ.get("NOTIFY_SOCKET"):
        _tell_systemd(environ["NOTIFY_SOCKET"])
    if fd is None:
        return
    with suppress(OSError):
        os.write(fd, json.dumps(asdict(news)).encode() + b"\n")
        os.close(fd)


def _tell_systemd(address: str) -> None:
    # An @ stands for the zero byte with which abstract socket names begin (unix(7)).
    name = "\0" + address[1:] if address.startswith("@") else address
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.sendto(b"READY=1", name)


def parse_announcement(line: bytes) -> Ready | Failed:
    """Parse a line that `announce` wrote; raises ValueError for any other."""
    announcement = json.loads(line)
    try:
        return Failed(**announcement) if "error" in announcement else Ready(**announcement)
    except TypeError as error:
        raise ValueError(str(error)) from None


class AnnouncementReader:
    """Puts announcements together from the pieces that arrive."""

    def __init__(self) -> None:
        self._partial_line = b""

    def feed(self, piece: bytes) -> Iterator[Ready | Failed]:
        """The announcements that this piece completes; other lines are skipped."""
        *lines, self._partial_line = (self._partial_line + piece).split(b"\n")
        for line in lines:
            with suppress(ValueError):
                yield parse_announcement(line)
