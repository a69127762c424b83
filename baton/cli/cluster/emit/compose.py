"""Renders a cluster as a Compose file, with a container for each process and a network of its own. Does no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from baton.cli.cluster.emit.processes import EmittedProcess
from baton.cli.cluster.supervisor.plan import REGISTRY, flag_words
from baton.cli.yaml_text import yaml_text
from baton.config import MODELS, UpConfig
from baton.config.router import RouterSettings
from baton.config.setting import settings_of
from baton.security.access import DEFAULT_CLUSTER
from baton.security.redaction import has_password

FILE = "compose.yaml"
SETTINGS = "baton.toml"
NODE_PORT = 50061
OPERATOR_PORT = 50060
GRPC_PORT: int = settings_of(RouterSettings)["grpc_port"].default
HTTP_PORT: int = settings_of(RouterSettings)["http_port"].default
METRICS_PORT = 9400
STOP_GRACE_S = 15
_INSIDE = "/etc/baton"
_HEAD = """\
# A Baton cluster: `docker compose up --wait`. Written by `baton up --emit compose`.
# BATON_IMAGE is the image (built from deploy/Containerfile), BATON_USER the owner of the mounted files.
"""


def compose_files(config: UpConfig, processes: Sequence[EmittedProcess], settings: str) -> dict[str, str]:
    """The Compose file and, unless `settings` is empty, a configuration file with this content, by their names."""
    services = {process.name: _service(config, process, index) for index, process in _numbered(processes)}
    if not config.registry:
        services = {"redis": _redis(), **services}
    name = "baton" if config.cluster == DEFAULT_CLUSTER else f"baton-{config.cluster.lower().replace('.', '-')}"
    files = {FILE: _HEAD + yaml_text({"name": name, "services": services})}
    return files | ({SETTINGS: settings} if settings else {})


def _numbered(processes: Sequence[EmittedProcess]) -> list[tuple[int, EmittedProcess]]:
    """The processes, each with its index among those of its role."""
    return [(int(process.name.rpartition("-")[2]), process) for process in processes]


def _redis() -> dict[str, Any]:
    return {
        "image": "redis:7-alpine",
        "command": ["redis-server", "--save", "", "--appendonly", "no", "--maxmemory", "256mb"],
        **_confined(),
        "healthcheck": {"test": ["CMD", "redis-cli", "ping"], "interval": "5s", "retries": 12},
    }


def _service(config: UpConfig, process: EmittedProcess, index: int) -> dict[str, Any]:
    flags, mounts = _mounted(config, process)
    command = [process.command, *flag_words({**_own_flags(config, process), **flags})]
    service: dict[str, Any] = {
        "image": "${BATON_IMAGE:-baton:latest}",
        "user": "${BATON_USER:-10001:10001}",
        # Compose would take a single dollar for the start of a variable.
        "command": [word.replace("$", "$$") for word in command],
        **_confined(),
        "stop_signal": "SIGTERM",
        "stop_grace_period": f"{config.drain_s + STOP_GRACE_S:g}s",
        "healthcheck": _health(config, process),
    }
    environment = dict(process.environment)
    if has_password(config.registry):
        # Every user of the host can read command lines.
        environment[REGISTRY] = config.registry.replace("$", "$$")
    if environment:
        service["environment"] = environment
    if mounts:
        service["volumes"] = mounts
    if process.command == "router":
        service["ports"] = _published(config, index)
    else:
        # For transfers by RDMA and over shared memory.
        service["ulimits"] = {"memlock": -1}
        if config.device.startswith("cuda"):
            service["deploy"] = {"resources": {"reservations": {"devices": [_gpus(int(process.flags.get("--pp", 1)))]}}}
    if not config.registry:
        service["depends_on"] = {"redis": {"condition": "service_healthy"}}
    return service


def _own_flags(config: UpConfig, process: EmittedProcess) -> dict[str, str]:
    own = {"--host": "0.0.0.0", "--registry": config.registry or "redis://redis:6379", "--cluster": config.cluster}
    if has_password(config.registry):
        del own["--registry"]
    if process.command == "node":
        ports = {"--port": str(NODE_PORT), "--metrics-port": str(METRICS_PORT)}
        return own | ports | {"--advertise": f"{process.name}:{NODE_PORT}"}
    return own | {
        "--advertise-host": process.name,
        "--grpc-port": str(GRPC_PORT),
        "--operator-port": str(OPERATOR_PORT),
    }


def _mounted(config: UpConfig, process: EmittedProcess) -> tuple[dict[str, str], list[str]]:
    """The flags with paths and ports inside the container, and the mounts of the files."""
    settings, inside, mounts = settings_of(MODELS[process.command]), dict(process.flags), []
    places = {
        "--model": f"/models/{config.model.name}",
        "--config": f"{_INSIDE}/{SETTINGS}",
        "--tls-cert": f"{_INSIDE}/tls.crt",
        "--tls-key": f"{_INSIDE}/tls.key",
        "--tls-ca": f"{_INSIDE}/ca.crt",
        "--api-keys": f"{_INSIDE}/keys",
    }
    for setting in settings.values():
        if setting.is_path:
            places.setdefault(setting.flag, f"{_INSIDE}/{setting.key}")
    for flag, target in places.items():
        if flag in inside:
            source = f"./{SETTINGS}" if flag == "--config" else inside[flag]
            mounts.append(f"{source}:{target}:ro")
            inside[flag] = target
    if process.command == "node":
        # Routers name directories of adapters to nodes, so these are the same inside.
        mounts += [f"{directory}:{directory}:ro" for directory in dict.fromkeys(config.adapter_directories)]
    for flag, port in (("--grpc-port", GRPC_PORT), ("--http-port", HTTP_PORT), ("--metrics-port", METRICS_PORT)):
        # Containers do not share ports; the published ports differ.
        if flag in inside:
            inside[flag] = str(port)
    return inside, mounts


def _published(config: UpConfig, index: int) -> list[str]:
    """The published ports, HOST:PORT:CONTAINER_PORT; port 0 lets the container engine choose."""
    return [
        f"{config.host}:{port + index if port else 0}:{inside}"
        for port, inside in ((config.grpc_port, GRPC_PORT), (config.http_port, HTTP_PORT))
    ]


def _health(config: UpConfig, process: EmittedProcess) -> dict[str, Any]:
    # /readyz needs no key, and the certificate is not checked because the request stays in the container.
    scheme = "https" if config.certs else "http"
    page = f"{scheme}://localhost:{HTTP_PORT if process.command == 'router' else METRICS_PORT}/readyz"
    ask = f"import ssl, urllib.request as u; u.urlopen('{page}', timeout=4, context=ssl._create_unverified_context())"
    return {
        "test": ["CMD", "python", "-c", ask],
        "interval": "5s",
        "timeout": "5s",
        "retries": 3,
        "start_period": f"{max(config.start_timeout_s, 10):g}s",
    }


def _gpus(count: int) -> dict[str, Any]:
    """The reservation of a GPU for each stage of a node."""
    return {"driver": "nvidia", "count": count, "capabilities": ["gpu"]}


def _confined() -> dict[str, Any]:
    return {
        "restart": "unless-stopped",
        "init": True,
        "read_only": True,
        "tmpfs": ["/tmp"],
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
    }
