"""What scalers ask in tests: programs that stand for Slurm's and systemd's, a command, and a supervisor."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

from baton.cli.cluster.run_dir import RunDir
from baton.cli.cluster.state import ClusterState
from baton.cli.cluster.supervisor.cluster import ClusterPlan, ClusterSupervisor
from baton.cli.cluster.supervisor.plan import ChildSpec
from baton.clock import SystemClock
from router.scalers.choice import scaler_of
from router.scalers.scaler import Scaler
from tests.doubles.fake_scaler import FakeScaler
from tests.support.kubernetes_server import FakeKubernetes, kubernetes_server

SIZES = {"prefill": 1, "decode": 2, "encode": 1}
"""The pools of every site. At first all their nodes serve."""
_CHILD = Path(__file__).parent / "supervised.py"
_HEAD = '#!/usr/bin/env bash\nset -euo pipefail\ncd "$SITE"\n'
_SLURM = {
    # Files are called JOB|ARRAY|TASK, and contain a state.
    "squeue": """
        [[ "$*" == *--me* ]] || exit 9
        for task in *\\|*; do [[ -f $task ]] && echo "$task|$(<"$task")"; done
        true
    """,
    "sbatch": """
        for word; do case $word in
            --array=0-*) last=${word#*-*-*-} ;; --job-name=*) job=${word#*=} ;; --export=*) echo "$word" >>exported ;;
        esac; done
        last=${last##*-}; array=$(($(cat next) + 1)); echo "$array" >next; test -f "$word"
        for ((task = 0; task <= last; task++)); do echo PENDING >"$job|$array|$task"; done
        echo "$array"
    """,
    "scancel": 'for task in *\\|"${1%_*}|${1#*_}"; do echo COMPLETING >"$task"; done',
}
_SYSTEMD = {
    "systemctl": """
        [[ $1 == --no-ask-password ]]; shift 2; verb=$1; shift 2
        case $verb in
            show) for unit; do
                printf 'Id=%s\\nActiveState=%s\\n\\n' "$unit" "$(cat "$unit" 2>/dev/null || echo inactive)"
            done ;;
            start) for unit; do echo activating >"$unit"; done ;;
            stop) for unit; do echo deactivating >"$unit"; done ;;
        esac
    """,
}
COMMAND = """
import json, os, sys
site = os.environ["SITE"]
nodes = {name: open(f"{site}/{name}").read() for name in os.listdir(site)}
def put(name, state): open(f"{site}/{name}", "w").write(state)
asked, said = json.loads(sys.stdin.readline()), {}
if asked["do"] == "observe":
    said["pools"] = {}
    for pool in ("prefill", "decode", "encode"):
        stays = [state for name, state in nodes.items() if name.startswith(pool) and state != "ends"]
        said["pools"][pool] = {"want": len(stays), "have": stays.count("serves")}
elif asked["do"] == "scale":
    names = [n for n, s in nodes.items() if n.startswith(asked["pool"]) and s != "ends"]
    for number in range(asked["nodes"] - len(names)):
        put(f"{asked['pool']}-{len(names) + number}", "starts")
elif asked["name"] in nodes:
    put(asked["name"], "ends")
else:
    said = {"fault": "unknown_node", "error": "no such machine"}
print(json.dumps(said))
"""


class Site(Protocol):
    """A supervisor's nodes. `settle`: what starts, serves, and what ends, is gone."""

    scaler: Scaler

    async def settle(self) -> None: ...

    def nodes(self, pool: str) -> list[str]: ...


class FakeSite:
    def __init__(self) -> None:
        self.fake = FakeScaler(SIZES)
        self.scaler: Scaler = self.fake

    async def settle(self) -> None:
        self.fake.settle()

    def nodes(self, pool: str) -> list[str]:
        return self.fake.nodes(pool)


class KubernetesSite:
    def __init__(self, api: FakeKubernetes, directory: Path, limit_s: float) -> None:
        self.api = api
        environ = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(api.port)}
        pools = ",".join(f"{pool}={api.kind.lower()}s/demo-baton-{pool}" for pool in SIZES)
        self.scaler = scaler_of(f"kubernetes:{pools}", "c", environ, directory, limit_s)

    async def settle(self) -> None:
        self.api.settle()

    def nodes(self, pool: str) -> list[str]:
        return [pod.name for pod in self.api.pods if pod.pool == f"demo-baton-{pool}" and not pod.ending]


class ProgramsSite:
    """Programs whose state is a file for each task, with a word in it."""

    def __init__(
        self, place: Path, programs: Mapping[str, str], states: Mapping[str, str], setting: str, words: tuple[str, ...]
    ) -> None:
        self.place = place
        self.programs = place / "bin"
        self.state = place / "state"
        self.programs.mkdir()
        self.state.mkdir()
        for name, text in programs.items():
            self.put_program(name, text)
        for name, state in states.items():
            (self.state / name).write_text(state)
        self._starts, self._serves, self._ends = words
        environ = {"PATH": f"{self.programs}:{os.environ['PATH']}", "SITE": str(self.state), "BATON_REGISTRY": "secret"}
        self.scaler = scaler_of(setting, "c", environ)

    def put_program(self, name: str, text: str) -> None:
        program = self.programs / name
        program.write_text(_HEAD + text + "\n")
        program.chmod(0o700)

    async def settle(self) -> None:
        for file in self._tasks():
            state = file.read_text().strip()
            if state == self._starts:
                file.write_text(self._serves)
            if state == self._ends:
                file.unlink()

    def nodes(self, pool: str) -> list[str]:
        return [self._name(file.name) for file in self._tasks() if pool in file.name and self._stays(file)]

    def _stays(self, file: Path) -> bool:
        return file.read_text().strip() != self._ends

    def _tasks(self) -> list[Path]:
        return sorted(file for file in self.state.iterdir() if any(pool in file.name for pool in SIZES))

    def _name(self, file: str) -> str:
        if "|" in file:
            return file.removeprefix("c.").replace("|", "-")
        if "@" in file:
            host = os.uname().nodename.partition(".")[0]
            return f"{file.removeprefix('baton-node@').removesuffix('.service')}.{host}"
        return file


def slurm_site(place: Path) -> ProgramsSite:
    script = place / "node.sbatch"
    script.touch()
    states = {"c.prefill|100|0": "RUNNING", "c.decode|101|0": "RUNNING", "c.decode|101|1": "RUNNING"}
    states |= {"c.encode|99|0": "RUNNING", "next": "101"}
    setting = f"slurm:prefill={script},decode={script},encode={script}"
    return ProgramsSite(place, _SLURM, states, setting, ("PENDING", "RUNNING", "COMPLETING"))


def systemd_site(place: Path) -> ProgramsSite:
    states = {f"baton-node@{pool}-{n}.service": "active" for pool, size in SIZES.items() for n in range(size)}
    setting = "systemd:prefill=4,decode=4,encode=4"
    return ProgramsSite(place, _SYSTEMD, states, setting, ("activating", "active", "deactivating"))


def command_site(place: Path) -> ProgramsSite:
    program = place / "command.py"
    program.write_text(COMMAND)
    states = {f"{pool}-{n}": "serves" for pool, size in SIZES.items() for n in range(size)}
    setting = f"command:{sys.executable} -I -S {program}"
    return ProgramsSite(place, {}, states, setting, ("starts", "serves", "ends"))


class LocalSite:
    """A supervisor with trivial processes."""

    def __init__(self, place: Path) -> None:
        self.run_dir = RunDir(place / "run")
        self.run_dir.create()
        self._journal = place / "journal"
        others = [self._child(pool, n, n) for pool, size in SIZES.items() for n in range(size)]
        plan = ClusterPlan("c", "m", "auto", [], others, 60.0, 60.0, plan_node=self._child)
        self._states: asyncio.Queue[ClusterState] = asyncio.Queue()
        self.supervisor = ClusterSupervisor(plan, self.run_dir, SystemClock(), self._states.put_nowait)
        self.scaler = scaler_of(f"local:{self.run_dir.path}", "c", {})

    def _child(self, role: str, index: int, _number: int) -> ChildSpec:
        name = f"{role}-{index}"
        words = [sys.executable, str(_CHILD), "serve", str(self._journal), "--name", name, "--fifo", ""]
        return ChildSpec(name, role, words, {}, announces=True)

    async def settle(self) -> None:
        async with asyncio.timeout(60):
            while not self._is_settled():
                await self._states.get()

    def _is_settled(self) -> bool:
        state = self.supervisor.state()
        return state.phase == "ready" and all(process.status == "Ready" for process in state.processes)

    def nodes(self, pool: str) -> list[str]:
        processes = self.supervisor.state().processes
        return [each.name for each in processes if each.role == pool and each.status in ("Starting", "Ready")]

    def signals(self, name: str) -> list[str]:
        """The signals that a process has had."""
        return [line.split()[1] for line in self._journal.read_text().splitlines() if line.startswith(f"{name} SIG")]


@asynccontextmanager
async def local_site(place: Path) -> AsyncIterator[LocalSite]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    site = LocalSite(place)
    running = asyncio.create_task(site.supervisor.run(lambda _state: None))
    try:
        await site.settle()
        yield site
    finally:
        site.supervisor.stop()
        await running
        for number, handler in handlers.items():
            signal.signal(number, handler)


@asynccontextmanager
async def kubernetes_site(place: Path, kind: str, limit_s: float = 30.0) -> AsyncIterator[KubernetesSite]:
    async with kubernetes_server(place, kind, SIZES) as api:
        yield KubernetesSite(api, place, limit_s)


@asynccontextmanager
async def site_of(kind: str, place: Path) -> AsyncIterator[Site]:
    """The site of each implementation, by a name."""
    match kind:
        case "fake":
            yield FakeSite()
        case "Deployment" | "LeaderWorkerSet":
            async with kubernetes_site(place, kind) as cluster:
                yield cluster
        case "slurm":
            yield slurm_site(place)
        case "systemd":
            yield systemd_site(place)
        case "command":
            yield command_site(place)
        case "local":
            async with local_site(place) as local:
                yield local
