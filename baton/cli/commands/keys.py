"""`baton keys`: who may call. The file has hashes; a key itself is shown once, when it is made."""

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

from baton.cli.output import ListFormat, print_json, print_note, print_table, print_text, print_yaml
from baton.errors import BatonError, ExitCode
from baton.security.access import DEFAULT_CLUSTER
from baton.security.keys import ApiKey, new_key, read_keys, write_keys
from baton.security.matrix import CallerRole

_FileArgument = Annotated[Path, typer.Argument(help="The file of keys that routers and nodes are given.")]


class _NoSuchKey(BatonError):
    exit_code = ExitCode.NOT_FOUND


class _Role(enum.StrEnum):
    """Who a key makes its owner; see baton.security.matrix."""

    CLIENT = CallerRole.CLIENT.value
    MONITOR = CallerRole.MONITOR.value
    OPERATOR = CallerRole.OPERATOR.value


def register(app: typer.Typer, name: str, text: str) -> None:
    """Add the commands."""
    group = typer.Typer(help=text, no_args_is_help=True, rich_markup_mode=None)

    @group.callback()
    def keys() -> None:
        """Say who may call. A process sees a change of the file within a second or two."""

    group.command("add")(add)
    group.command("list")(list_keys)
    group.command("revoke")(revoke)
    group.command("redis-user")(redis_user)
    app.add_typer(group, name=name)


def add(
    file: _FileArgument,
    tenant: Annotated[
        str, typer.Option(help="Whose requests, cached prefixes and quota are apart.", metavar="NAME")
    ] = "default",
    role: Annotated[
        _Role, typer.Option(help="client: generates; monitor: /metrics and /ui; operator: everything.")
    ] = _Role.CLIENT,
    max_concurrent: Annotated[
        int | None, typer.Option(help="Most requests of the tenant at once. Default: any number.", metavar="N", min=1)
    ] = None,
) -> None:
    """Make a key, print it, and write its hash to the file. It can't be shown again."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    key, entry = new_key(tenant, CallerRole(role.value), today, max_concurrent)
    with _locked(file):
        write_keys(file, [*(read_keys(file) if file.exists() else ()), entry])
    print_text(key)
    print_note(f"Key {entry.key_id} of tenant {tenant} ({role.value}). Keep it: {file} has its hash alone.")


def list_keys(
    file: _FileArgument,
    no_headers: Annotated[bool, typer.Option("--no-headers", help="Leave the header line out.")] = False,
    output: Annotated[ListFormat, typer.Option("-o", "--output", help="Output format.")] = ListFormat.TABLE,
) -> None:
    """List the keys."""
    found = read_keys(file)
    if output is ListFormat.NAME:
        for key in found:
            print_text(key.key_id)
    elif output is ListFormat.JSON:
        print_json({"version": 1, "keys": [_said(key) for key in found]})
    elif output is ListFormat.YAML:
        print_yaml({"version": 1, "keys": [_said(key) for key in found]})
    else:
        rows = [[key.key_id, key.tenant, key.role.value, str(key.max_concurrent or "-"), key.created] for key in found]
        print_table(["ID", "TENANT", "ROLE", "MAX", "CREATED"], rows, headers=not no_headers)


def revoke(
    file: _FileArgument, key_id: Annotated[str, typer.Argument(help="Its ID in the list.", metavar="ID")]
) -> None:
    """Revoke a key. Running requests continue."""
    with _locked(file):
        found = read_keys(file)
        left = [key for key in found if key.key_id != key_id]
        if len(left) == len(found):
            raise _NoSuchKey(f"{file} has no key {key_id!r}: `baton keys list {file}` has them all")
        write_keys(file, left)
    print_note(f"{key_id} is no key any more.")


def redis_user(
    cluster: Annotated[str, typer.Option(help="The cluster's name.", metavar="NAME")] = DEFAULT_CLUSTER,
) -> None:
    """Print what makes a user in Redis who may do what this cluster needs and nothing else, with a new password."""
    from baton.registry.acl import USER, acl_rules

    password = secrets.token_urlsafe(24)
    print_text(f"ACL SETUSER {USER} {' '.join(acl_rules(cluster, password))}")
    print_note(
        f"Then: --registry rediss://{USER}:{password}@HOST:6379. In a file of users the line begins with `user {USER}`."
    )


def _said(key: ApiKey) -> dict[str, object]:
    return {
        "id": key.key_id,
        "tenant": key.tenant,
        "role": key.role.value,
        "max_concurrent": key.max_concurrent,
        "created": key.created,
    }


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Two who change the file at once do so one after the other. A directory stays when its files are replaced."""
    directory = os.open(file.absolute().parent, os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        yield
    finally:
        os.close(directory)
