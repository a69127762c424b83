"""`baton certs`: certificates for the processes of a cluster."""

from __future__ import annotations

import datetime
import socket
from pathlib import Path
from typing import Annotated

import typer

from baton.cli.output import print_text
from baton.cli.usage import ClientUsageError
from baton.errors import ConfigError
from baton.security.access import DEFAULT_CLUSTER

_LOCAL = ("localhost", "127.0.0.1", "::1")


def register(app: typer.Typer, name: str, text: str) -> None:
    """Add the commands."""
    group = typer.Typer(help=text, no_args_is_help=True, rich_markup_mode=None)

    @group.callback()
    def certs() -> None:
        """Make certificates for a cluster."""

    group.command("init")(init)
    app.add_typer(group, name=name)


def init(
    directory: Annotated[Path, typer.Argument(help="Where the files go.", metavar="DIR")],
    hosts: Annotated[
        str,
        typer.Option(help="Names and addresses, with commas, by which clients reach the servers.", metavar="HOSTS"),
    ] = "",
    cluster: Annotated[str, typer.Option(help="The cluster's name.", metavar="NAME")] = DEFAULT_CLUSTER,
    days: Annotated[int, typer.Option(help="How long they are valid.", metavar="N", min=1, max=3650)] = 365,
) -> None:
    """Make an authority and from it a certificate for each role: router, node, operator.

    A directory that has an authority keeps it, and gets new certificates from it: for other hosts, or for another year.
    """
    try:
        from baton.security.authority import make_certificates
    except ImportError:
        raise ConfigError("the package cryptography is missing: pip install 'baton-serve[certs]'") from None
    named = [host.strip() for host in hosts.split(",") if host.strip()]
    if hosts and not named:
        raise ClientUsageError("--hosts is empty")
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
        f"Clients need {directory}/ca.crt alone. Whoever has ca.key can be anybody: keep it off machines that serve.",
    ]
