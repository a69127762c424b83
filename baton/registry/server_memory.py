"""What a Redis does when its memory is full: asked for by `baton doctor --registry`."""

from __future__ import annotations

from dataclasses import dataclass

from redis.exceptions import RedisError

from baton.registry.registry import connect_redis
from baton.security.redaction import without_password

_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class ServerMemory:
    """The memory of one Redis, as it says itself."""

    used_bytes: int = 0
    max_bytes: int = 0
    """0: as much as the machine has."""
    policy: str = ""
    """Its `maxmemory-policy`."""
    error: str = ""
    """Why it can't be told; everything else is empty then."""


async def server_memory(url: str) -> ServerMemory:
    """Ask it. Raises ConfigError for a URL that can't be meant, and for nothing else."""
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
