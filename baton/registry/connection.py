"""Connections to a Redis: their URLs, and what `baton doctor --registry` asks of the server about its memory."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from redis import asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from baton.errors import ConfigError
from baton.security.redaction import without_password

_SCHEMES = ("redis://", "rediss://", "unix://")
_TIMEOUT_S = 5.0
REDIS_ERRORS = (RedisError, OSError, asyncio.TimeoutError)
"""What an operation raises that Redis did not answer, or refused."""


def connect_redis(url: str, timeout_s: float) -> redis.Redis:
    """Make a client that connects with its first operation and never repeats one. Raises ConfigError for a bad URL."""
    check_registry_url(url)
    try:
        client: redis.Redis = redis.Redis.from_url(
            url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, retry=Retry(NoBackoff(), 0)
        )
    except (ValueError, TypeError) as error:
        raise ConfigError(f"registry {without_password(url)!r}: {error}") from None
    return client


def with_authority(url: str, ca: Path | None) -> str:
    """The URL, with the certificate authority added if it is a TLS URL without one."""
    if ca is None or not url.startswith("rediss://") or "ssl_ca_certs=" in url:
        return url
    return f"{url}{'&' if '?' in url else '?'}ssl_ca_certs={quote(str(ca))}"


def check_registry_url(url: str) -> None:
    """Raises ConfigError for a URL that can't be a registry's."""
    if not url.startswith(_SCHEMES):
        raise ConfigError(f"registry {without_password(url)!r} is no URL of Redis: use {' or '.join(_SCHEMES)}")


@dataclass(frozen=True, slots=True)
class ServerMemory:
    """The memory figures that one Redis reports."""

    used_bytes: int = 0
    max_bytes: int = 0
    """The limit; 0: the machine's memory."""
    policy: str = ""
    """The setting `maxmemory-policy`."""
    error: str = ""
    """Why the figures could not be read. All other fields are empty then."""


async def server_memory(url: str) -> ServerMemory:
    """Read the figures. Raises ConfigError for a bad URL; any other problem is in `error`."""
    client = connect_redis(url, _TIMEOUT_S)
    try:
        memory = await client.info("memory")
    except (TimeoutError, RedisError, OSError) as error:
        return ServerMemory(error=f"{without_password(url)}: {str(error) or type(error).__name__}")
    finally:
        await client.aclose()
    return ServerMemory(
        int(memory.get("used_memory", 0)), int(memory.get("maxmemory", 0)), str(memory.get("maxmemory_policy", ""))
    )
