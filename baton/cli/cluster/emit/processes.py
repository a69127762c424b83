"""The processes of a cluster and their flags, for supervisors other than Baton's. Does no I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from baton.cli.cluster.supervisor.plan import REGISTRY, command_and_flags, plan_nodes
from baton.config import MODELS, UpConfig
from baton.config.setting import settings_of

_OF_THIS_MACHINE = frozenset({"--host", "--port", "--await-nodes", "--cluster"})
"""Flags that each supervisor sets in its own way."""


@dataclass(frozen=True, slots=True)
class EmittedProcess:
    """A node or a router, and its settings that differ from the defaults."""

    name: str
    role: str
    """prefill, decode, encode or router."""
    command: str
    """node or router."""
    flags: Mapping[str, str]
    """Flags and values; the value is "" for a flag that takes none."""
    environment: Mapping[str, str]


def emitted_processes(config: UpConfig, file: Path | None, cores: int | None = None) -> list[EmittedProcess]:
    """The processes that `baton up` would start, without their addresses.

    `cores` is the number of cores of the machine if all processes share one.
    """
    processes = []
    for child in plan_nodes(config, "", cores or 1, file):
        command, flags = command_and_flags(child.command)
        environment = {name: value for name, value in child.environment.items() if name != REGISTRY}
        dropped = set(_OF_THIS_MACHINE)
        if cores is None or not config.device.startswith("cuda"):
            # It is not known which nodes will have a GPU in common.
            dropped.add("--gpu-sharers")
        if cores is None and config.threads is None:
            # The number of cores differs between machines, so each process finds out itself.
            dropped.add("--threads")
            environment.pop("OMP_NUM_THREADS", None)
        kept = {flag: value for flag, value in flags.items() if flag not in dropped}
        flags = _without_defaults(kept, MODELS[command])
        processes.append(EmittedProcess(child.name, child.role, command, flags, environment))
    return processes


def shared_flags(processes: Sequence[EmittedProcess]) -> dict[str, str]:
    """The flags that all of these processes have with the same value."""
    first, *others = processes
    own = {"--node-id", "--router-id", "--role"}
    return {
        flag: value
        for flag, value in first.flags.items()
        if flag not in own and all(other.flags.get(flag) == value for other in others)
    }


def _without_defaults(flags: Mapping[str, str], model: type[BaseModel]) -> dict[str, str]:
    """The flags that give a setting another value than its default. One that depends on the device is kept."""
    defaults: dict[str, str] = {}
    for setting in settings_of(model).values():
        if setting.on_gpu is None:
            defaults |= setting.with_value(setting.default)
    return {flag: value for flag, value in flags.items() if defaults.get(flag) != value}
