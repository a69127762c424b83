"""Runs the supervisor of a cluster, in the foreground or as a daemon."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from baton.cli.cluster.run_dir import RunDir
from baton.cli.cluster.state import ClusterState
from baton.cli.cluster.supervisor.cluster import ClusterPlan, ClusterSupervisor
from baton.cli.cluster.supervisor.plan import node_planner, plan_nodes, plan_redis
from baton.cli.cluster.supervisor.preflight import check_up, why_slow, without_decode_nodes
from baton.cli.output import print_note
from baton.cli.waiting import interrupts_deferred
from baton.clock import SystemClock
from baton.config import UpConfig
from baton.errors import BatonError, ExitCode
from baton.registry.embedded import EmbeddedRedis, embedded_redis

Report = Callable[[ClusterState], None]
_GPU = Path("/dev/nvidiactl")


class DetachedStartFailed(BatonError):
    """The cluster in the background did not start. None of its processes runs any more."""

    def __init__(self, reason: str, exit_code: int) -> None:
        super().__init__(reason)
        self.exit_code = ExitCode(exit_code)


def serve_detached(serve: Callable[[Report], None], log: Path) -> ClusterState:
    """Run `serve(report)` in a background process with a session of its own, and wait until it reports.

    `serve` calls `report` once, when the cluster is ready, and returns when the cluster has ended. Raises
    DetachedStartFailed. This process must not have threads yet, because it forks.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    read_end, write_end = os.pipe()
    background, on_interrupt = 0, signal.getsignal(signal.SIGINT)
    with os.fdopen(read_end, "rb") as messages:
        try:
            # An interrupt must not arrive before the process that it is to end is known.
            with interrupts_deferred():
                middle = os.fork()
                if middle == 0:
                    os.setsid()
                    if os.fork() != 0:
                        os._exit(0)
                    os.close(read_end)
                    signal.signal(signal.SIGINT, on_interrupt)
                    _run(serve, write_end, log)
                os.close(write_end)
                os.waitpid(middle, 0)
                message = _receive(messages)
                background = message.get("pid", 0)
            while "state" not in message:
                if "error" in message:
                    # The pipe ends with the background process, so nothing of it is left when the command returns.
                    messages.read()
                    raise DetachedStartFailed(message["error"], message["exit_code"])
                message = _receive(messages)
        except KeyboardInterrupt:
            if background:
                with suppress(ProcessLookupError):
                    os.kill(background, signal.SIGTERM)
            messages.read()
            raise
    return ClusterState.from_json(message["state"])


def _run(serve: Callable[[Report], None], pipe: int, log: Path) -> None:
    """Run as the background process. Never returns."""
    code = int(ExitCode.FAILED)
    try:
        _redirect(log)
        _send(pipe, {"pid": os.getpid()})

        def report(state: ClusterState) -> None:
            _send(pipe, {"state": state.to_json()})
            os.close(pipe)

        serve(report)
        code = int(ExitCode.OK)
    except BatonError as error:
        code = int(error.exit_code)
        _send(pipe, {"error": str(error), "exit_code": code})
    except BaseException as error:
        _send(pipe, {"error": f"the supervisor failed: {error!r} (log: {log})", "exit_code": code})
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _redirect(log: Path) -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)


def _send(pipe: int, message: dict[str, Any]) -> None:
    with suppress(OSError):
        os.write(pipe, json.dumps(message).encode() + b"\n")


def _receive(messages: IO[bytes]) -> dict[str, Any]:
    """The next message of the background process. Raises DetachedStartFailed if it has ended."""
    line = messages.readline()
    if not line:
        raise DetachedStartFailed("the supervisor ended before the cluster was ready", ExitCode.FAILED)
    message: dict[str, Any] = json.loads(line)
    return message


def run_cluster(
    config: UpConfig, file: Path | None, directory: RunDir, on_ready: Callable[[ClusterState], None], *, detach: bool
) -> None:
    """Lock the run directory and run the cluster to its end or, with `detach`, until it is ready.

    `file` is the configuration file, which the processes read, too. Raises ConfigError before anything is started, and
    StartFailed.
    """
    directory.create()
    directory.lock()
    try:
        check_up(config)
        if slow := why_slow(config):
            print_note(f"baton: {slow}")
        pooling = without_decode_nodes(config)
        if pooling is not config:
            print_note(
                f"baton: {config.served_model_name} generates nothing, so it has no decode nodes: "
                f"its vectors come from {pooling.prefill} prefill {'node' if pooling.prefill == 1 else 'nodes'}"
            )
            config = pooling
        redis = None if config.registry else embedded_redis(directory.path)
        if config.scaler == "local":
            config = config.model_copy(update={"scaler": f"local:{directory.path.absolute()}"})
        plan = _plan(config, redis, file)
        directory.clear_logs()
    except BaseException:
        directory.release()
        raise

    def serve(report: Callable[[ClusterState], None]) -> None:
        notes = PhaseNotes(is_terminal=sys.stderr.isatty()) if not detach else None
        _serve(plan, directory, redis, report, notes)
        if not detach:
            print_note(f"stopped the cluster in {directory.path}")

    if detach:
        on_ready(serve_detached(serve, directory.log("supervisor")))
    else:
        serve(on_ready)


def _plan(config: UpConfig, redis: EmbeddedRedis | None, file: Path | None) -> ClusterPlan:
    registry = redis.url if redis is not None else config.registry
    cores = len(os.sched_getaffinity(0))
    return ClusterPlan(
        cluster=config.cluster,
        model=config.served_model_name,
        dtype=config.dtype,
        first=[plan_redis(redis.command)] if redis is not None else [],
        others=plan_nodes(config, registry, cores, file, forks=_may_fork(config)),
        plan_node=node_planner(config, registry, cores, file, forks=_may_fork(config)),
        start_timeout_s=config.start_timeout_s,
        drain_s=config.drain_s,
        certs=config.certs.absolute() if config.certs is not None else None,
        needs_key=config.api_keys is not None,
    )


def _may_fork(config: UpConfig) -> bool:
    """Whether nodes may be forked from a process that has imported torch.

    Not where there is a GPU: what has asked torch for devices can't use them any more once it is forked.
    """
    computes_on_cpu = config.runner == "torch" and config.device in {"auto", "cpu"} and not _GPU.exists()
    return computes_on_cpu and sys.platform == "linux"


class PhaseNotes:
    """Prints that the cluster is starting or stopping: for a person at a terminal, or else as lines of a log.

    A log also says which processes are ready, since a large model takes minutes and nobody sees a cursor blink.
    """

    def __init__(self, *, is_terminal: bool) -> None:
        self._is_terminal = is_terminal
        self._phase = ""
        self._ready: set[str] = set()

    def __call__(self, state: ClusterState) -> None:
        before, self._phase = self._phase, state.phase
        if not before:
            logs = Path(state.processes[0].log).parent
            print_note(
                "Starting …" if self._is_terminal else f"Starting {len(state.processes)} processes; logs: {logs}"
            )
        elif (before, state.phase) == ("ready", "draining"):
            again = "Ctrl-C again" if self._is_terminal else "Another signal"
            print_note(f"Stopping: running requests may end first. {again} ends them at once.")
        if state.phase == "starting" and not self._is_terminal:
            for process in state.processes:
                if process.status == "Ready" and process.name not in self._ready:
                    self._ready.add(process.name)
                    print_note(f"Starting: {process.name} is ready ({len(self._ready)} of {len(state.processes)})")


def _serve(
    plan: ClusterPlan,
    directory: RunDir,
    redis: EmbeddedRedis | None,
    on_ready: Callable[[ClusterState], None],
    on_change: Callable[[ClusterState], None] | None,
) -> None:
    """Run the cluster to its end, then unlock the run directory."""

    async def run() -> None:
        await ClusterSupervisor(plan, directory, SystemClock(), on_change or _ignore).run(on_ready)

    directory.write_owner()
    try:
        asyncio.run(run())
    finally:
        if redis is not None:
            redis.remove_socket()
        directory.release()


def _ignore(_state: ClusterState) -> None:
    pass
