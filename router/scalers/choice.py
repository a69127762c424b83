"""Makes a scaler from the text of a setting."""

from __future__ import annotations

import re
import shlex
import socket
from collections.abc import Mapping
from pathlib import Path

from baton.errors import ConfigError
from router.scalers.asking import AskingScaler
from router.scalers.kubernetes import Kind, KubernetesScaler, Workload
from router.scalers.kubernetes_api import Access, KubernetesApi
from router.scalers.programs import run_program
from router.scalers.scaler import CALL_S, MAX_NODES, MAX_POOLS, Scaler
from router.scalers.slurm import SlurmTasks
from router.scalers.sockets import SOCKET_NAME, SocketAsk
from router.scalers.systemd import SystemdTasks
from router.scalers.tasks import TaskScaler

FORMS = (
    "kubernetes:POOL=deployments/NAME,..., slurm:POOL=SCRIPT,..., systemd:POOL=INSTANCES,..., local:RUN_DIR or "
    "command:PROGRAM ARGUMENTS"
)
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where a pod finds its account's token, the API's authority and its namespace."""
_POOL = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_WORKLOAD = re.compile(r"(deployments|leaderworkersets)/([a-z0-9][a-z0-9.-]{0,252})")


def scaler_of(
    text: str, cluster: str, environ: Mapping[str, str], account: Path = ACCOUNT, limit_s: float = CALL_S
) -> Scaler:
    """The scaler that `text` names, in one of FORMS. `limit_s`: seconds for each call.

    `environ` is what programs inherit; it also says where Kubernetes' API is, and `account` who calls it. Raises
    ConfigError for any other text, and where Kubernetes has given this process no account.
    """
    kind, _, rest = text.partition(":")
    match kind:
        case "kubernetes":
            return _kubernetes(rest, environ, account, limit_s)
        case "slurm":
            scripts = {pool: Path(value) for pool, value in _pools(kind, rest).items()}
            relative = [str(path) for path in scripts.values() if not path.is_absolute()]
            if relative:
                raise ConfigError(f"scaler slurm: {relative[0]!r} is not an absolute path")
            return TaskScaler(SlurmTasks(cluster, scripts, environ, limit_s))
        case "systemd":
            counts = {pool: _instances(pool, value) for pool, value in _pools(kind, rest).items()}
            return TaskScaler(SystemdTasks(socket.gethostname().partition(".")[0], counts, environ, limit_s))
        case "local" if Path(rest).is_absolute():
            return AskingScaler(SocketAsk(Path(rest) / SOCKET_NAME, limit_s))
        case "command":
            return _command(rest, environ, limit_s)
    raise ConfigError(f"scaler {text[:200]!r} is none of {FORMS}")


def _kubernetes(text: str, environ: Mapping[str, str], account: Path, limit_s: float) -> Scaler:
    workloads = {}
    for pool, value in _pools("kubernetes", text).items():
        found = _WORKLOAD.fullmatch(value)
        if found is None:
            raise ConfigError(f"scaler kubernetes: {value!r} is neither deployments/NAME nor leaderworkersets/NAME")
        kind: Kind = "deployments" if found[1] == "deployments" else "leaderworkersets"
        workloads[pool] = Workload(kind, found[2])
    host, port = environ.get("KUBERNETES_SERVICE_HOST", ""), environ.get("KUBERNETES_SERVICE_PORT", "443")
    try:
        namespace = (account / "namespace").read_text("ascii").strip()
        url = f"https://{f'[{host}]' if ':' in host else host}:{port}"
        api = KubernetesApi(Access(url, namespace, account / "token", account / "ca.crt"), limit_s)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"scaler kubernetes: this process has no account of Kubernetes in {account}: {error}"
        ) from None
    if not host:
        raise ConfigError("scaler kubernetes: KUBERNETES_SERVICE_HOST is not set, so this process is in no pod")
    return KubernetesScaler(api, namespace, workloads)


def _command(text: str, environ: Mapping[str, str], limit_s: float) -> Scaler:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"scaler command: {error} in {text[:200]!r}") from None
    if not words:
        raise ConfigError("scaler command: name a program")

    async def ask(request: bytes, subject: str) -> bytes:
        return await run_program(words, subject, given=request + b"\n", limit_s=limit_s, environ=environ)

    return AskingScaler(ask)


def _pools(kind: str, text: str) -> dict[str, str]:
    """The values of the pools in `POOL=VALUE,POOL=VALUE`."""
    pools: dict[str, str] = {}
    for part in text.split(","):
        pool, _, value = part.partition("=")
        if not _POOL.fullmatch(pool) or not value:
            raise ConfigError(f"scaler {kind}: {part[:200]!r} is not POOL=VALUE; the forms are {FORMS}")
        if pool in pools:
            raise ConfigError(f"scaler {kind}: the pool {pool} is named twice")
        pools[pool] = value
    if len(pools) > MAX_POOLS:
        raise ConfigError(f"scaler {kind}: {len(pools)} pools are more than {MAX_POOLS}")
    return pools


def _instances(pool: str, text: str) -> int:
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text[:9]) <= MAX_NODES:
        raise ConfigError(f"scaler systemd: pool {pool} has {text[:20]!r} instances, which is not 1 to {MAX_NODES}")
    return int(text[:9])
