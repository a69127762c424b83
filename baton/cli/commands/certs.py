"""`baton certs`: creates certificates for the processes of a cluster."""

from __future__ import annotations

import datetime
import socket
from pathlib import Path
from typing import Annotated

import typer

from baton.cli.output import print_text
from baton.errors import ConfigError, UsageError
from baton.security.access import DEFAULT_CLUSTER

_LOCAL = ("localhost", "127.0.0.1", "::1")


def register(app: typer.Typer, name: str, text: str) -> None:
    """Add the commands."""
    group = typer.Typer(help=text, no_args_is_help=True, rich_markup_mode=None)

    @group.callback()
    def certs() -> None:
        """Create the certificates of a cluster."""

    group.command("init")(init)
    app.add_typer(group, name=name)


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
