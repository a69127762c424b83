"""Reads the metrics page of a process, as Prometheus does."""

from __future__ import annotations

import asyncio


async def read_metrics_text(port: int) -> str:
    """Return the text of the metrics page on this port of loopback."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    body = (await reader.read()).decode().partition("\r\n\r\n")[2]
    writer.close()
    return body


async def read_metrics_samples(port: int) -> dict[str, float]:
    """Return the samples of the page by name with labels."""
    lines = (line.rpartition(" ") for line in (await read_metrics_text(port)).splitlines() if not line.startswith("#"))
    return {sample: float(value) for sample, _, value in lines}
