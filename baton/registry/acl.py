"""The Redis user of one cluster: its own keys, its own channel, and the commands that are used here."""

from __future__ import annotations

from collections.abc import Sequence

USER = "baton"
_COMMANDS = (
    ("connection", ("auth", "hello", "ping", "multi", "exec")),
    ("records", ("get", "mget", "set", "del", "pexpire", "incrby")),
    ("sets", ("smembers", "sadd", "srem")),
    ("notices", ("publish", "subscribe", "unsubscribe")),
)


def acl_rules(cluster: str, password: str) -> Sequence[str]:
    """The words behind `ACL SETUSER NAME`, or behind `user NAME` in a file; for Redis 6.2 and later."""
    commands = [f"+{command}" for _, some in _COMMANDS for command in some]
    where = (f"~baton:{cluster}:*", f"&baton:{cluster}:*")
    return ["reset", "resetchannels", "on", f">{password}", *where, "-@all", *commands]
