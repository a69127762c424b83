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
from dataclasses import replace
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
from baton.config.setting import flag_of
from baton.errors import BatonError, ConfigError, ExitCode, UsageError
from baton.messages.request_limits import MAX_PRIORITY, MIN_PRIORITY
from baton.security.access import DEFAULT_CLUSTER
from baton.security.keys import NO_SETTINGS, ApiKey, KeyFile, new_key, read_key_file, write_keys
from baton.security.matrix import CallerRole
from baton.security.quotas import (
    KEY_FIELDS,
    MAX_QUOTA,
    MAX_WEIGHT,
    MIN_WEIGHT,
    TENANT_FIELDS,
    KeyClass,
    Quotas,
    TenantSettings,
)

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
            "set": set_limits,
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


def _quota(of: str, at_most: str) -> Any:
    return typer.Option(help=f"{of} {at_most}. Default: no limit.", metavar="N", min=1, max=MAX_QUOTA)


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
    service_class: Annotated[
        KeyClass | None,
        typer.Option(
            "--class",
            help="Class of the key's requests: urgent before those of all tenants, up to --urgent-share of the "
            "routers; batch when nothing else waits. Default: what their priority says.",
        ),
    ] = None,
    weight: Annotated[
        float | None,
        typer.Option(
            help="Weight of the tenant: how much of the service it gets beside others. Default: what it has, or 1.",
            metavar="W",
            min=MIN_WEIGHT,
            max=MAX_WEIGHT,
        ),
    ] = None,
    max_concurrent_of_key: Annotated[int | None, _quota("Concurrent requests", "with this key alone")] = None,
    requests_per_minute: Annotated[int | None, _quota("Requests a minute", "with this key")] = None,
    tokens_per_minute: Annotated[
        int | None, _quota("Tokens a minute, of prompts and outputs,", "with this key")
    ] = None,
    tokens_per_day: Annotated[int | None, _quota("Tokens a day", "with this key")] = None,
) -> None:
    """Create a key, print it, and write its hash to the file. The key can't be shown again."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    quotas = Quotas(max_concurrent_of_key, requests_per_minute, tokens_per_minute, tokens_per_day)
    key, entry = new_key(tenant, CallerRole(role.value), today, max_concurrent, min_priority, service_class, quotas)
    with _locked(file):
        content = read_key_file(file) if file.exists() else KeyFile()
        if weight is not None:
            content = content.with_tenant(tenant, replace(content.tenants.get(tenant, NO_SETTINGS), weight=weight))
        write_keys(file, [*content.keys, entry], content.tenants)
    print_text(key)
    print_note(f"Created key {entry.key_id} of tenant {tenant} ({role.value}). Store it now: {file} has only its hash.")


def _change(what: str) -> Any:
    return typer.Option(help=f"{what}; none: no limit.", metavar="N|none")


def set_limits(
    file: _FileArgument,
    tenant: Annotated[str | None, typer.Option(help="Change what holds for this tenant.", metavar="NAME")] = None,
    key: Annotated[
        str | None, typer.Option(help="Change this key, by its ID in `baton keys list`.", metavar="ID")
    ] = None,
    weight: Annotated[
        str | None,
        typer.Option(
            help=f"Weight of the tenant, {MIN_WEIGHT:g} to {MAX_WEIGHT:g}; none: 1. For --tenant.", metavar="W|none"
        ),
    ] = None,
    service_class: Annotated[
        str | None,
        typer.Option(
            "--class", help="Class of the key's requests; none: what their priority says. For --key.", metavar="CLASS"
        ),
    ] = None,
    min_priority: Annotated[
        str | None,
        typer.Option(
            help="Smallest priority of the key's requests; none: that of the routers. For --key.", metavar="N|none"
        ),
    ] = None,
    max_concurrent: Annotated[str | None, _change("Concurrent requests of the tenant")] = None,
    max_concurrent_of_key: Annotated[str | None, _change("Concurrent requests with this key alone, for --key")] = None,
    requests_per_minute: Annotated[str | None, _change("Requests a minute, of the tenant or of the key")] = None,
    tokens_per_minute: Annotated[str | None, _change("Tokens a minute, of the tenant or of the key")] = None,
    tokens_per_day: Annotated[str | None, _change("Tokens a day, of the tenant or of the key")] = None,
) -> None:
    """Change the weight, the class or the quotas of a tenant or of a key. What is not named stays as it is."""
    given = {
        "weight": weight,
        "class": service_class,
        "min_priority": min_priority,
        "max_concurrent": max_concurrent,
        "max_concurrent_of_key": max_concurrent_of_key,
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "tokens_per_day": tokens_per_day,
    }
    changes = {name: text for name, text in given.items() if text is not None}
    if (tenant is None) == (key is None):
        raise UsageError("say whose limits change: give either --tenant NAME or --key ID")
    if not changes:
        raise UsageError(f"nothing is changed: give one of {', '.join(map(flag_of, given))}")
    only_for_key = ("class", "min_priority", "max_concurrent_of_key")
    for name in ("weight",) if tenant is None else only_for_key:
        if name in changes:
            raise UsageError(f"{flag_of(name)} is for {'--tenant' if tenant is None else '--key'}")
    with _locked(file):
        content = read_key_file(file)
        if tenant is not None:
            if tenant not in {each.tenant for each in content.keys} | set(content.tenants):
                raise _NoSuchKey(f"{file} has no key of tenant {tenant!r}: see `baton keys list {file}`")
            content = content.with_tenant(tenant, _changed_tenant(content.tenants.get(tenant, NO_SETTINGS), changes))
        else:
            if key not in {each.key_id for each in content.keys}:
                raise _NoSuchKey(f"{file} has no key {key!r}: see `baton keys list {file}`")
            keys = [_changed_key(each, changes) if each.key_id == key else each for each in content.keys]
            content = replace(content, keys=keys)
        write_keys(file, content.keys, content.tenants)
    print_note(f"Changed {'tenant' if key is None else 'key'} {tenant or key}.")


def _changed_tenant(settings: TenantSettings, changes: Mapping[str, str]) -> TenantSettings:
    """Raises UsageError."""
    if "weight" in changes:
        settings = replace(settings, weight=_weight(changes["weight"]))
    return replace(settings, quotas=_changed_quotas(settings.quotas, changes, TENANT_FIELDS))


def _changed_key(key: ApiKey, changes: Mapping[str, str]) -> ApiKey:
    """Raises UsageError."""
    if "class" in changes:
        named = changes["class"]
        if named not in ("none", *KeyClass):
            raise UsageError(f"--class must be {', '.join(KeyClass)} or none, not {named!r}")
        key = replace(key, service_class=None if named == "none" else KeyClass(named))
    if "min_priority" in changes:
        least = _number("min_priority", changes["min_priority"], MIN_PRIORITY, MAX_PRIORITY)
        key = replace(key, min_priority=least)
    if "max_concurrent" in changes:
        key = replace(key, max_concurrent=_number("max_concurrent", changes["max_concurrent"], 1, MAX_QUOTA))
    return replace(key, quotas=_changed_quotas(key.quotas, changes, KEY_FIELDS))


def _changed_quotas(quotas: Quotas, changes: Mapping[str, str], options: Mapping[str, str]) -> Quotas:
    """`options`: the option of each limit. Raises UsageError."""
    limits = {
        name: _number(option, changes[option], 1, MAX_QUOTA) for name, option in options.items() if option in changes
    }
    return replace(quotas, **limits)


def _weight(text: str) -> float:
    """Raises UsageError."""
    try:
        weight = 1.0 if text == "none" else float(text)
    except ValueError:
        weight = 0.0
    if not MIN_WEIGHT <= weight <= MAX_WEIGHT:
        raise UsageError(f"--weight must be a number of {MIN_WEIGHT:g} to {MAX_WEIGHT:g}, or none, not {text!r}")
    return weight


def _number(name: str, text: str, least: int, most: int) -> int | None:
    """Raises UsageError."""
    if text == "none":
        return None
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if not least <= number <= most:
        raise UsageError(f"{flag_of(name)} must be a whole number of {least} to {most}, or none, not {text!r}")
    return number


def list_keys(
    file: _FileArgument,
    no_headers: NoHeadersOption = False,
    output: ListOutputOption = ListFormat.TABLE,
) -> None:
    """List the keys, and the tenants that have a weight or quotas."""
    content = read_key_file(file)
    entries = content.keys
    listed = {
        "version": VERSION,
        "keys": [_key_json(key) for key in entries],
        "tenants": {name: _tenant_json(settings) for name, settings in content.tenants.items()},
    }
    if output is ListFormat.NAME:
        for key in entries:
            print_text(key.key_id)
    elif output is ListFormat.JSON:
        print_json(listed)
    elif output is ListFormat.YAML:
        print_yaml(listed)
    else:
        print_table(
            ["ID", "TENANT", "ROLE", "CLASS", "MAX", "PRIORITY", "KEY-MAX", *_RATE_COLUMNS, "CREATED"],
            [_row(key) for key in entries],
            headers=not no_headers,
        )
        if content.tenants:
            print_text()
            rows = [
                [name, f"{settings.weight:g}", *map(_shown, settings.quotas.named(TENANT_FIELDS).values())]
                for name, settings in content.tenants.items()
            ]
            print_table(["TENANT", "WEIGHT", "MAX", *_RATE_COLUMNS], rows, headers=not no_headers)


def revoke(
    file: _FileArgument,
    key_id: Annotated[str, typer.Argument(help="ID of the key, as `baton keys list` prints it.", metavar="ID")],
) -> None:
    """Revoke a key. Running requests continue."""
    with _locked(file):
        content = read_key_file(file)
        remaining = [key for key in content.keys if key.key_id != key_id]
        if len(remaining) == len(content.keys):
            raise _NoSuchKey(f"{file} has no key {key_id!r}: see `baton keys list {file}`")
        write_keys(file, remaining, content.tenants)
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


_RATE_COLUMNS = ("REQ/MIN", "TOK/MIN", "TOK/DAY")


def _row(key: ApiKey) -> list[str]:
    own = [_shown(limit) for limit in key.quotas.named(KEY_FIELDS).values()]
    settings = [_shown(each) for each in (key.service_class, key.max_concurrent, key.min_priority)]
    return [key.key_id, key.tenant, key.role.value, *settings, *own, key.created]


def _shown(setting: object) -> str:
    return "-" if setting is None else str(setting)


def _key_json(key: ApiKey) -> dict[str, object]:
    return {
        "id": key.key_id,
        "tenant": key.tenant,
        "role": key.role.value,
        "class": key.service_class and key.service_class.value,
        "max_concurrent": key.max_concurrent,
        "min_priority": key.min_priority,
        **key.quotas.named(KEY_FIELDS),
        "created": key.created,
    }


def _tenant_json(settings: TenantSettings) -> dict[str, object]:
    return {"weight": settings.weight, **settings.quotas.named(TENANT_FIELDS)}


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
