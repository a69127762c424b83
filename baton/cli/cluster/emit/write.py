"""Writes a cluster as files for another system that runs processes."""

from __future__ import annotations

import os
import pwd
import sys
from collections.abc import Mapping
from pathlib import Path

from baton.cli.cluster.emit import Emission
from baton.cli.cluster.emit.compose import compose_files
from baton.cli.cluster.emit.helm import helm_files
from baton.cli.cluster.emit.processes import emitted_processes
from baton.cli.cluster.emit.slurm import slurm_files
from baton.cli.cluster.emit.systemd import RUN_DIR, systemd_files
from baton.cli.cluster.supervisor.preflight import without_decode_nodes
from baton.config import UpConfig
from baton.errors import ConfigError, UsageError
from baton.registry.embedded import embedded_redis

_OF_ONE_MACHINE = frozenset({Emission.SYSTEMD, Emission.COMPOSE})
"""The systems whose files are for the processes of one machine."""


def write(kind: Emission, config: UpConfig, file: Path | None, directory: Path) -> list[Path]:
    """Write the files with which `kind` runs the cluster into `directory`, and return their paths.

    Raises UsageError for a cluster that is reached over a network without TLS and keys, and for a node on several hosts
    where the files are for one machine, and ConfigError if a file can't be written.
    """
    if config.is_across_hosts and kind in _OF_ONE_MACHINE:
        raise UsageError(
            f"--emit {kind}: the files are for one machine, so leave --prefill-hosts and --decode-hosts out; --emit "
            "helm or slurm writes files for several hosts"
        )
    if kind is not Emission.SYSTEMD and not (config.insecure or (config.certs and config.api_keys)):
        raise UsageError(
            f"--emit {kind}: the processes communicate over a network, so give --certs DIR and --api-keys FILE "
            "(created by `baton certs init` and `baton keys add`), or --insecure if that network is trusted"
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        files = _files(kind, without_decode_nodes(config), file)
        return [_write(directory / name, text) for name, text in files.items()]
    except OSError as error:
        raise ConfigError(
            f"can't write to {directory} ({error.strerror}): choose another directory with --emit-dir"
        ) from None


def _files(kind: Emission, config: UpConfig, file: Path | None) -> Mapping[str, str]:
    baton = str(Path(sys.executable).with_name("baton"))
    if kind is Emission.SYSTEMD:
        redis = () if config.registry else embedded_redis(Path(RUN_DIR)).command
        cores = len(os.sched_getaffinity(0))
        return systemd_files(
            config, emitted_processes(config, file, cores), baton, pwd.getpwuid(os.getuid()).pw_name, redis
        )
    processes = emitted_processes(config, file)
    if kind is Emission.SLURM:
        return slurm_files(config, processes, baton)
    settings = "" if file is None else file.read_text(encoding="utf-8")
    if kind is Emission.COMPOSE:
        return compose_files(config, processes, settings)
    return helm_files(config, processes, settings)


def _write(path: Path, text: str) -> Path:
    # The registry's URL may contain a password, so at first only the owner may read the file.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        os.fchmod(descriptor, 0o600)
        file.write(text)
    return path
