"""Reading a process' metrics page, as Prometheus does."""

from __future__ import annotations

import asyncio


async def text_at(port: int) -> str:
    """The page of a process."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    body = (await reader.read()).decode().partition("\r\n\r\n")[2]
    writer.close()
    return body


async def samples_at(port: int) -> dict[str, float]:
    """Its samples, by name with labels."""
    lines = (line.rpartition(" ") for line in (await text_at(port)).splitlines() if not line.startswith("#"))
    return {sample: float(value) for sample, _, value in lines}
