"""The memory limit of a Redis, and what Redis does when it is reached, for `baton doctor --registry`."""

from __future__ import annotations

from dataclasses import dataclass

from redis.exceptions import RedisError

from baton.registry.registry import connect_redis
from baton.security.redaction import without_password

_TIMEOUT_S = 5.0


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
        found = await client.info("memory")
    except (TimeoutError, RedisError, OSError) as error:
        return ServerMemory(error=f"{without_password(url)}: {str(error) or type(error).__name__}")
    finally:
        await client.aclose()
    return ServerMemory(
        int(found.get("used_memory", 0)), int(found.get("maxmemory", 0)), str(found.get("maxmemory_policy", ""))
    )
