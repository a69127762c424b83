"""Finds out from a process's host whether the process has ended, and from the process itself whether it runs."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import grpc

from baton.wire.credentials import PLAINTEXT_DIALER, Dialer

IsRunning = Callable[[str, float], Awaitable[bool]]
"""Whether the process that listens on HOST:PORT runs; answers within so many seconds."""

_ANSWER_S = 1.0
"""How long a host may take to accept or refuse a connection."""
PROBE_DELAYS_S = (0.0, 0.05, 0.2, 1.0)
"""After its link has ended a process is probed this often, after these pauses: it closes its sockets one by one."""
_NEW_CONNECTION = ("grpc.use_local_subchannel_pool", 1)


class PortState(enum.Enum):
    """How a host answers a connection to one of its ports."""

    LISTENING = enum.auto()
    """A process listens there, though it may be stopped."""
    REFUSED = enum.auto()
    """The connection is refused, as it is as soon as the process there has ended."""
    SILENT = enum.auto()
    """There is no answer: the host can't be reached, or has gone down."""


async def probe_port(address: str) -> PortState:
    """Connect to HOST:PORT and close the connection again."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(_ANSWER_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except ConnectionRefusedError:
        return PortState.REFUSED
    except (OSError, ValueError, OverflowError):
        return PortState.SILENT
    writer.close()
    return PortState.LISTENING


async def nobody_listens(address: str) -> bool:
    """Whether the host refuses a connection to HOST:PORT. False is no proof of life (see `PortState`)."""
    return await probe_port(address) is PortState.REFUSED


async def has_ended(address: str, nobody_listens: Callable[[str], Awaitable[bool]] = nobody_listens) -> bool:
    """Whether the process at HOST:PORT, whose link has just ended, turns out to have ended within two seconds."""
    for pause_s in PROBE_DELAYS_S:
        await asyncio.sleep(pause_s)
        if await nobody_listens(address):
            return True
    return False


async def is_running(address: str, within_s: float, dialer: Dialer = PLAINTEXT_DIALER) -> bool:
    """Whether the process that listens on HOST:PORT answers the handshake of a new gRPC connection.

    gRPC's own threads answer it: they need neither the process's event loop nor its interpreter, however busy those
    are. A process that was stopped does not answer.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        # gRPC makes a channel to any string, and one that is no address would never fail.
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


@dataclass(frozen=True, slots=True)
class PeerAccess:
    """How a node reaches the processes of others, and finds out whether they run."""

    make_channel: Callable[[str], grpc.aio.Channel]
    is_running: IsRunning = is_running
    probe_port: Callable[[str], Awaitable[PortState]] = probe_port

    @classmethod
    def of(cls, dialer: Dialer) -> PeerAccess:
        """By the channels of this dialer."""
        return cls(dialer.channel, partial(is_running, dialer=dialer))


DIRECT = PeerAccess.of(PLAINTEXT_DIALER)
