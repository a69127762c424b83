"""Whether a process is gone for certain, asked of the kernel that it ran under."""

from __future__ import annotations

import asyncio

_ANSWER_S = 1.0


async def nobody_listens(address: str) -> bool:
    """True when the host refuses a connection to HOST:PORT, as it does at once when the process there has ended.

    False is no proof of life: a stopped process accepts connections, and a host that is cut off answers nothing.
    """
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(_ANSWER_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except ConnectionRefusedError:
        return True
    except (OSError, ValueError, OverflowError):
        return False
    writer.close()
    return False
