"""Renders a cluster as one Slurm job from the template `baton.sbatch` in this directory."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from importlib.resources import files

from baton.cli.cluster.emit.processes import EmittedProcess, shared_flags
from baton.cli.cluster.supervisor.plan import flag_words
from baton.config import UpConfig
from baton.errors import UsageError

FILE = "baton.sbatch"
DRAIN_S = 20.0
"""Longest drain: Slurm kills processes that have not ended within KillWait, which is 30 s by default."""


def slurm_files(config: UpConfig, processes: Sequence[EmittedProcess], baton: str) -> dict[str, str]:
    """The batch script by its name. `baton` is the path of the command on the hosts of the job.

    Raises UsageError for a cluster with encode nodes.
    """
    if config.encode:
        raise UsageError("the script for Slurm starts no encode nodes so far: leave --encode out, or emit other files")
    nodes = [process for process in processes if process.command == "node"]
    (router, *_) = (process for process in processes if process.command == "router")
    drain = {"--drain-s": f"{min(config.drain_s, DRAIN_S):g}"}
    # Several nodes of one host would get the same port.
    node_flags = {flag: value for flag, value in shared_flags(nodes).items() if flag != "--metrics-port"}
    return {
        FILE: _fill(
            files(__package__).joinpath(FILE).read_text("utf-8"),
            {
                "TASKS": str(config.prefill * config.prefill_hosts + config.decode * config.decode_hosts),
                "CORES": _cores(nodes),
                "BATON": shlex.quote(baton),
                "PREFILL": str(config.prefill),
                "DECODE": str(config.decode),
                "PREFILL_HOSTS": str(config.prefill_hosts),
                "DECODE_HOSTS": str(config.decode_hosts),
                "NODE_FLAGS": shlex.join(flag_words(node_flags | drain)),
                "PREFILL_FLAGS": shlex.join(flag_words(_role_flags(nodes, "prefill"))),
                "DECODE_FLAGS": shlex.join(flag_words(_role_flags(nodes, "decode"))),
                "ROUTER_FLAGS": shlex.join(flag_words(_ports(config) | shared_flags([router]) | drain)),
                "CLUSTER": shlex.quote(config.cluster),
                "REGISTRY": shlex.quote(config.registry) if config.registry else "",
                "INSECURE": "\nexport BATON_INSECURE=true" if config.insecure else "",
            },
        )
    }


def _cores(nodes: Sequence[EmittedProcess]) -> str:
    """The line that asks for the cores of the largest node: one for each thread, or for each rank; else empty.

    Without it Slurm gives a task one core, and its ranks would share that.
    """
    cores = max(int(node.flags.get("--threads", _ranks(node))) for node in nodes)
    return f"\n#SBATCH --cpus-per-task={cores}" if cores > 1 else ""


def _ranks(node: EmittedProcess) -> int:
    """The number of processes that compute the model of a node."""
    return int(node.flags.get("--tp", 1)) * int(node.flags.get("--pp", 1))


def _role_flags(nodes: Sequence[EmittedProcess], role: str) -> dict[str, str]:
    """The flags that only the nodes of one role have."""
    own = [node for node in nodes if node.role == role]
    common = shared_flags(nodes)
    return {flag: value for flag, value in shared_flags(own).items() if flag not in common} if own else {}


def _ports(config: UpConfig) -> dict[str, str]:
    return {"--grpc-port": str(config.grpc_port), "--http-port": str(config.http_port)}


def _fill(template: str, values: Mapping[str, str]) -> str:
    return re.sub("@([A-Z_]+)@", lambda match: values[match[1]], template)
