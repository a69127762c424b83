"""`baton keys`: manages API keys. Their file has only hashes; a key is shown once, when it is created."""

from __future__ import annotations

import datetime
import enum
import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from baton.cli.output import (
    VERSION,
    ListFormat,
    ListOutputOption,
    NoHeadersOption,
    print_json,
    print_note,
    print_table,
    print_text,
    print_yaml,
)
from baton.errors import BatonError, ExitCode
from baton.messages.request_limits import MAX_PRIORITY, MIN_PRIORITY
from baton.security.access import DEFAULT_CLUSTER
from baton.security.keys import ApiKey, new_key, read_keys, write_keys
from baton.security.matrix import CallerRole

_FileArgument = Annotated[Path, typer.Argument(help="File of keys, as given to routers and nodes.")]


class _NoSuchKey(BatonError):
    exit_code = ExitCode.NOT_FOUND


class _Role(enum.StrEnum):
    """The role of a caller with a key (`baton.security.matrix`)."""

    CLIENT = CallerRole.CLIENT.value
    MONITOR = CallerRole.MONITOR.value
    OPERATOR = CallerRole.OPERATOR.value


def register(app: typer.Typer, name: str, text: str) -> None:
    """Add the commands."""
    group = typer.Typer(help=text, no_args_is_help=True, rich_markup_mode=None)

    @group.callback()
    def keys() -> None:
        """Manage API keys. Processes notice a change of the file within two seconds."""

    group.command("add")(add)
    group.command("list")(list_keys)
    group.command("revoke")(revoke)
    group.command("redis-user")(redis_user)
    app.add_typer(group, name=name)


def add(
    file: _FileArgument,
    tenant: Annotated[
        str,
        typer.Option(
            help="Tenant of the key. Requests, cached prefixes and quotas of tenants are separate.", metavar="NAME"
        ),
    ] = "default",
    role: Annotated[
        _Role, typer.Option(help="client may generate, monitor may read /metrics and /ui, operator may do everything.")
    ] = _Role.CLIENT,
    max_concurrent: Annotated[
        int | None,
        typer.Option(
            help="Largest number of concurrent requests of the tenant. Default: no limit.", metavar="N", min=1
        ),
    ] = None,
    min_priority: Annotated[
        int | None,
        typer.Option(
            help="Smallest priority that requests with this key may ask for; smaller numbers come first. Default: "
            "the routers' --min-priority.",
            metavar="N",
            min=MIN_PRIORITY,
            max=MAX_PRIORITY,
        ),
    ] = None,
) -> None:
    """Create a key, print it, and write its hash to the file. The key can't be shown again."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    key, entry = new_key(tenant, CallerRole(role.value), today, max_concurrent, min_priority)
    with _locked(file):
        write_keys(file, [*(read_keys(file) if file.exists() else ()), entry])
    print_text(key)
    print_note(f"Created key {entry.key_id} of tenant {tenant} ({role.value}). Store it now: {file} has only its hash.")


def list_keys(
    file: _FileArgument,
    no_headers: NoHeadersOption = False,
    output: ListOutputOption = ListFormat.TABLE,
) -> None:
    """List the keys."""
    found = read_keys(file)
    if output is ListFormat.NAME:
        for key in found:
            print_text(key.key_id)
    elif output is ListFormat.JSON:
        print_json({"version": VERSION, "keys": [_key_json(key) for key in found]})
    elif output is ListFormat.YAML:
        print_yaml({"version": VERSION, "keys": [_key_json(key) for key in found]})
    else:
        print_table(
            ["ID", "TENANT", "ROLE", "MAX", "PRIORITY", "CREATED"], [_row(key) for key in found], headers=not no_headers
        )


def revoke(
    file: _FileArgument,
    key_id: Annotated[str, typer.Argument(help="ID of the key, as `baton keys list` prints it.", metavar="ID")],
) -> None:
    """Revoke a key. Running requests continue."""
    with _locked(file):
        found = read_keys(file)
        remaining = [key for key in found if key.key_id != key_id]
        if len(remaining) == len(found):
            raise _NoSuchKey(f"{file} has no key {key_id!r}: see `baton keys list {file}`")
        write_keys(file, remaining)
    print_note(f"Key {key_id} is revoked.")


def redis_user(
    cluster: Annotated[str, typer.Option(help="Name of the cluster.", metavar="NAME")] = DEFAULT_CLUSTER,
) -> None:
    """Print a Redis command that creates a user with the rights that this cluster needs and a new password."""
    from baton.registry.embedded import USER, acl_rules

    password = secrets.token_urlsafe(24)
    print_text(f"ACL SETUSER {USER} {' '.join(acl_rules(cluster, password))}")
    print_note(
        f"Then use --registry rediss://{USER}:{password}@HOST:6379. In an ACL file the line begins with `user {USER}`."
    )


def _row(key: ApiKey) -> list[str]:
    most, least = key.max_concurrent or "-", "-" if key.min_priority is None else key.min_priority
    return [key.key_id, key.tenant, key.role.value, str(most), str(least), key.created]


def _key_json(key: ApiKey) -> dict[str, object]:
    return {
        "id": key.key_id,
        "tenant": key.tenant,
        "role": key.role.value,
        "max_concurrent": key.max_concurrent,
        "min_priority": key.min_priority,
        "created": key.created,
    }


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Serialise changes of the file, by a lock on its directory, because the file itself is replaced."""
    directory = os.open(file.absolute().parent, os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        yield
    finally:
        os.close(directory)
