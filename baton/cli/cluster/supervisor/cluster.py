"""Runs the processes of a cluster: starts them, keeps them running, drains and stops them. A second signal kills them.

Redis starts first, then nodes and routers together. At the end the routers drain first, so that requests can finish on
nodes that still serve, then the nodes, then Redis. If a process can't start, the start of the cluster fails.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import structlog

from baton.background import OnFault, start_background
from baton.cli.cluster.log_files import CHECK_INTERVAL_S, LogRotation
from baton.cli.cluster.run_dir import RunDir
from baton.cli.cluster.state import ClusterState, ProcessState, start_time
from baton.cli.cluster.supervisor.child import ChildLife, ChildRun, ChildState, RetryIn
from baton.cli.cluster.supervisor.control import control_socket
from baton.cli.cluster.supervisor.plan import ChildSpec, NodePlanner, with_flags
from baton.clock import Clock
from baton.errors import BatonError, ConfigError, ExitCode
from baton.observe.ready import Failed, Ready
from baton.processes.death_pipe import DeathPipe
from baton.processes.ends import how_it_ended
from baton.processes.fork_server import ForkServer, own_fork_server
from router.scalers.scaler import (
    PoolSize,
    Scaler,
    ScalerFailed,
    ScalerFault,
    check_pool,
    nodes_to_add,
    pools_of,
    unknown_node,
)
from router.scalers.sockets import SOCKET_NAME

_log = structlog.get_logger(__name__)

_WRITE_AGAIN_S = 2.0
"""Seconds after which a state that could not be written is written again."""
_ROOM_FOR_FLAGS = 64
"""Bytes for the flags of descriptors, which a command line has once it is known which they are."""
_NODE_IMPORTS = "baton.cli.cluster.supervisor.node_imports"
NODE_ROLES = ("prefill", "decode", "encode")
_STOP_GRACE_S = 5.0
"""Seconds in addition to the drain time after which a process that has not ended is killed."""


class StartFailed(BatonError):
    """A process of the cluster could not start. The processes that had started are stopped."""

    def __init__(self, name: str, reason: str, exit_code: int, log: Path) -> None:
        super().__init__(f"{name} did not start: {reason} (log: {log})")
        self.exit_code = ExitCode(exit_code) if exit_code in {ExitCode.USAGE, ExitCode.BAD_CONFIG} else ExitCode.FAILED


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """The processes that a supervisor runs, and what it tells other commands about them."""

    cluster: str
    model: str
    dtype: str
    first: Sequence[ChildSpec]
    """Processes that are ready before the others start, and stopped after them: the private Redis."""
    others: Sequence[ChildSpec]
    start_timeout_s: float
    drain_s: float
    certs: Path | None = None
    needs_key: bool = False
    plan_node: NodePlanner | None = None
    """Plans further nodes. None: there can be none."""

    @property
    def pools(self) -> Sequence[str]:
        """The roles with which nodes are planned. A node stays in its pool when its role changes."""
        roles = [spec.role for spec in self.others]
        return [role for role in NODE_ROLES if role in roles]


class _Child:
    """One process over all of its runs."""

    def __init__(self, spec: ChildSpec, log: Path) -> None:
        self.spec = spec
        self.log = log
        self.life = ChildLife(spec.name)
        self.run: ChildRun | None = None
        self.ready: Ready | None = None
        self.refusal: Failed | None = None
        self.last_exit = ""
        self.exit_code = 0
        self.is_ending = False
        self.stopped = asyncio.Event()
        self.retry: asyncio.TimerHandle | None = None
        self.pinned: Mapping[str, str] = {}

    def state(self) -> ProcessState:
        pid = self.run.pid if self.run is not None else 0
        ready = self.ready or Ready("", "")
        return ProcessState(
            name=self.spec.name,
            role=self.spec.role,
            status=self.life.status,
            pid=pid,
            start_time=start_time(pid) if pid else 0,
            restarts=self.life.restarts,
            incarnation=ready.incarnation,
            address=ready.address,
            operator_address=ready.operator_address,
            log=str(self.log),
            last_exit=self.last_exit,
            http_address=ready.http_address,
        )

    def failure(self) -> StartFailed:
        """The reason why the first run of the process ended."""
        if self.refusal is not None:
            return StartFailed(self.spec.name, self.refusal.error, self.refusal.exit_code, self.log)
        return StartFailed(self.spec.name, _last_words(self.log) or self.last_exit, self.exit_code, self.log)


class ClusterSupervisor(Scaler):
    """Keeps a cluster running until it is stopped. Belongs to one event loop, on the main thread."""

    def __init__(
        self,
        plan: ClusterPlan,
        run_dir: RunDir,
        clock: Clock,
        on_change: Callable[[ClusterState], None] = lambda _state: None,
    ) -> None:
        self._plan = plan
        self._run_dir = run_dir
        self._clock = clock
        self._on_change = on_change
        self._loop = asyncio.get_running_loop()
        self._death_pipe = DeathPipe()
        self._fork_server: ForkServer | None = None
        self._children = [_Child(spec, run_dir.log(spec.name)) for spec in (*plan.first, *plan.others)]
        self._num_planned = Counter(spec.role for spec in plan.others)
        """How many nodes of each role there have been; a name is not given again."""
        self._phase = "starting"
        self._has_served = False
        self._started_at = clock.wall()
        self._changed = asyncio.Event()
        self._stop = asyncio.Event()
        self._force = asyncio.Event()
        self._rotation = LogRotation(run_dir.logs)
        self._next_rotation: asyncio.TimerHandle | None = None
        self._next_write: asyncio.TimerHandle | None = None
        """Set while the state in the run directory is an old one, because it can't be written."""

    async def run(self, on_ready: Callable[[ClusterState], None]) -> None:
        """Start all processes, call `on_ready`, keep them running until a signal, then stop them.

        Raises StartFailed, or ConfigError if the state can't be written. No process runs any more after either.
        """
        self._run_dir.write_state(self.state())
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._loop.add_signal_handler(number, self.stop)
        self._rotate_logs()
        try:
            # Routers look at the sizes of the pools as soon as they start.
            async with control_socket(self._run_dir.path / SOCKET_NAME, self):
                await self._start()
                if not self._stop.is_set():
                    self._phase = "ready"
                    self._has_served = True
                    self._write()
                    on_ready(self.state())
                    await self._stop.wait()
        finally:
            self._phase = "draining"
            self._write()
            await self._stop_all()
            if self._fork_server is not None:
                self._fork_server.close()
            self._death_pipe.close()
            for timer in (self._next_rotation, self._next_write):
                if timer is not None:
                    timer.cancel()

    def stop(self) -> None:
        """Begin to drain. A second call ends all processes at once."""
        if self._stop.is_set():
            self._force.set()
        self._stop.set()
        self._changed.set()

    def state(self) -> ClusterState:
        """The current state of the cluster."""
        processes = tuple(child.state() for child in self._children)
        routers = [process for process in processes if process.role == "router"]
        router = next((process for process in routers if process.status == "Ready"), routers[0] if routers else None)
        return ClusterState(
            cluster=self._plan.cluster,
            phase=self._phase,
            pid=os.getpid(),
            start_time=start_time(os.getpid()),
            started_at=self._started_at,
            model=self._plan.model,
            dtype=self._plan.dtype,
            grpc_address=router.address if router else "",
            operator_address=router.operator_address if router else "",
            processes=processes,
            http_address=router.http_address if router else "",
            certs=str(self._plan.certs or ""),
            needs_key=self._plan.needs_key,
        )

    async def observe(self) -> Mapping[str, PoolSize]:
        """The nodes of each pool; a node that was told to end is in none."""
        staying = [child for child in self._children if not child.is_ending]
        return {
            pool: PoolSize(
                sum(child.spec.role == pool for child in staying),
                sum(child.spec.role == pool and child.life.state is ChildState.READY for child in staying),
            )
            for pool in self._plan.pools
        }

    async def scale(self, pool: str, nodes: int) -> None:
        """Start nodes until the pool has this many. Raises ScalerFailed."""
        self._check_serves()
        check_pool(pool, self._plan.pools)
        for _ in range(nodes_to_add(pool, nodes, (await self.observe())[pool].want)):
            assert self._plan.plan_node is not None
            number = sum(self._num_planned[role] for role in NODE_ROLES)
            spec = self._plan.plan_node(pool, self._num_planned[pool], number)
            self._num_planned[pool] += 1
            child = _Child(spec, self._run_dir.log(spec.name))
            self._children.append(child)
            self._spawn(child)

    async def remove(self, name: str) -> None:
        """Let the node drain and end, and forget it. Raises ScalerFailed."""
        self._check_serves()
        nodes = {child.spec.name: child for child in self._children if child.spec.role in self._plan.pools}
        if name not in nodes:
            raise unknown_node(name, self._plan.pools)
        if not nodes[name].is_ending:
            nodes[name].is_ending = True
            start_background(lambda: self._remove(nodes[name]), "removal", name, on_fault=OnFault.GO_ON, may_end=True)

    def _check_serves(self) -> None:
        if self._phase != "ready" or self._plan.plan_node is None:
            raise ScalerFailed(ScalerFault.CONFLICT, pools_of(self._plan.pools), f"the cluster is {self._phase}")

    async def _remove(self, child: _Child) -> None:
        await self._end(child)
        self._children.remove(child)
        self._write()

    def _rotate_logs(self) -> None:
        self._rotation.rotate_large_logs()
        self._next_rotation = self._loop.call_later(CHECK_INTERVAL_S, self._rotate_logs)

    async def _start(self) -> None:
        deadline = self._loop.time() + self._plan.start_timeout_s
        first = self._children[: len(self._plan.first)]
        others = self._children[len(first) :]
        # The fork server imports while the others start.
        self._start_fork_server()
        for child in first:
            self._spawn(child)
        await self._until_ready(first, deadline)
        for child in others:
            if not child.spec.is_forked:
                self._spawn(child)
        await self._until_forks(deadline)
        if self._stop.is_set():
            return
        for child in others:
            if child.spec.is_forked:
                self._spawn(child)
        await self._until_ready(others, deadline)

    def _start_fork_server(self) -> None:
        forked = [spec for spec in self._plan.others if spec.is_forked]
        self._fork_server = own_fork_server()
        if self._fork_server is not None or not forked:
            return
        longest = max(sum(len(word.encode()) + 1 for word in spec.command) for spec in forked) + _ROOM_FOR_FLAGS
        log = self._run_dir.log("fork-server")
        try:
            self._fork_server = ForkServer.start(_NODE_IMPORTS, forked[0].environment, longest, log)
        except OSError as error:
            _log.warning("nodes start more slowly: no process can be forked", reason=str(error))

    def _forks(self, spec: ChildSpec) -> ForkServer | None:
        """The fork server that starts this process. One that this process was given starts all but Redis."""
        is_own = self._fork_server is not None and self._fork_server is own_fork_server()
        return self._fork_server if spec.is_forked or (is_own and spec.announces) else None

    async def _until_forks(self, deadline: float) -> None:
        """Wait until nodes can be forked, or can't, or the cluster is to stop."""
        if self._fork_server is None or self._fork_server.is_usable:
            return
        loaded = asyncio.create_task(self._fork_server.loaded())
        stop = asyncio.create_task(self._stop.wait())
        timeout = max(0.0, deadline - self._loop.time())
        try:
            await asyncio.wait((loaded, stop), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (loaded, stop):
                task.cancel()

    async def _until_ready(self, wave: Sequence[_Child], deadline: float) -> None:
        while not self._stop.is_set():
            self._changed.clear()
            dead = next((child for child in self._children if child.life.state is ChildState.WAITING), None)
            if dead is not None:
                raise dead.failure()
            late = [child for child in wave if child.life.state is not ChildState.READY]
            if not late:
                return
            try:
                async with asyncio.timeout_at(deadline):
                    await self._changed.wait()
            except TimeoutError:
                reason = f"not ready within {self._plan.start_timeout_s:g} s"
                raise StartFailed(late[0].spec.name, reason, ExitCode.FAILED, late[0].log) from None

    def _spawn(self, child: _Child) -> None:
        child.ready = child.refusal = None
        child.run = ChildRun(
            lambda announcement: self._on_announcement(child, announcement),
            lambda code: self._on_exit(child, code),
            self._death_pipe,
        )
        try:
            flags = child.pinned if child.life.restarts else child.spec.first_run
            fork_server = self._forks(child.spec)
            child.run.start(child.spec, with_flags(child.spec.command, flags), child.log, fork_server)
            if fork_server is not None and not fork_server.is_usable:
                log = str(self._run_dir.log("fork-server"))
                _log.warning("the fork server is lost: nodes start as programs, which takes longer", log=log)
                self._fork_server = None
        except OSError as error:
            self._loop.call_soon(self._on_exit, child, 127)
            child.refusal = Failed(f"{child.spec.command[0]}: {error.strerror}", ExitCode.BAD_CONFIG)
        self._write()

    def _on_announcement(self, child: _Child, announcement: Ready | Failed) -> None:
        if isinstance(announcement, Failed):
            child.refusal = announcement
            return
        child.ready = announcement
        if child.life.restarts:
            _log.info(
                "process is back",
                name=child.spec.name,
                incarnation=announcement.incarnation,
                restarts=child.life.restarts,
            )
        child.pinned = _pinned_ports(child.spec, announcement)
        if child.life.state in (ChildState.STARTING, ChildState.STOPPING):
            child.life.became_ready(self._clock.monotonic())
        self._write()

    def _on_exit(self, child: _Child, code: int) -> None:
        child.exit_code = code
        child.last_exit = how_it_ended(code) if child.refusal is None else child.refusal.error
        effect = child.life.exited(self._clock.monotonic())
        # A death before the cluster has served ends its start, so no process is to be started again.
        if isinstance(effect, RetryIn) and self._has_served:
            _log.warning(
                "process died",
                name=child.spec.name,
                how=child.last_exit,
                status=child.life.status,
                retry_s=effect.seconds,
            )
            child.retry = self._loop.call_later(effect.seconds, self._retry, child)
        if child.life.state is ChildState.STOPPED:
            child.stopped.set()
        self._write()

    def _retry(self, child: _Child) -> None:
        if child.life.state is ChildState.WAITING:
            child.life.retry()
            self._spawn(child)

    async def _stop_all(self) -> None:
        order = (("router",), NODE_ROLES, ("redis",))
        for roles in order:
            await asyncio.gather(*(self._end(child) for child in self._children if child.spec.role in roles))

    async def _end(self, child: _Child) -> None:
        """Ask the process to end, wait while it may drain, then kill it."""
        if child.retry is not None:
            child.retry.cancel()
        was_told = child.life.state is ChildState.STOPPING
        child.life.stop()
        self._write()
        if child.life.state is ChildState.STOPPED or child.run is None:
            return
        if was_told:
            # A second signal would end its requests, and the first call kills it in time.
            await child.stopped.wait()
            return
        child.run.send(signal.SIGTERM)
        gone = asyncio.create_task(child.stopped.wait())
        forced = asyncio.create_task(self._force.wait())
        grace = self._plan.drain_s + _STOP_GRACE_S
        await asyncio.wait((gone, forced), timeout=grace, return_when=asyncio.FIRST_COMPLETED)
        forced.cancel()
        if not gone.done():
            child.run.send(signal.SIGKILL)
            await gone

    def _write(self) -> None:
        self._changed.set()
        self._write_state()
        self._on_change(self.state())

    def _write_state(self) -> None:
        """Write the state, or else again and again: a cluster that serves must not end because a disk is full or gone.

        Meanwhile readers see by the start times of processes that what they have is old.
        """
        failed_before = self._next_write is not None
        if self._next_write is not None:
            self._next_write.cancel()
            self._next_write = None
        try:
            self._run_dir.write_state(self.state())
        except ConfigError as error:
            if not failed_before:
                _log.warning("commands see an old state of the cluster, since it can't be written", reason=str(error))
            self._next_write = self._loop.call_later(_WRITE_AGAIN_S, self._write_state)
        else:
            if failed_before:
                _log.info("the state of the cluster can be written again")


def _pinned_ports(spec: ChildSpec, ready: Ready) -> Mapping[str, str]:
    addresses = (ready.address, ready.operator_address, ready.http_address)
    return {
        flag: address.rpartition(":")[2] for flag, address in zip(spec.keep_ports, addresses, strict=False) if address
    }


def _last_words(log: Path) -> str:
    """The last line of a log, or the reason that it contains if it is JSON."""
    try:
        lines = log.read_text(errors="replace").strip().splitlines()
    except OSError:
        return ""
    if not lines:
        return ""
    with suppress(ValueError, AttributeError):
        record = json.loads(lines[-1])
        return str(record.get("reason") or record.get("event") or lines[-1])
    return lines[-1].removeprefix("baton: ")
