"""`baton keys` and `baton certs`: the API keys and the certificates of a cluster."""

from __future__ import annotations

import datetime
import enum
import fcntl
import os
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from baton.cli.commands import add_group
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
from baton.errors import BatonError, ConfigError, ExitCode, UsageError
from baton.messages.request_limits import MAX_PRIORITY, MIN_PRIORITY
from baton.security.access import DEFAULT_CLUSTER
from baton.security.keys import ApiKey, new_key, read_keys, write_keys
from baton.security.matrix import CallerRole

_FileArgument = Annotated[Path, typer.Argument(help="File of keys, as given to routers and nodes.")]
_LOCAL = ("localhost", "127.0.0.1", "::1")


def register(app: typer.Typer, name: str, text: str) -> None:
    """Add one of the commands."""
    if name == "certs":
        add_group(app, name, text, "Create the certificates of a cluster.", {"init": init})
    else:
        about = "Manage API keys. Processes notice a change of the file within two seconds."
        commands: Mapping[str, Callable[..., Any]] = {
            "add": add,
            "list": list_keys,
            "revoke": revoke,
            "redis-user": redis_user,
        }
        add_group(app, name, text, about, commands)


class _NoSuchKey(BatonError):
    exit_code = ExitCode.NOT_FOUND


class _Role(enum.StrEnum):
    """The role of a caller with a key (`baton.security.matrix`)."""

    CLIENT = CallerRole.CLIENT.value
    MONITOR = CallerRole.MONITOR.value
    OPERATOR = CallerRole.OPERATOR.value


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
    entries = read_keys(file)
    if output is ListFormat.NAME:
        for key in entries:
            print_text(key.key_id)
    elif output is ListFormat.JSON:
        print_json({"version": VERSION, "keys": [_key_json(key) for key in entries]})
    elif output is ListFormat.YAML:
        print_yaml({"version": VERSION, "keys": [_key_json(key) for key in entries]})
    else:
        print_table(
            ["ID", "TENANT", "ROLE", "MAX", "PRIORITY", "CREATED"],
            [_row(key) for key in entries],
            headers=not no_headers,
        )


def revoke(
    file: _FileArgument,
    key_id: Annotated[str, typer.Argument(help="ID of the key, as `baton keys list` prints it.", metavar="ID")],
) -> None:
    """Revoke a key. Running requests continue."""
    with _locked(file):
        entries = read_keys(file)
        remaining = [key for key in entries if key.key_id != key_id]
        if len(remaining) == len(entries):
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


def init(
    directory: Annotated[Path, typer.Argument(help="Directory for the files.", metavar="DIR")],
    hosts: Annotated[
        str,
        typer.Option(
            help="Names and addresses at which clients reach the servers, separated by commas.", metavar="HOSTS"
        ),
    ] = "",
    cluster: Annotated[str, typer.Option(help="Name of the cluster.", metavar="NAME")] = DEFAULT_CLUSTER,
    days: Annotated[
        int, typer.Option(help="Days for which the certificates are valid.", metavar="N", min=1, max=3650)
    ] = 365,
) -> None:
    """Create a certificate authority, and a certificate for each role: router, node, operator.

    If the directory already has an authority, that one is kept and signs the new certificates, for example for other
    hosts or another year.
    """
    try:
        from baton.security.authority import make_certificates
    except ImportError:
        raise ConfigError("the package cryptography is not installed: pip install 'baton-serve[certs]'") from None
    named = [host.strip() for host in hosts.split(",") if host.strip()]
    if hosts and not named:
        raise UsageError("--hosts is empty: give names or addresses separated by commas")
    every = list(dict.fromkeys([*_LOCAL, socket.gethostname(), *named]))
    for path in make_certificates(directory, cluster, every, days, datetime.datetime.now(datetime.UTC)):
        print_text(str(path))
    print_text()
    for line in _next_lines(directory):
        print_text(line)


def _next_lines(directory: Path) -> list[str]:
    return [
        "One machine:   baton up --certs " + str(directory),
        f"A router:      baton router --tls-ca {directory}/ca.crt --tls-cert {directory}/router.crt"
        f" --tls-key {directory}/router.key",
        f"A node:        the same with {directory}/node.crt and {directory}/node.key",
        f"An operator:   export BATON_TLS_CA={directory}/ca.crt BATON_TLS_CERT={directory}/operator.crt"
        f" BATON_TLS_KEY={directory}/operator.key",
        f"Clients need only {directory}/ca.crt. With ca.key anybody can create certificates: keep it off the cluster.",
    ]
