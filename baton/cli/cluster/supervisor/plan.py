"""The processes of a cluster and their command lines, derived from the settings of `baton up`. Does no I/O."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from baton.config import UpConfig
from baton.config.node import ClusterSettings, NodeSettings, RouterSettings
from baton.config.setting import flag_text, flags_of
from baton.security.tls_files import certificate_files

REDIS = "redis"
_MAIN = "baton.cli.main"
_FLAG = "--"
_INSECURE = "--insecure"
"""The processes get this setting as BATON_INSECURE, which the emitted units and charts set once for all of them."""
REGISTRY = "BATON_REGISTRY"
"""The variable with the registry's URL, which may contain a password: other users can read command lines with `ps`."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """One process to keep running."""

    name: str
    role: str
    """redis, prefill, decode or router."""
    command: Sequence[str]
    environment: Mapping[str, str]
    """Variables to set in addition to the supervisor's environment."""
    announces: bool
    """Whether the process announces that it is ready on a descriptor. Otherwise its output says so."""
    keep_ports: Sequence[str] = ()
    """Flags whose ports a process keeps when it is started again, because clients know them."""
    first_run: Mapping[str, str] = field(default_factory=dict)
    """Flags that are given at the first start only."""


def plan_nodes(config: UpConfig, registry: str, cores: int, file: Path | None) -> list[ChildSpec]:
    """The nodes and the routers of a cluster, in the order in which they are shown."""
    threads = config.threads_per_node(cores)
    shared = flags_of(config, ClusterSettings)
    shared.pop(_INSECURE, None)
    if file is not None:
        shared["--config"] = flag_text(file)
    node = flags_of(config, NodeSettings) | {"--port": "0", "--threads": str(threads)}
    names = [("prefill", index) for index in range(config.prefill)] + [("decode", n) for n in range(config.decode)]
    children = [
        ChildSpec(
            name=f"{role}-{index}",
            role=role,
            command=_baton(
                "node",
                shared
                | node
                | _tls(config, "node")
                | {"--role": role, "--node-id": f"{role}-{index}"}
                | _metrics_port(config, number),
            ),
            environment={"OMP_NUM_THREADS": str(threads), REGISTRY: registry, **_insecure(config)},
            announces=True,
        )
        for number, (role, index) in enumerate(names)
    ]
    return children + [_router(config, shared, registry, index) for index in range(config.routers)]


def _router(config: UpConfig, shared: Mapping[str, str], registry: str, index: int) -> ChildSpec:
    name = f"router-{index}"
    # Port 0 is a free port, and another one for each router.
    ports = {
        "--grpc-port": str(config.grpc_port and config.grpc_port + index),
        "--http-port": str(config.http_port and config.http_port + index),
        "--operator-port": "0",
    }
    flags = {**shared, **flags_of(config, RouterSettings), **_tls(config, "router"), **ports, "--router-id": name}
    return ChildSpec(
        name=name,
        role="router",
        command=_baton("router", flags),
        environment={"OMP_NUM_THREADS": "1", REGISTRY: registry, **_insecure(config)},
        announces=True,
        keep_ports=("--grpc-port", "--operator-port", "--http-port"),
        # The cluster counts as ready when the routers have all nodes. A router that is started again must not wait for
        # a node that does not come back.
        first_run={"--await-nodes": str(config.prefill + config.decode)},
    )


def _tls(config: UpConfig, role: str) -> dict[str, str]:
    if config.certs is None:
        return {}
    files = certificate_files(config.certs.absolute(), role)
    return {"--tls-cert": str(files.cert), "--tls-key": str(files.key), "--tls-ca": str(files.ca)}


def _insecure(config: UpConfig) -> dict[str, str]:
    return {"BATON_INSECURE": "true"} if config.insecure else {}


def _metrics_port(config: UpConfig, number: int) -> dict[str, str]:
    return {} if config.metrics_port is None else {"--metrics-port": str(config.metrics_port + number)}


def plan_redis(command: Sequence[str]) -> ChildSpec:
    """The private Redis."""
    return ChildSpec(REDIS, "redis", command, {}, announces=False)


def with_flags(command: Sequence[str], flags: Mapping[str, str]) -> list[str]:
    """The command with these flags, which replace or extend those that it has."""
    words = list(command)
    for flag, value in flags.items():
        if flag in words:
            words[words.index(flag) + 1] = value
        else:
            words += [flag, value]
    return words


def command_and_flags(command: Sequence[str]) -> tuple[str, dict[str, str]]:
    """The subcommand of a planned process, `node` or `router`, and its flags; "" for a flag that takes no value."""
    name, *words = command[command.index(_MAIN) + 1 :]
    return name, parse_flags(words)


def parse_flags(words: Sequence[str]) -> dict[str, str]:
    """The inverse of `flag_words`."""
    flags: dict[str, str] = {}
    for word, following in zip(words, [*words[1:], _FLAG], strict=True):
        if word.startswith(_FLAG):
            flags[word] = "" if following.startswith(_FLAG) else following
    return flags


def flag_words(flags: Mapping[str, str]) -> list[str]:
    """Flags and values in turn; a flag whose value is "" stands alone."""
    return [word for pair in flags.items() for word in pair if word]


def _baton(command: str, flags: Mapping[str, str]) -> list[str]:
    # -P: modules in the current directory do not replace Baton's.
    return [sys.executable, "-P", "-m", _MAIN, command, *flag_words(flags)]
