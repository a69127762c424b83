"""Which cluster a client command means: the one in a run directory, or the one at an address."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from baton.cli.access import use_certificates
from baton.cli.cluster.run_dir import RunDir, default_run_dir
from baton.cli.cluster.state import ClusterState
from baton.errors import Unreachable


def run_dir_path(text: str) -> Path:
    """What --run-dir says; raises BadParameter for nothing, which is what an unset shell variable says."""
    if not text:
        raise typer.BadParameter("it is empty")
    return Path(text)


RunDirOption = Annotated[
    Path | None,
    typer.Option(
        help="Directory of the running cluster. Default: this user's own.",
        show_default=False,
        metavar="DIR",
        parser=run_dir_path,
    ),
]
AddressesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--address",
        help="HOST:PORT of a router's gRPC port instead of a run directory; may be repeated.",
        metavar="ADDRESS",
        show_default=False,
    ),
]
OperatorAddressOption = Annotated[
    str | None,
    typer.Option(help="HOST:PORT of the router's operator port instead of a run directory.", metavar="ADDRESS"),
]


@dataclass(frozen=True, slots=True)
class LocalCluster:
    """A cluster of this machine."""

    run_dir: RunDir
    state: ClusterState


def run_dir_of(flag: Path | None) -> RunDir:
    """The run directory that a command means."""
    return RunDir(flag or default_run_dir(os.environ))


def local_cluster(flag: Path | None, elsewhere: str = "--address") -> LocalCluster:
    """The live cluster of a run directory; raises Unreachable with a hint when there is none.

    `elsewhere`: the command's flag for one that runs anywhere else.
    """
    run_dir = run_dir_of(flag)
    state = run_dir.read_state() if run_dir.exists() and run_dir.holder() is not None else None
    if state is None:
        raise Unreachable(
            f"no cluster is running in {run_dir.path}: start one with `baton up`, "
            f"or name one with --run-dir or {elsewhere}"
        )
    use_certificates(state.certs, state.cluster)
    return LocalCluster(run_dir, state)


def grpc_addresses(addresses: Sequence[str] | None, run_dir: Path | None) -> Sequence[str]:
    """Where to send requests: every router of one cluster; raises Unreachable."""
    if addresses:
        return addresses
    cluster = local_cluster(run_dir)
    if not cluster.state.grpc_addresses:
        raise Unreachable(f"no router of the cluster in {cluster.run_dir.path} is ready yet: see `baton status`")
    return cluster.state.grpc_addresses
