"""Closes a transport whose reading may be paused."""

from __future__ import annotations

import asyncio


def close_transport(transport: asyncio.Transport) -> None:
    """Close the transport, so that its connection ends even if reading was paused when the peer closed it.

    asyncio's TLS transport handles the end of the stream only while reading is not paused, and after that end `close`
    does nothing (`SSLProtocol._start_shutdown`): without `resume_reading` the socket would stay open for ever.
    """
    transport.close()
    transport.resume_reading()
