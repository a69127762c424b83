"""Finds the cluster of a client command, with its certificates, in a run directory or at an address; selects nodes."""

from __future__ import annotations

import inspect
import os
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from baton.cli.cluster.run_dir import RunDir, default_run_dir
from baton.cli.cluster.state import ClusterState
from baton.errors import BatonError, Unreachable, UsageError
from baton.messages.operator import NodeStatus
from baton.processes.interpreter import rare_collections
from baton.security.access import Access, default_access
from baton.security.tls_files import certificate_files

if TYPE_CHECKING:
    from baton.wire.clients.operator_client import OperatorClient

AddressesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--address",
        help="HOST:PORT of a router's gRPC port, instead of a run directory. May be repeated.",
        metavar="ADDRESS",
        show_default=False,
    ),
]
OperatorAddressOption = Annotated[
    str | None,
    typer.Option(help="HOST:PORT of a router's operator port, instead of a run directory.", metavar="ADDRESS"),
]
ANSWER_TIMEOUT_S = 5.0
"""How long one call to a router or a node may take, unless --timeout says otherwise."""
AnswerTimeoutOption = Annotated[float, typer.Option(help="Seconds to wait for an answer.", metavar="SECONDS", min=0)]
EachAnswerTimeoutOption = Annotated[
    float, typer.Option(help="Seconds to wait for each answer.", metavar="SECONDS", min=0)
]
_KEYS = ("name", "role", "status", "model")
SelectorOption = Annotated[
    str,
    typer.Option(
        "-l", "--selector", help="Only nodes with this property, such as role=prefill or status=Ready.", metavar="K=V"
    ),
]


def _flag(name: str, kind: Any, default: Any, text: str, metavar: str = "PATH") -> inspect.Parameter:
    words, variable = "--" + name.replace("_", "-"), f"BATON_{name.upper()}"
    settings = typer.Option(words, envvar=variable, metavar=metavar, show_default=False, help=text, hidden=not text)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, settings]
    )


_FLAGS = (
    _flag("api_key", str, "", "API key to send.", "KEY"),
    _flag("tls_ca", Path | None, None, "Certificate authority to trust. Without it the connection has no TLS."),
    _flag("tls_cert", Path | None, None, "Certificate of the operator."),
    _flag("tls_key", Path | None, None, "Private key of that certificate."),
    _flag("cluster", str, Access().cluster, "", "NAME"),
)


def add_access_flags(app: typer.Typer) -> None:
    """Add the flags to every command of an application and of its groups."""
    for command in app.registered_commands:
        if command.callback is not None:
            command.callback = with_access(command.callback)
    for group in app.registered_groups:
        if group.typer_instance is not None:
            add_access_flags(group.typer_instance)


def use_certificates(directory: str, cluster: str) -> None:
    """Take certificates that the user did not name from `directory`, and the cluster's name from `cluster`."""
    access = default_access.get()
    if directory and access.tls_ca is None:
        files = certificate_files(Path(directory), "operator")
        access = replace(access, tls_ca=files.ca, tls_cert=files.cert, tls_key=files.key)
    default_access.set(replace(access, cluster=cluster))


def with_access(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command with the flags of this module that it does not have itself."""
    hints = typing.get_type_hints(command, include_extras=True)
    own = [
        parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in inspect.signature(command).parameters.items()
    ]
    added = [flag for flag in _FLAGS if flag.name not in hints]

    def run(**values: Any) -> Any:
        default_access.set(Access(**{flag.name: values.pop(flag.name) for flag in added}))
        return command(**values)

    run.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *added)}
    run.__doc__, run.__name__ = command.__doc__, command.__name__
    return run


def run_dir_path(text: str) -> Path:
    """The value of --run-dir. Raises BadParameter if it is empty, as it is after an unset shell variable."""
    if not text:
        raise typer.BadParameter("is empty: give a directory")
    return Path(text)


RunDirOption = Annotated[
    Path | None,
    typer.Option(
        help="Run directory of the cluster. Default: the one of this user.",
        show_default=False,
        metavar="DIR",
        parser=run_dir_path,
    ),
]


@dataclass(frozen=True, slots=True)
class LocalCluster:
    """A cluster that runs on this machine."""

    run_dir: RunDir
    state: ClusterState

    def no_router_ready(self) -> Unreachable:
        """The error of a command that needs a router, before one is ready."""
        return Unreachable(
            f"no router of the cluster in {self.run_dir.path} is ready yet: see {self.run_dir.command('status')}"
        )


def run_dir_of(flag: Path | None) -> RunDir:
    """The run directory of a command, from its flag --run-dir or the environment."""
    return RunDir(flag or default_run_dir(os.environ))


def cluster_flag(address: str | None, run_dir: Path | None) -> str:
    """What names the cluster of a command at the end of another one: --address, --run-dir, or nothing by default."""
    return f" --address {address}" if address is not None else run_dir_of(run_dir).flag


def local_cluster(flag: Path | None, address_flag: str = "--address") -> LocalCluster:
    """The running cluster of a run directory. Raises Unreachable if there is none.

    `address_flag` is the command's flag for a cluster that runs elsewhere; the error names it.
    """
    run_dir = run_dir_of(flag)
    state = run_dir.read_state() if run_dir.exists() and run_dir.holder() is not None else None
    if state is None:
        raise Unreachable(
            f"no cluster is running in {run_dir.path}: start one with {run_dir.command('up')}, "
            f"or name one with --run-dir or {address_flag}"
        )
    use_certificates(state.certs, state.cluster)
    return LocalCluster(run_dir, state)


def operator_client(address: str) -> OperatorClient:
    """A client of the router with this operator address, on the main thread.

    Its class is imported only now, since the help needs no gRPC.
    """
    with rare_collections():
        from baton.wire.clients.operator_client import OperatorClient
    return OperatorClient(address)


def grpc_addresses(addresses: Sequence[str] | None, run_dir: Path | None) -> Sequence[str]:
    """The gRPC addresses of all routers of one cluster, for requests. Raises Unreachable."""
    if addresses:
        return addresses
    cluster = local_cluster(run_dir)
    if not cluster.state.grpc_addresses:
        raise cluster.no_router_ready()
    return cluster.state.grpc_addresses


def parse_selector(text: str) -> dict[str, str]:
    """The wanted value of each key. Raises UsageError for keys that no node has."""
    pairs = [pair.partition("=") for pair in text.split(",") if pair]
    for key, mark, _ in pairs:
        if not mark or key not in _KEYS:
            raise UsageError(f"-l {text}: use name=, role=, status= or model=, separated by commas")
    return {key: value for key, _, value in pairs}


def select(nodes: Sequence[NodeStatus], wanted: dict[str, str]) -> list[NodeStatus]:
    """The nodes that have all the wanted values."""
    return [node for node in nodes if all(getattr(node, key) == value for key, value in wanted.items())]


def cluster_end_check(run_dir: Path | None) -> Callable[[], bool]:
    """A function that returns whether the cluster of a run directory is draining or has ended."""

    def ask() -> bool:
        try:
            return local_cluster(run_dir).state.phase == "draining"
        except BatonError:
            return True

    return ask
