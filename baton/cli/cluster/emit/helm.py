"""Renders a cluster as values of the chart deploy/helm/baton. Does no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from baton.cli.cluster.emit.processes import EmittedProcess, shared_flags
from baton.cli.yaml_text import yaml_text
from baton.config import UpConfig
from baton.security.redaction import has_password

FILE = "values.yaml"
TLS_SECRET = "baton-tls"
KEYS_SECRET = "baton-keys"
REDIS_SECRET = "baton-redis"
FLAGS_OF_THE_CHART = frozenset(
    {
        *("--cluster", "--host", "--drain-s", "--model", "--model-name", "--config", "--registry", "--insecure"),
        *("--tls-cert", "--tls-key", "--tls-ca", "--api-keys", "--router-id", "--node-id", "--role"),
        *("--port", "--grpc-port", "--http-port", "--metrics-port", "--operator-port"),
        *("--hosts", "--host-rank", "--first-host"),
    }
)
"""Flags that the chart renders from its own values, or with fixed paths and ports."""
_HEAD = """\
# Written by `baton up --emit helm`: `helm install baton deploy/helm/baton -f values.yaml`.
"""


def helm_files(config: UpConfig, processes: Sequence[EmittedProcess], settings: str) -> dict[str, str]:
    """The file of values by its name. `settings` is the content of the configuration file."""
    values: dict[str, Any] = {"cluster": config.cluster, "drainSeconds": config.drain_s}
    if config.insecure:
        values["insecure"] = True
    if config.certs:
        values["tls"] = {"existingSecret": TLS_SECRET}
    if config.api_keys:
        values["apiKeys"] = {"existingSecret": KEYS_SECRET}
    if "--model" in processes[0].flags:
        # The model is expected in the same directory on every machine of the cluster.
        path = str(config.model.absolute())
        values["model"] = {"path": f"/models/{config.model.name}", "volume": {"hostPath": {"path": path}}}
    if config.model_name:
        values.setdefault("model", {})["name"] = config.model_name
    if config.decode == 0:
        values.setdefault("model", {})["generates"] = False
    if has_password(config.registry):
        values["redis"] = {"enabled": False, "urlSecret": {"name": REDIS_SECRET}}
    elif config.registry:
        values["redis"] = {"enabled": False, "url": config.registry}
    if settings:
        values["config"] = settings
    for role, replicas in (("router", config.routers), ("prefill", config.prefill), ("decode", config.decode)):
        values[role] = {"replicas": replicas} | _flags([process for process in processes if process.role == role])
    if config.encode:
        values["encode"] = {"replicas": config.encode} | _flags([each for each in processes if each.role == "encode"])
        if config.device.startswith("cuda"):
            values["encode"]["gpus"] = 1
    for role, hosts, stages in (
        ("prefill", config.prefill_hosts, config.prefill_pp or config.pp),
        ("decode", config.decode_hosts, config.decode_pp or config.pp),
    ):
        if config.device.startswith("cuda"):
            values[role]["gpus"] = stages
        if hosts > 1:
            values[role]["hosts"] = hosts
            values["nodes"] = {"kind": "LeaderWorkerSet"}
    return {FILE: _HEAD + _comments(config) + yaml_text(values)}


def _flags(processes: Sequence[EmittedProcess]) -> dict[str, Any]:
    if not processes:
        return {}
    own = {
        flag.removeprefix("--"): value or True
        for flag, value in shared_flags(processes).items()
        if flag not in FLAGS_OF_THE_CHART
    }
    return {"flags": own} if own else {}


def _from_files(certs: Path) -> str:
    """The files for the secret, without the private key of the certificate authority."""
    names = ("ca.crt", "router.crt", "router.key", "node.crt", "node.key")
    return " ".join(f"--from-file={certs / name}" for name in names)


def _comments(config: UpConfig) -> str:
    """Comments that say how to create the secrets, which do not belong in a file of values."""
    lines = []
    if config.certs:
        lines.append(f"# kubectl create secret generic {TLS_SECRET} {_from_files(config.certs.absolute())}")
    if config.api_keys:
        lines.append(f"# kubectl create secret generic {KEYS_SECRET} --from-file=keys={config.api_keys.absolute()}")
    if has_password(config.registry):
        lines.append(
            f"# kubectl create secret generic {REDIS_SECRET} --from-file=url=FILE   # FILE has only the URL of Redis"
        )
    return "".join(line + "\n" for line in lines)
