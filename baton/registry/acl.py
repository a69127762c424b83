"""The access rules of the Redis user of one cluster: its keys, its channel, and the commands that Baton uses."""

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
    """The rules that follow `ACL SETUSER NAME`, or `user NAME` in an ACL file, for Redis 6.2 and later."""
    commands = [f"+{command}" for _, group in _COMMANDS for command in group]
    where = (f"~baton:{cluster}:*", f"&baton:{cluster}:*")
    return ["reset", "resetchannels", "on", f">{password}", *where, "-@all", *commands]
