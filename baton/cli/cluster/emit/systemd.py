"""Renders a cluster as systemd units of one machine, which run the processes that `baton up` would. Does no I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from baton.cli.cluster.emit.processes import EmittedProcess
from baton.cli.cluster.supervisor.plan import REGISTRY, flag_words
from baton.config import UpConfig
from baton.security.access import DEFAULT_CLUSTER
from baton.security.redaction import has_password

SECRETS = "/etc/baton"
"""The directory for secrets, which only root can read; other users can read units."""
RUN_DIR = "/run/baton"
"""A placeholder for the directory that systemd makes for the private Redis."""
STOP_GRACE_S = 15
"""Seconds that a process may take to end in addition to its drain."""
_HARDENING = """\
NoNewPrivileges=yes
CapabilityBoundingSet=
ProtectSystem=strict
ProtectHome=read-only
ProtectProc=invisible
PrivateTmp=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
ProtectControlGroups=yes
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
SystemCallArchitectures=native
SystemCallFilter=@system-service
UMask=0077
"""


def systemd_files(
    config: UpConfig, processes: Sequence[EmittedProcess], baton: str, user: str, redis: Sequence[str]
) -> dict[str, str]:
    """The units by their names, and a target that wants all of them.

    `redis` is the command of the private Redis with RUN_DIR as its directory; empty if a Redis runs already.
    """
    prefix = "baton" if config.cluster == DEFAULT_CLUSTER else f"baton-{config.cluster}"
    redis = [word.replace(RUN_DIR, f"%t/{prefix}") for word in redis]
    units = {}
    registry = config.registry
    if redis:
        units[f"{prefix}-redis.service"] = _redis_unit(prefix, redis, user)
        registry = f"unix://%t/{prefix}/redis.sock"
    own = {"--host": config.host, "--registry": registry, "--cluster": config.cluster}
    secret, from_file = {}, ""
    if has_password(registry):
        # Every user can read command lines and, with `systemctl show`, the values of Environment=.
        del own["--registry"]
        from_file = f"EnvironmentFile={SECRETS}/{prefix}.env\n"
        secret = {f"{prefix}.env": _secret_file(prefix, registry)}
    for process in processes:
        command = [baton, process.command, *flag_words({**own, **process.flags})]
        after = f" {prefix}-redis.service" if redis else ""
        units[f"{prefix}-{process.name}.service"] = _unit(
            prefix, process, command, from_file + _environment(process.environment), after, user, config.drain_s
        )
    return {f"{prefix}.target": _target(config.cluster, list(units)), **units, **secret}


def _secret_file(prefix: str, registry: str) -> str:
    quoted = registry.replace("\\", "\\\\").replace('"', '\\"')
    return f"""\
# Only root may read this file: `install -D -m 600 {prefix}.env {SECRETS}/{prefix}.env`, then remove this file.
{REGISTRY}="{quoted}"
"""


def _target(cluster: str, units: Sequence[str]) -> str:
    return f"""\
# Written by `baton up --emit systemd`. Copy all units to /etc/systemd/system, then run
# `systemctl daemon-reload` and `systemctl enable --now` with this target.
[Unit]
Description=The Baton cluster {cluster}
Wants={" ".join(units)}

[Install]
WantedBy=multi-user.target
"""


def _unit(
    prefix: str,
    process: EmittedProcess,
    command: Sequence[str],
    environment: str,
    after: str,
    user: str,
    drain_s: float,
) -> str:
    return f"""\
[Unit]
Description=Baton {process.name}
PartOf={prefix}.target
Wants=network-online.target
After=network-online.target{after}
# Redis may start later, so systemd must not give up.
StartLimitIntervalSec=0

[Service]
# The process notifies systemd when it serves.
Type=notify
User={user}
ExecStart={_line(command)}
{environment}Restart=on-failure
RestartSec=1
# An invalid command line (exit code 2) does not become valid by a restart.
RestartPreventExitStatus=2
# Loading a model can take any time.
TimeoutStartSec=infinity
# The process drains after SIGTERM, and is killed if it has not ended after TimeoutStopSec.
KillMode=mixed
KillSignal=SIGTERM
TimeoutStopSec={drain_s + STOP_GRACE_S:g}
# Transfers lock memory, and read the memory of processes of the same user.
LimitMEMLOCK=infinity
LimitNOFILE=65536
{_HARDENING}"""


def _redis_unit(prefix: str, command: Sequence[str], user: str) -> str:
    return f"""\
[Unit]
Description=Redis of Baton: the registry of its processes and requests
PartOf={prefix}.target

[Service]
Type=exec
User={user}
RuntimeDirectory={prefix}
RuntimeDirectoryMode=0700
ExecStart={_line(command)}
Restart=always
RestartSec=1
{_HARDENING}"""


def _environment(environment: Mapping[str, str]) -> str:
    words = " ".join(_word(f"{name}={value}") for name, value in environment.items())
    return f"Environment={words}\n" if words else ""


def _line(command: Sequence[str]) -> str:
    return " ".join(map(_word, command))


def _word(word: str) -> str:
    """A word of a line in a unit, escaped so that systemd expands nothing in it but `%t/`."""
    escaped = (
        word.replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$").replace("%", "%%").replace("%%t/", "%t/")
    )
    return escaped if escaped and not set(escaped) & set(" \t'\"\\;") else f'"{escaped}"'
