"""The processes of a cluster and their command lines, derived from the settings of `baton up`. Does no I/O."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from baton.config import UpConfig
from baton.config.cluster import ClusterSettings
from baton.config.node import NodeSettings
from baton.config.router import RouterSettings
from baton.config.setting import flags_of, value_text
from baton.security.tls_files import certificate_files

REDIS = "redis"
_MAIN = "baton.cli.main"
_FLAG = "--"
_INSECURE = "--insecure"
"""Processes get this setting as BATON_INSECURE, like those in emitted units, charts and scripts."""
REGISTRY = "BATON_REGISTRY"
"""The variable with the registry's URL, which may contain a password: other users can read command lines with `ps`."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """One process to keep running."""

    name: str
    role: str
    """redis, prefill, decode, encode or router."""
    command: Sequence[str]
    environment: Mapping[str, str]
    """Variables to set in addition to the supervisor's environment."""
    announces: bool
    """Whether the process announces that it is ready on a descriptor. Otherwise its output says so."""
    keep_ports: Sequence[str] = ()
    """Flags whose ports a process keeps when it is started again, because clients know them."""
    first_run: Mapping[str, str] = field(default_factory=dict)
    """Flags that are given at the first start only."""
    is_forked: bool = False
    """Whether a process that has imported what this one needs may fork it. All such processes have one environment."""
    has_ranks: bool = False
    """Whether it starts processes that need what it has imported."""


NodePlanner = Callable[[str, int, int], ChildSpec]
"""Plans the node of a role with this index, which is the cluster's node of this number, both counted from 0."""


def plan_nodes(
    config: UpConfig, registry: str, cores: int, file: Path | None, *, forks: bool = False
) -> list[ChildSpec]:
    """The nodes and the routers of a cluster, in the order in which they are shown.

    Each gets the settings that `config` has for its kind of process, and those that are its own. `forks`: whether nodes
    may be forked.
    """
    counts = {"prefill": config.prefill, "decode": config.decode, "encode": config.encode}
    names = [(role, index) for role, count in counts.items() for index in range(count)]
    node = node_planner(config, registry, cores, file, forks=forks)
    nodes = [node(role, index, number) for number, (role, index) in enumerate(names)]
    variables = _variables(config, registry)
    every_router = _shared_flags(config, RouterSettings, file)
    routers = [
        ChildSpec(
            name=f"router-{index}",
            role="router",
            command=_command("router", every_router | _router_flags(config, index)),
            environment={"OMP_NUM_THREADS": "1"} | variables,
            announces=True,
            keep_ports=("--grpc-port", "--operator-port", "--http-port"),
            # The cluster counts as ready when the routers have all nodes. A router that is started again must not wait
            # for a node that does not come back.
            first_run={"--await-nodes": str(config.num_nodes)},
        )
        for index in range(config.routers)
    ]
    return nodes + routers


def node_planner(config: UpConfig, registry: str, cores: int, file: Path | None, *, forks: bool = False) -> NodePlanner:
    """What plans single nodes of a cluster; the arguments are those of `plan_nodes`."""
    threads = str(config.threads_per_node(cores))
    variables = _variables(config, registry)
    every_node = _shared_flags(config, NodeSettings, file) | {"--threads": threads}
    if config.device != "cpu" and config.num_nodes > 1:
        every_node["--gpu-sharers"] = str(config.num_nodes)

    def node(role: str, index: int, number: int) -> ChildSpec:
        flags = every_node | _node_flags(config, role, index, number)
        return ChildSpec(
            name=f"{role}-{index}",
            role=role,
            command=_command("node", flags),
            environment={"OMP_NUM_THREADS": threads} | variables,
            announces=True,
            is_forked=forks,
            has_ranks=any(flags.get(flag, "1") != "1" for flag in ("--tp", "--pp")),
        )

    return node


def _variables(config: UpConfig, registry: str) -> dict[str, str]:
    return {REGISTRY: registry} | ({"BATON_INSECURE": "true"} if config.insecure else {})


def _shared_flags(config: UpConfig, group: type[ClusterSettings], file: Path | None) -> dict[str, str]:
    """The settings that all processes of one kind have alike."""
    flags = {flag: value for flag, value in flags_of(config, group).items() if flag != _INSECURE}
    return flags if file is None else flags | {"--config": value_text(file)}


def _node_flags(config: UpConfig, role: str, index: int, number: int) -> dict[str, str]:
    """The settings of one node, the `index`-th of its role and the `number`-th of all."""
    own = {"--role": role, "--node-id": f"{role}-{index}", "--port": "0"}
    metrics = _port("--metrics-port", config.metrics_port, number)
    if role == "encode":
        # One process, whatever computes the language model.
        return _tls(config, "node") | own | {"--tp": "1", "--pp": "1"} | metrics
    prefills = role == "prefill"
    of_role = {
        "--tp": config.prefill_tp if prefills else config.decode_tp,
        "--pp": config.prefill_pp if prefills else config.decode_pp,
        "--block-size": config.prefill_block_size if prefills else config.decode_block_size,
        "--max-num-batched-tokens": (
            config.prefill_max_num_batched_tokens if prefills else config.decode_max_num_batched_tokens
        ),
    }
    hosts = config.prefill_hosts if prefills else config.decode_hosts
    if hosts > 1:
        of_role["--hosts"] = hosts
    own |= {flag: str(value) for flag, value in of_role.items() if value is not None}
    return _tls(config, "node") | own | metrics


def _router_flags(config: UpConfig, index: int) -> dict[str, str]:
    """The settings of one router."""
    own = {"--router-id": f"router-{index}", "--operator-port": "0"}
    ports = _port("--grpc-port", config.grpc_port, index) | _port("--http-port", config.http_port, index)
    return _tls(config, "router") | own | ports


def _port(flag: str, first: int | None, number: int) -> dict[str, str]:
    """The port of the `number`-th process after the one with the `first` port; 0, a free port, for all if that is 0."""
    return {} if first is None else {flag: str(first and first + number)}


def _tls(config: UpConfig, role: str) -> dict[str, str]:
    if config.certs is None:
        return {}
    files = certificate_files(config.certs.absolute(), role)
    return {"--tls-cert": str(files.cert), "--tls-key": str(files.key), "--tls-ca": str(files.ca)}


def plan_redis(command: Sequence[str]) -> ChildSpec:
    """The private Redis of a cluster."""
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


def flags_of_descriptors(notify: int, parent: int) -> list[str]:
    """The flags of a process that announces: where it does, and the pipe that ends with its supervisor."""
    return ["--notify-fd", str(notify), "--parent-fd", str(parent)]


def words_of(command: Sequence[str]) -> Sequence[str]:
    """What follows `baton` in the command of a planned process."""
    return command[command.index(_MAIN) + 1 :]


def command_and_flags(command: Sequence[str]) -> tuple[str, dict[str, str]]:
    """The subcommand of a planned process, `node` or `router`, and its flags; "" for a flag that takes no value."""
    name, *words = words_of(command)
    return name, parse_flags(words)


def parse_flags(words: Sequence[str]) -> dict[str, str]:
    """The inverse of `flag_words`."""
    flags: dict[str, str] = {}
    for word, following in zip(words, [*words[1:], _FLAG], strict=True):
        if word.startswith(_FLAG):
            flags[word] = "" if following.startswith(_FLAG) else following
    return flags


def flag_words(flags: Mapping[str, str]) -> list[str]:
    """The flags as words of a command line. A flag with the value "" is one word."""
    return [word for pair in flags.items() for word in pair if word]


def _command(command: str, flags: Mapping[str, str]) -> list[str]:
    # -P: modules in the current directory do not replace Baton's.
    return [sys.executable, "-P", "-m", _MAIN, command, *flag_words(flags)]
