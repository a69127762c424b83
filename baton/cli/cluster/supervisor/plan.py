"""Which processes a cluster is made of, and their command lines. Pure."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from baton.config import UpConfig
from baton.security.tls_files import certificate_files

REDIS = "redis"
_MAIN = "baton.cli.main"
_FLAG = "--"
REGISTRY = "BATON_REGISTRY"
"""How processes are told the registry: its URL may have a password, and a command line is everybody's to read (ps)."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """One process to keep running."""

    name: str
    role: str
    """redis, prefill, decode or router."""
    command: Sequence[str]
    environment: Mapping[str, str]
    """What is set on top of the supervisor's own environment."""
    announces: bool
    """Whether it announces itself on a descriptor; otherwise it says so in its output."""
    keep_ports: Sequence[str] = ()
    """Flags that get the ports of its first run when it is started again: clients know them by then."""
    first_run: Mapping[str, str] = field(default_factory=dict)
    """Flags of the first run alone."""


def plan_nodes(config: UpConfig, registry: str, cores: int, file: Path | None) -> list[ChildSpec]:
    """The nodes and the routers of a cluster, in the order in which they are shown."""
    threads = config.threads_per_node(cores)
    shared = {
        "--host": config.host,
        "--cluster": config.cluster,
        "--model": str(config.model.absolute()),
        "--runner": config.runner,
        "--drain-s": f"{config.drain_s:g}",
        "--min-priority": str(config.min_priority),
        "--priority-ageing-s": f"{config.priority_ageing_s:g}",
    }
    if config.api_keys is not None:
        shared["--api-keys"] = str(config.api_keys.absolute())
    if config.allowed_hosts:
        shared["--allowed-hosts"] = config.allowed_hosts
    if config.model_name:
        shared["--model-name"] = config.model_name
    if file is not None:
        shared["--config"] = str(file.absolute())
    node = {
        "--port": "0",
        "--dtype": config.dtype,
        "--device": config.device,
        "--block-size": str(config.block_size),
        "--kv-cache-memory": str(int(config.kv_cache_memory)),
        "--host-cache-memory": str(int(config.host_cache_memory)),
        "--preemption-mode": config.preemption_mode,
        "--orphan-grace-s": f"{config.orphan_grace_s:g}",
        "--async-scheduling": config.async_scheduling,
        "--kv-digests": config.kv_digests,
        "--on-transfer-failure": config.on_transfer_failure,
        "--kv-stall-s": f"{config.kv_stall_s:g}",
        "--max-num-batched-tokens": str(config.max_num_batched_tokens),
        "--max-num-seqs": str(config.max_num_seqs),
        "--long-prefill-token-threshold": str(config.long_prefill_token_threshold),
        _switch("enable-chunked-prefill", config.enable_chunked_prefill): "",
        _switch("enable-prefix-caching", config.enable_prefix_caching): "",
        "--watermark": f"{config.watermark:g}",
        "--scheduling-policy": config.scheduling_policy,
        "--threads": str(threads),
    }
    if config.max_model_len is not None:
        node["--max-model-len"] = str(config.max_model_len)
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
    # A port that is picked is another one for each.
    ports = {
        "--grpc-port": str(config.grpc_port and config.grpc_port + index),
        "--http-port": str(config.http_port and config.http_port + index),
        "--operator-port": "0",
    }
    bounds = {"--max-queue": str(config.max_queue), "--max-running": str(config.max_running)}
    placement = {
        "--placement": config.placement,
        "--max-local-prefill-tokens": str(config.max_local_prefill_tokens),
        "--require-disaggregation": config.require_disaggregation,
    }
    return ChildSpec(
        name=name,
        role="router",
        command=_baton(
            "router", {**shared, **_tls(config, "router"), **ports, **bounds, **placement, "--router-id": name}
        ),
        environment={"OMP_NUM_THREADS": "1", REGISTRY: registry, **_insecure(config)},
        announces=True,
        keep_ports=("--grpc-port", "--operator-port", "--http-port"),
        # Who is told that the cluster is ready finds it so. A router that comes back must not wait for a node that
        # does not.
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
    """The command with other values for flags that it has, and with those that it lacks."""
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
    """What `flag_words` wrote."""
    flags: dict[str, str] = {}
    for word, following in zip(words, [*words[1:], _FLAG], strict=True):
        if word.startswith(_FLAG):
            flags[word] = "" if following.startswith(_FLAG) else following
    return flags


def flag_words(flags: Mapping[str, str]) -> list[str]:
    """Flags and values in turn; a flag whose value is "" stands alone."""
    return [word for pair in flags.items() for word in pair if word]


def _switch(name: str, is_on: bool) -> str:
    return f"{_FLAG}{name}" if is_on else f"{_FLAG}no-{name}"


def _baton(command: str, flags: Mapping[str, str]) -> list[str]:
    # -P: a directory named like one of ours, where the user happens to be, is not ours.
    return [sys.executable, "-P", "-m", _MAIN, command, *flag_words(flags)]
