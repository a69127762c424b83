"""The processes of a cluster as another supervisor starts them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from baton.cli.cluster.supervisor.plan import REGISTRY, command_and_flags, flag_words, plan_nodes
from baton.config import NodeConfig, RouterConfig, UpConfig
from baton.config.setting import flag_of, flag_text, key_of

_OF_THIS_MACHINE = frozenset({"--host", "--port", "--await-nodes", "--cluster"})
"""Flags whose values each way to run a cluster has its own for."""


@dataclass(frozen=True, slots=True)
class EmittedProcess:
    """A node or a router, and the flags that differ from its defaults."""

    name: str
    role: str
    """prefill, decode or router."""
    command: str
    """node or router."""
    flags: Mapping[str, str]
    """The value is "" where a flag takes none."""
    environment: Mapping[str, str]


def emitted_processes(config: UpConfig, file: Path | None, cores: int | None = None) -> list[EmittedProcess]:
    """What `baton up` would start, without addresses. `cores`: of the one machine that all of them share, if so."""
    processes = []
    for child in plan_nodes(config, "", cores or 1, file):
        command, flags = command_and_flags(child.command)
        environment = {name: value for name, value in child.environment.items() if name != REGISTRY}
        dropped = set(_OF_THIS_MACHINE)
        if cores is None and config.threads is None:
            # Each machine knows how many cores it gives.
            dropped.add("--threads")
            environment.pop("OMP_NUM_THREADS", None)
        kept = {flag: value for flag, value in flags.items() if flag not in dropped}
        model = NodeConfig if command == "node" else RouterConfig
        processes.append(EmittedProcess(child.name, child.role, command, _sparing(kept, model), environment))
    return processes


def words(flags: Mapping[str, str]) -> list[str]:
    """Flags and values in turn."""
    return flag_words(flags)


def shared_flags(processes: Sequence[EmittedProcess]) -> dict[str, str]:
    """What all of them are told alike."""
    first, *others = processes
    own = {"--node-id", "--router-id", "--role"}
    return {
        flag: value
        for flag, value in first.flags.items()
        if flag not in own and all(other.flags.get(flag) == value for other in others)
    }


def _sparing(flags: Mapping[str, str], model: type[BaseModel]) -> dict[str, str]:
    """Without those that say what is the default anyway."""
    return {flag: value for flag, value in flags.items() if not _is_default(flag, value, model)}


def _is_default(flag: str, value: str, model: type[BaseModel]) -> bool:
    key = key_of(flag)
    field = model.model_fields.get(key)
    if field is None or field.is_required():
        return False
    default = field.get_default(call_default_factory=True)
    if isinstance(default, bool):
        return default and flag == flag_of(key)
    return flag_text(default) == value
