"""The supervisor with trivial processes: start, readiness, restarts, the order in which they stop, no process left."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from baton.cli.cluster.log_files import MAX_LOG_BYTES, older_parts
from baton.cli.cluster.run_dir import RunDir
from baton.cli.cluster.state import ClusterState, ProcessState, start_time
from baton.cli.cluster.supervisor.cluster import ClusterPlan, ClusterSupervisor, StartFailed
from baton.cli.cluster.supervisor.plan import ChildSpec
from baton.cli.views.cluster_view import combine
from baton.clock import SystemClock
from baton.errors import ConfigError, ExitCode

BOUND_S = 60.0
CHILD = Path(__file__).parents[2] / "support" / "supervised.py"


class Bench:
    """A run directory, a journal that the processes write to, and their supervisor."""

    def __init__(self, path: Path) -> None:
        self.run_dir = RunDir(path / "run")
        self.run_dir.create()
        self.journal = path / "journal"
        self.journal.touch()
        self.fifo = path / "fifo"
        os.mkfifo(self.fifo)
        self.states: asyncio.Queue[ClusterState] = asyncio.Queue()
        self.supervisor: ClusterSupervisor | None = None

    def child(self, name: str, mode: str = "serve", role: str = "decode") -> ChildSpec:
        command = [sys.executable, str(CHILD), mode, str(self.journal), "--name", name, "--fifo", str(self.fifo)]
        keep = ("--port",) if role == "router" else ()
        return ChildSpec(name, role, command, {"OMP_NUM_THREADS": "7"}, announces=True, keep_ports=keep)

    async def run(self, *others: ChildSpec, timeout_s: float = BOUND_S, drain_s: float = BOUND_S) -> None:
        plan = ClusterPlan("c", "m", "auto", [], others, timeout_s, drain_s)
        self.supervisor = ClusterSupervisor(plan, self.run_dir, SystemClock(), self.states.put_nowait)
        await self.supervisor.run(lambda _state: None)

    async def wait_for_state(self, wanted: Callable[[ClusterState], bool]) -> ClusterState:
        async with asyncio.timeout(BOUND_S):
            while not wanted(state := await self.states.get()):
                pass
        return state

    def stop(self) -> None:
        assert self.supervisor is not None
        self.supervisor.stop()

    @asynccontextmanager
    async def running(self, *others: ChildSpec) -> AsyncIterator[ClusterState]:
        """Run these processes until the end of the block; yields the state in which all of them are ready."""
        running = asyncio.create_task(self.run(*others))
        state = await self.wait_for_state(lambda state: state.phase == "ready")
        try:
            yield state
        finally:
            self.stop()
            await running

    async def kill_and_see_again(self, victim: ProcessState) -> ClusterState:
        """Kill a process; returns the state in which its next life is ready, beside all others."""
        os.kill(victim.pid, signal.SIGKILL)
        return await self.wait_for_state(
            lambda s: process(s, victim.name).restarts == 1 and all(p.status == "Ready" for p in s.processes)
        )

    def lines(self) -> list[str]:
        return self.journal.read_text().splitlines()


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.fixture(autouse=True)
def signal_handlers_are_restored() -> Iterator[None]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def process(state: ClusterState, name: str) -> ProcessState:
    return next(process for process in state.processes if process.name == name)


def is_gone(pid: int, was_started_at: int) -> bool:
    return start_time(pid) != was_started_at


async def test_logs_that_are_too_large_rotate(bench: Bench) -> None:
    log = bench.run_dir.log("decode-0")
    log.touch()
    os.truncate(log, MAX_LOG_BYTES + 1)
    async with bench.running(bench.child("decode-0")):
        assert log.stat().st_size < MAX_LOG_BYTES
        assert older_parts(log)[0].stat().st_size == MAX_LOG_BYTES + 1


async def test_processes_start_become_ready_and_stop_in_order(bench: Bench) -> None:
    names = {"prefill-0": "prefill", "decode-0": "decode", "encode-0": "encode", "router-0": "router"}
    async with bench.running(*(bench.child(name, role=role) for name, role in names.items())) as state:
        assert [p.status for p in state.processes] == ["Ready"] * 4
        assert process(state, "decode-0").incarnation == f"decode-0.{process(state, 'decode-0').pid}"
        assert (state.grpc_address, state.operator_address) == ("127.0.0.1:4321", "127.0.0.1:4322")
        assert bench.run_dir.read_state() == state
        assert (bench.run_dir.path / "cluster.json").stat().st_mode & 0o777 == 0o600
        assert "decode-0 started 7" in bench.lines()
    ends = [line for line in bench.lines() if line.endswith("SIGTERM")]
    assert ends[0] == "router-0 SIGTERM"
    assert sorted(ends) == sorted(f"{name} SIGTERM" for name in names)
    assert all(is_gone(p.pid, p.start_time) for p in state.processes)


async def test_flags_of_the_first_run_are_not_given_to_the_second(bench: Bench) -> None:
    child = replace(bench.child("decode-0"), first_run={"--port": "99"})
    async with bench.running(child) as first:
        await bench.kill_and_see_again(process(first, "decode-0"))
        assert [line for line in bench.lines() if "started" in line] == ["decode-0 started 7 99", "decode-0 started 7"]


async def test_a_process_that_dies_is_restarted_with_a_new_incarnation(bench: Bench) -> None:
    async with bench.running(bench.child("decode-0"), bench.child("router-0", role="router")) as first:
        second = await bench.kill_and_see_again(process(first, "decode-0"))
        assert process(second, "decode-0").last_exit == "was ended by SIGKILL"
        assert process(second, "decode-0").incarnation != process(first, "decode-0").incarnation
        assert process(second, "router-0") == process(first, "router-0")


class FullDisk(RunDir):
    """A run directory on a disk that may be full."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.is_full = False
        self.written = asyncio.Event()

    def write_state(self, state: ClusterState) -> None:
        if self.is_full:
            raise ConfigError("No space left on device")
        super().write_state(state)
        self.written.set()


async def test_a_state_that_a_full_disk_kept_back_is_known_to_be_old_and_written_once_there_is_room(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.cli.cluster.supervisor.cluster._WRITE_AGAIN_S", 0.01)
    bench.run_dir = disk = FullDisk(bench.run_dir.path)
    async with bench.running(bench.child("decode-0"), bench.child("router-0", role="router")) as first:
        disk.is_full = True
        second = await bench.kill_and_see_again(process(first, "decode-0"))
        old = disk.read_state()
        assert old == first
        view = combine(None, "", old)
        assert [(node.name, node.status, node.pid) for node in view.nodes] == [
            ("decode-0", "Lost", 0),
            ("router-0", "Starting", process(first, "router-0").pid),
        ]
        assert "has ended, and the run directory does not say yet what follows" in view.detail
        disk.written.clear()
        disk.is_full = False
        async with asyncio.timeout(BOUND_S):
            await disk.written.wait()
        assert disk.read_state() == second


async def test_a_router_that_dies_is_restarted_on_the_same_port(bench: Bench) -> None:
    async with bench.running(bench.child("router-0", role="router")) as first:
        await bench.kill_and_see_again(process(first, "router-0"))
    assert [line for line in bench.lines() if "started" in line] == ["router-0 started 7", "router-0 started 7 4321"]


async def test_a_crash_loop_is_shown_and_the_other_processes_go_on(bench: Bench) -> None:
    async with bench.running(bench.child("decode-0", "crash-later"), bench.child("router-0", role="router")):
        for _ in range(3):
            await asyncio.to_thread(bench.fifo.write_bytes, b"x")
            state = await bench.wait_for_state(lambda s: process(s, "decode-0").pid == 0)
        assert process(state, "decode-0").status == "CrashLoop"
        assert process(state, "decode-0").last_exit == "has ended with exit code 9"
        assert process(state, "router-0").status == "Ready"


@pytest.mark.parametrize(
    ("mode", "complaint", "code"),
    [
        ("refuse", "no model: name one with --model", ExitCode.BAD_CONFIG),
        ("crash", "this is the end", ExitCode.FAILED),
    ],
)
async def test_a_failed_start_reports_its_reason_and_leaves_no_process(
    bench: Bench, mode: str, complaint: str, code: ExitCode
) -> None:
    with pytest.raises(StartFailed, match=f"decode-0 did not start: {complaint}") as caught:
        await bench.run(bench.child("prefill-0"), bench.child("decode-0", mode))
    assert caught.value.exit_code == code
    started = {line.split()[0] for line in bench.lines() if "started" in line}
    states = [bench.states.get_nowait() for _ in range(bench.states.qsize())]
    assert "decode-0" in started
    for state in states:
        assert all(is_gone(p.pid, p.start_time) for p in state.processes if p.pid)
    assert {p.status for p in states[-1].processes} == {"Stopped"}


async def test_a_missing_program_fails_the_start(bench: Bench) -> None:
    nothing = ChildSpec("decode-0", "decode", ["/nowhere/baton"], {}, announces=True)
    with pytest.raises(StartFailed, match=r"/nowhere/baton: No such file"):
        await bench.run(nothing)


async def test_a_process_that_does_not_become_ready_fails_the_start(bench: Bench) -> None:
    silent = ChildSpec(
        "decode-0", "decode", [sys.executable, "-c", "import signal; signal.pause()"], {}, announces=True
    )
    with pytest.raises(StartFailed, match=r"not ready within 0\.2 s"):
        await bench.run(silent, timeout_s=0.2)


async def test_a_second_signal_kills_all_processes(bench: Bench) -> None:
    running = asyncio.create_task(bench.run(bench.child("decode-0", "stubborn")))
    state = await bench.wait_for_state(lambda s: s.phase == "ready")
    os.kill(os.getpid(), signal.SIGINT)
    await bench.wait_for_state(lambda s: process(s, "decode-0").status == "Draining")
    assert not is_gone(process(state, "decode-0").pid, process(state, "decode-0").start_time)
    os.kill(os.getpid(), signal.SIGTERM)
    async with asyncio.timeout(BOUND_S):
        await running
    stopped = await bench.wait_for_state(lambda s: process(s, "decode-0").pid == 0)
    assert stopped.processes[0].last_exit == "was ended by SIGKILL"


SUPERVISOR = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.unit.cli.test_supervisor import Bench
if sys.argv[3] == "serve":
    from baton.cli.cluster.supervisor import child
    child._LIBC = None
async def main():
    bench = Bench(Path(sys.argv[2]))
    running = asyncio.create_task(bench.run(bench.child("decode-0", sys.argv[3])))
    state = await bench.wait_for_state(lambda s: s.phase == "ready")
    print(state.processes[0].pid, flush=True)
    await running
asyncio.run(main())
"""


@pytest.mark.parametrize("mode", ["serve", "deaf"])
def test_processes_end_when_their_supervisor_is_killed(tmp_path: Path, mode: str) -> None:
    """Once by the pipe alone (serve), and once by the kernel alone (deaf)."""
    root = str(Path(__file__).parents[3])
    supervisor = subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, root, str(tmp_path), mode], stdout=subprocess.PIPE, cwd=root
    )
    assert supervisor.stdout is not None
    with supervisor.stdout:
        child = os.pidfd_open(int(supervisor.stdout.readline()))
    try:
        supervisor.kill()
        supervisor.wait()
        assert select.select([child], [], [], BOUND_S)[0], "the child lives on"
    finally:
        os.close(child)
