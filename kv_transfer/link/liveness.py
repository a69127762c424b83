"""Whether a process is gone for certain, asked of the kernel that it ran under; whether it runs, asked of itself."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Callable

from baton.wire.credentials import PLAIN, Dialer

IsRunning = Callable[[str, float], Awaitable[bool]]
"""Of the process that listens on HOST:PORT; answers within so many seconds."""

_ANSWER_S = 1.0
LOOK_AFTER_S = (0.0, 0.05, 0.2, 1.0)
"""After its link has ended a process is looked for so many times: it lets go of its sockets one by one."""
_NEW_CONNECTION = ("grpc.use_local_subchannel_pool", 1)


class Port(enum.Enum):
    """What a host says to whoever connects to one of its ports."""

    TAKEN = enum.auto()
    """A process listens there, which may be stopped."""
    FREE = enum.auto()
    """The connection is refused, as it is at once when the process there has ended."""
    SILENT = enum.auto()
    """Nothing: the host is cut off, or gone."""


async def look_at(address: str) -> Port:
    """Connect to HOST:PORT and go again."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(_ANSWER_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except ConnectionRefusedError:
        return Port.FREE
    except (OSError, ValueError, OverflowError):
        return Port.SILENT
    writer.close()
    return Port.TAKEN


async def nobody_listens(address: str) -> bool:
    """True when the host refuses a connection to HOST:PORT. False is no proof of life (see `Port`)."""
    return await look_at(address) is Port.FREE


async def is_gone(address: str, nobody_listens: Callable[[str], Awaitable[bool]] = nobody_listens) -> bool:
    """Whether a process whose link has just ended turns out to be gone within a moment."""
    for pause_s in LOOK_AFTER_S:
        await asyncio.sleep(pause_s)
        if await nobody_listens(address):
            return True
    return False


async def is_running(address: str, within_s: float, dialer: Dialer = PLAIN) -> bool:
    """Whether the process that listens on HOST:PORT greets a new connection.

    gRPC's own threads do that: they need neither the process's loop nor its interpreter, however busy those are. A
    process that was stopped greets nobody.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        # gRPC makes a channel of anything, and one to nowhere never ends.
        return False
    try:
        async with (
            dialer.channel(address, _NEW_CONNECTION) as channel,
            asyncio.timeout(within_s),
        ):
            await channel.channel_ready()
    except TimeoutError:
        return False
    return True
