"""Random schedules of faults, drawn from seeds, over real processes and NIXL, in both kinds of transport.

`BATON_FAULT_SCHEDULES=100` runs a hundred of each kind instead of a few; a failure names its seed, and
`BATON_FAULT_SEED=N` begins with that one.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from baton.cli.cluster.state import ProcessState
from baton.errors import BatonError
from baton.messages.generation import GenerateRequest
from tests.support.handoff_failpoints import HANDOFF_FAILPOINTS
from tests.support.process_cluster import ClusterSession, ProcessCluster, process_cluster
from tests.support.process_counts import by_role, holdings
from tests.support.requested_fault import RequestedFault
from tests.support.seeds import named_seed, seeds_from_first
from tests.support.slow_model import BRISK_STEP_TIMES, FLAGS, assert_undisturbed, slow_request

NUM_SCHEDULES = int(os.environ.get("BATON_FAULT_SCHEDULES", "2"))
BOUND_S = 100.0
SPARE = Counter(socket=8, thread=4)
"""How many more sockets and threads a process may have in the end: connections come and go, and thread pools grow to
their size. A leak with every fault comes to more than this. Nothing else may be more than before."""


@pytest.fixture(scope="module", params=["default", "tcp,self"], ids=["default", "tcp"])
def disturbed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model: Path, failpoints_dir: Path
) -> Iterator[ProcessCluster]:
    transport = {} if request.param == "default" else {"UCX_TLS": request.param}
    environment = {**BRISK_STEP_TIMES, **transport, "BATON_FAILPOINTS": str(failpoints_dir)}
    flags = (*FLAGS, "--prefill", "2", "--decode", "2")
    run_dir = tmp_path_factory.mktemp("disturbed") / "run"
    with process_cluster(run_dir, model, *flags, environment=environment) as running:
        yield running


class Schedule:
    """A few requests, and the faults of the nodes meanwhile."""

    def __init__(self, seed: int, session: ClusterSession, failpoints_dir: Path) -> None:
        self._seed = seed
        self._rng = Random(seed)
        self._session = session
        self._asked = failpoints_dir
        self._killed: set[int] = set()
        self.seen: Counter[str] = Counter()

    async def run(self) -> None:
        requests = [self._request(number) for number in range(self._rng.randint(3, 8))]
        asking = [asyncio.create_task(self._ask(request)) for request in requests]
        await asyncio.gather(*(self._disturb() for _ in range(self._rng.randint(1, 2))))
        async with asyncio.timeout(BOUND_S):
            await asyncio.gather(*asking)
        await self._session.wait_for_status(
            lambda _: not self._killed & {p.pid for p in self._session.cluster.state.processes}
        )
        await self._session.wait_until_whole()
        await self._session.wait_until_idle()

    def _request(self, number: int) -> GenerateRequest:
        rng = self._rng
        return slow_request(
            f"s{self._seed}-{number}", rng.randint(1, 4), rng.randint(1, 12), sampled=rng.random() < 0.5
        )

    async def _ask(self, request: GenerateRequest) -> None:
        await asyncio.sleep(self._rng.uniform(0.0, 0.5))
        leaves = self._rng.random() < 0.2
        try:
            answer = await self._session.generate(request, self._rng.uniform(0.05, 1.0) if leaves else BOUND_S)
        except BatonError as error:
            if type(error) is BatonError:
                raise  # nobody foresaw it
            self.seen["left" if leaves else f"failed: {error}"] += 1
            return
        assert_undisturbed(answer, request)
        self.seen["right"] += 1
        self.seen["failed over"] += answer.end.path.attempts > 1

    def _node(self) -> ProcessState:
        nodes = [p for p in self._session.cluster.state.processes if p.role in ("prefill", "decode") and p.pid]
        return self._rng.choice(sorted(nodes, key=lambda process: process.name))

    async def _disturb(self) -> None:
        await asyncio.sleep(self._rng.uniform(0.0, 0.6))
        match self._rng.randrange(4):
            case 0:
                self._send(self._node(), signal.SIGKILL)
            case 1:
                node = self._node()
                self._send(node, signal.SIGSTOP)
                await asyncio.sleep(self._rng.uniform(0.1, 4.5))
                self._send(node, signal.SIGCONT)
            case _:
                act = self._rng.choice(["kill", "stop", "sleep 0.3", "sleep 2"])
                with RequestedFault(self._asked, self._rng.choice(HANDOFF_FAILPOINTS), act) as fault:
                    await asyncio.sleep(self._rng.uniform(0.5, 4.5))
                if fault.struck is not None:
                    self.seen[f"fault: {act}"] += 1
                    self._killed |= {fault.struck} if act == "kill" else set()

    def _send(self, node: ProcessState, number: signal.Signals) -> None:
        try:
            os.kill(node.pid, number)
            self.seen[number.name] += 1
            self._killed |= {node.pid} if number is signal.SIGKILL else set()
        except ProcessLookupError:
            # The schedule's other fault came first.
            return


class Counted:
    """The descriptors and threads of the cluster's idle processes, as the kernel counts them."""

    def __init__(self, session: ClusterSession) -> None:
        self._session = session
        self._before = by_role(session.cluster.state.processes)

    def left_over(self) -> dict[str, Counter[str]]:
        """What each process holds beyond the processes of its role before, by process name."""
        bounds = {role: held.counted() + SPARE for role, held in self._before.items()}
        processes = self._session.cluster.state.processes
        found = {process.name: holdings(process.pid).counted() - bounds[process.role] for process in processes}
        return {name: counted for name, counted in found.items() if counted}

    async def no_process_holds_more(self) -> None:
        """Raises AssertionError if a process still holds more after a while: sockets may be closed a little later."""
        try:
            await self._session.wait_for_status(lambda _: not self.left_over())
        except TimeoutError:
            raise AssertionError(f"left over: {self.left_over()}") from None


async def warm_up(session: ClusterSession) -> None:
    """Wait until everything that is created once and kept (links, connections, threads) exists."""
    await session.wait_until_whole()
    for turn in range(2):
        requests = [slow_request(f"before-{turn}-{number}", 2) for number in range(8)]
        for request, answer in zip(requests, await asyncio.gather(*map(session.generate, requests)), strict=True):
            assert_undisturbed(answer, request)
    await session.wait_until_idle()


@pytest.mark.timeout(120 + 60 * NUM_SCHEDULES)
async def test_every_request_ends_once_and_no_process_holds_more_again(
    disturbed: ProcessCluster, failpoints_dir: Path
) -> None:
    seen: Counter[str] = Counter()
    async with disturbed.session() as session:
        await warm_up(session)
        before = Counted(session)
        for seed in seeds_from_first(NUM_SCHEDULES):
            schedule = Schedule(seed, session, failpoints_dir)
            with named_seed(seed):
                await schedule.run()
            seen += schedule.seen
        assert seen["right"] > NUM_SCHEDULES, seen
        await before.no_process_holds_more()
    if NUM_SCHEDULES > 20:
        assert seen["failed over"] > NUM_SCHEDULES / 4, seen
