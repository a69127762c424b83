"""Runs the stage of a host that is not its node's first one."""

from __future__ import annotations

import logging
import os
import signal

from baton.config import NodeConfig
from baton.errors import ConfigError, ExitCode, Unreachable
from baton.processes.interpreter import switch_threads_early
from baton.runner.backends.cpu.kernels.errors import RankLost
from baton.runner.stages.stage_worker import StageWorker
from baton.security.binds import is_loopback
from baton.stage.running import run_stage
from baton.wire.stage_hosts import FirstHost, check_reachable

_log = logging.getLogger(__name__)


def run_stage_host(config: NodeConfig) -> int:
    """Connect to the node's first host, and compute for it until it is gone. Returns the exit code.

    The first SIGTERM or SIGINT lets the node drain, for which this stage is needed; a second one ends the process at
    once. Raises ConfigError where the first host refuses this one or the model can't be loaded, and Unreachable once
    the first host is gone: whoever supervises this process starts it again, and it waits for the next one.
    """
    host, port = config.first_host_address
    tls = config.tls.live() if config.tls is not None else None
    if tls is None and not is_loopback(host) and not config.insecure:
        raise ConfigError(
            f"{host} is another machine: give --tls-cert, --tls-key and --tls-ca (`baton certs init DIR` makes them), "
            "or --insecure if this network is trusted"
        )
    check_reachable(config.host, config.first_host)
    if is_loopback(config.host):
        # UCX listens as well, by default on every interface that it finds.
        os.environ.setdefault("UCX_NET_DEVICES", "lo")
    switch_threads_early()
    first = FirstHost(host, port, config.node_id, config.cluster, config.hosts, config.host_rank, tls)
    links = first.connect()
    assert links is not None
    num_signals = 0

    def on_signal(number: int, _frame: object) -> None:
        nonlocal num_signals
        num_signals += 1
        if num_signals > 1:
            os._exit(128 + number)
        _log.warning("this stage ends with its node: it waits until the first host has drained")

    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, on_signal)
    try:
        settings = (config.model, config.num_threads, config.device)
        roots = [os.path.realpath(directory) for directory in config.adapter_directories]
        run_stage(StageWorker(links, *settings, _end_at_once, adapter_roots=lambda: roots))
    except RankLost as error:
        if num_signals:
            return int(ExitCode.OK)
        raise Unreachable(f"the node's first host is gone: {error}") from error
    return int(ExitCode.OK)


def _end_at_once(why: str) -> None:
    # While a model is loaded, nothing else would end this process and free what it has.
    _log.error("the node's first host is gone: %s", why)
    os._exit(ExitCode.UNREACHABLE)
