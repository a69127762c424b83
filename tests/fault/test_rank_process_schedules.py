"""Schedules of faults, drawn from seeds, over real nodes of several shapes in every pair of roles, and NIXL.

A rank is killed, stopped or cut off from its node, a node is killed or stopped, or connections between processes are
cut, while clients stream. Every stream goes on elsewhere with the same tokens, nothing of a lost rank is left, and all
blocks come back. Three of them run, since other tests show each of these faults alone or in virtual time;
`BATON_RANK_PROCESS_SCHEDULES=20`, as for a night, runs all kinds, `BATON_FAULT_SEED=N` begins with that one.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import pytest

from baton.engine.request import Request
from baton.messages.generation import GenerateRequest
from baton.messages.operator import ClusterStatus, NodeStatus
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams
from baton.runner.loading import load_runner
from baton.runner.model.random_model import write_random_model
from baton.runner.spec import TorchSpec
from tests.fault.test_process_schedules import Counted
from tests.oracle.test_token_exact import make_engine, run_all
from tests.support.caller import TokenCount
from tests.support.cut_connections import cut_connections_between, cut_descriptor
from tests.support.handoff_failpoints import RECEIVER, SENDER
from tests.support.process_cluster import BOUND_S, ClusterSession, process_cluster
from tests.support.process_counts import holdings
from tests.support.rank_processes import (
    alive,
    channel_of,
    orphaned_segments,
    rank_processes,
    require_none_orphaned,
    wait_until_gone,
)
from tests.support.requested_fault import RequestedFault
from tests.support.seeds import named_seed, seeds_from_first
from tests.support.tiny_models import TINY_MODELS

NUM_SCHEDULES = int(os.environ.get("BATON_RANK_PROCESS_SCHEDULES", "3"))
ROLES = {"prefill-0": "prefill", "decode-1": "prefill", "decode-0": "decode", "prefill-1": "decode"}
"""The role of each node. A node is named after the role with which it starts, and its shape is that of this role."""
SHAPES = {"two stages and two ranks": ("--prefill-pp", "2"), "one and two ranks": ("--prefill-tp", "1")}
"""The flag for the shape of nodes that start as prefill nodes. Others have two ranks."""
FEW = 5
"""Up to so many schedules run with the first shapes alone, where every node has ranks."""
FLAGS = (
    *("--prefill", "2", "--decode", "2", "--decode-tp", "2", "--threads", "1"),
    *("--dtype", "float32", "--kv-cache-memory", "4MiB", "--max-num-batched-tokens", "32", "--max-num-seqs", "8"),
)
PREFILL, DECODE = ([name for name in ROLES if ROLES[name] == role] for role in ("prefill", "decode"))
NUM_CLIENTS = 3
REQUESTS_PER_CLIENT = 2
_PAUSE_S = 0.02


@dataclass(frozen=True)
class Asked:
    """A request, and the tokens of an undisturbed run."""

    request: GenerateRequest
    token_ids: Sequence[int]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    write_random_model(made, TINY_MODELS["llama"], seed=5)
    return made


@pytest.fixture(scope="module")
def asked(directory: Path) -> Sequence[Asked]:
    """Prompts of less than a block to several chunks, as one engine of one rank answers them."""
    rng, drawn = Random(3), []
    for number in range(12):
        prompt = [rng.randrange(256) for _ in range(rng.choice([3, 40, 100, 220]))]
        params = SamplingParams(
            temperature=float(rng.random() < 0.7), seed=number, max_tokens=rng.randint(50, 130), ignore_eos=True
        )
        drawn.append(Request(f"r{number}", RequestSpec(prompt, params)))
    with closing(load_runner(TorchSpec(directory, dtype="float32", num_blocks=192))) as runner:
        expected = run_all(make_engine(runner), drawn)
    return [
        Asked(
            GenerateRequest(
                list(one.prompt_token_ids),
                temperature=one.sampling_params.temperature,
                seed=one.sampling_params.seed,
                max_tokens=one.sampling_params.max_tokens,
                ignore_eos=True,
            ),
            expected[one.request_id],
        )
        for one in drawn
    ]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(BOUND_S):
        while True:
            if condition():
                return
            await asyncio.sleep(_PAUSE_S)


class Nodes:
    """The nodes of the running cluster, as its router and the kernel see them."""

    def __init__(self, session: ClusterSession) -> None:
        self.session = session
        self.ranks_seen: set[int] = set()
        self._doomed: dict[int, str] = {}
        """Processes that have ended or will end because of a fault, and their nodes; the latest one last."""

    def doom(self, node: NodeStatus) -> None:
        """Note that this process of the node will end."""
        self._doomed[node.pid] = node.name

    async def router(self) -> NodeStatus:
        return next(node for node in (await self.session.status()).nodes if node.role == "router")

    async def serving(self) -> Sequence[NodeStatus]:
        """The nodes that serve. The one that a fault ended last comes last: a supervisor waits before it starts a
        process again that has just been started."""
        ended = list(self._doomed.values())
        nodes = [node for node in (await self.session.status()).nodes if self._serves(node)]
        return sorted(nodes, key=lambda node: len(ended) - ended[::-1].index(node.name) if node.name in ended else 0)

    async def wait_until_whole(self) -> None:
        """Wait until every node serves in its role and is idle, with all blocks free, and no rank of an earlier process
        is left."""
        status = await self.session.wait_for_status(self._is_whole)
        ranks = {rank for node in status.nodes for rank in rank_processes(node.pid)}
        await until(lambda: not alive(self.ranks_seen - ranks))
        self.ranks_seen = ranks

    async def wait_until_idle(self) -> None:
        """Wait until every node that serves is idle, with all blocks free."""
        await self.session.wait_for_status(
            lambda status: all(_is_idle(node) for node in status.nodes if self._serves(node))
        )

    def _is_whole(self, status: ClusterStatus) -> bool:
        serving = [node for node in status.nodes if self._serves(node)]
        roles = {node.name: node.role for node in serving}
        return status.health == "ok" and roles == ROLES and all(map(_is_idle, serving))

    def _serves(self, node: NodeStatus) -> bool:
        return (
            node.role != "router"
            and node.status == "Ready"
            and node.pid not in self._doomed
            and len(rank_processes(node.pid)) == node.shape.num_ranks - 1
        )


def _is_idle(node: NodeStatus) -> bool:
    busy = node.running or node.waiting or node.leased_blocks or node.quarantined_blocks
    return not busy and node.free_blocks == node.total_blocks


class Schedule:
    """Clients that stream, and one fault meanwhile, drawn from a seed."""

    def __init__(self, seed: int, nodes: Nodes, asked: Sequence[Asked], failpoints_dir: Path) -> None:
        self._seed = seed
        self._rng = Random(seed)
        self._nodes = nodes
        self._asked = asked
        self._failpoints_dir = failpoints_dir
        self._arrived = TokenCount()
        self._clients: list[asyncio.Task[None]] = []
        self.seen: Counter[str] = Counter()

    async def run(self) -> None:
        """Run the schedule. A node that it ends may still be starting afterwards: no fault before the next end needs
        it."""
        ends_a_node = [
            self._kill_a_rank_at_a_step,
            self._kill_a_rank_while_all_are_idle,
            self._cut_a_rank_off,
            self._kill_a_rank,
            self._kill_a_node,
            self._kill_a_rank_at_a_step,
            self._kill_a_rank,
            self._stop_a_rank_for_ever,
        ]
        ends_none = [
            self._stop_a_rank_for_a_while,
            self._cut_from_the_router,
            self._cut_a_pair,
            self._stop_a_node_for_a_while,
        ]
        turn, place = divmod(self._seed, 5)
        if place in (0, 2):
            await self._nodes.wait_until_whole()
            fault = ends_a_node[(2 * turn + place // 2) % len(ends_a_node)]
        else:
            fault = ends_none[(3 * turn + (1, 3, 4).index(place)) % len(ends_none)]
        async with asyncio.timeout(BOUND_S):
            await asyncio.gather(fault(), self.stream())
            await self._nodes.wait_until_idle()

    async def stream(self) -> None:
        """Let all clients have their answers."""
        self._clients = [asyncio.create_task(self._client(number)) for number in range(NUM_CLIENTS)]
        await asyncio.gather(*self._clients)

    async def _client(self, number: int) -> None:
        for turn in range(REQUESTS_PER_CLIENT):
            one = self._rng.choice(self._asked)
            request = replace(one.request, request_id=f"s{self._seed}-{number}-{turn}")
            answer = await self._nodes.session.generate(request, BOUND_S, on_event=self._arrived)
            assert answer.token_ids == one.token_ids, request.request_id
            assert answer.indices == list(range(len(one.token_ids))), request.request_id
            path = answer.end.path
            self.seen["right"] += 1
            self.seen["failed over"] += path.attempts > 1
            self.seen[f"{path.prefill_node} to {path.decode_node}"] += 1

    async def _a_while(self) -> None:
        await self._arrived.wait_for_tokens(self._rng.randint(1, 250))

    async def _some_node(self) -> NodeStatus:
        await self._a_while()
        return self._rng.choice(await self._nodes.serving())

    async def _some_rank(self) -> tuple[NodeStatus, int]:
        await self._a_while()
        node = next(node for node in await self._nodes.serving() if node.shape.num_ranks > 1)
        return node, self._rng.choice(rank_processes(node.pid))

    async def _kill_a_rank(self) -> None:
        node, rank = await self._some_rank()
        self._end(node, rank, signal.SIGKILL)

    async def _kill_a_rank_while_all_are_idle(self) -> None:
        """No step finds out."""
        await until(lambda: self._are_answered)
        await self._kill_a_rank()

    async def _stop_a_rank_for_ever(self) -> None:
        node, rank = await self._some_rank()
        self._end(node, rank, signal.SIGSTOP)

    async def _kill_a_node(self) -> None:
        node, _ = await self._some_rank()
        self._end(node, node.pid, signal.SIGKILL)

    async def _cut_a_rank_off(self) -> None:
        node, rank = await self._some_rank()
        self._doom(node)
        cut_descriptor(rank, channel_of(rank))

    async def _kill_a_rank_at_a_step(self) -> None:
        """Kill a rank of a node that is stopped at a step of the hand-off; one of another node goes on."""
        nodes = {node.pid: node for node in await self._nodes.serving()}
        step = self._rng.choice([*SENDER, *RECEIVER])
        node: NodeStatus | None = None
        while node is None and not self._are_answered:
            with RequestedFault(self._failpoints_dir, step, "stop") as fault:
                await until(lambda: fault.has_struck() or self._are_answered)
                if fault.has_struck() and (ranks := rank_processes(fault.pid)):
                    node = nodes[fault.pid]
                    self._end(node, ranks[0], signal.SIGKILL)
                    self.seen["lost at a step"] += 1

    @property
    def _are_answered(self) -> bool:
        return bool(self._clients) and all(client.done() for client in self._clients)

    async def _stop_a_rank_for_a_while(self) -> None:
        _, rank = await self._some_rank()
        await self._stop(rank, self._rng.uniform(0.05, 1.0))

    async def _stop_a_node_for_a_while(self) -> None:
        node = await self._some_node()
        await self._stop(node.pid, self._rng.uniform(0.1, 2.0))

    async def _cut_from_the_router(self) -> None:
        node, router = await self._some_node(), await self._nodes.router()
        self.seen["connections cut"] += cut_connections_between(router.pid, node.pid)

    async def _cut_a_pair(self) -> None:
        await self._a_while()
        nodes = await self._nodes.serving()
        pair = [self._rng.choice([node for node in nodes if node.role == role]) for role in ("prefill", "decode")]
        self.seen["connections cut"] += cut_connections_between(pair[0].pid, pair[1].pid)

    def _end(self, node: NodeStatus, pid: int, number: signal.Signals) -> None:
        self._doom(node)
        os.kill(pid, number)

    def _doom(self, node: NodeStatus) -> None:
        self._nodes.doom(node)
        self.seen["nodes ended"] += 1

    @staticmethod
    async def _stop(pid: int, seconds: float) -> None:
        # A rank that was stopped for too long on a busy machine has been killed.
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(seconds)
            os.kill(pid, signal.SIGCONT)


@contextmanager
def nothing_is_left() -> Iterator[set[int]]:
    """Yield a set for processes that must have ended afterwards; nobody's shared memory may be left then, either."""
    before, processes = orphaned_segments(), set[int]()
    yield processes
    wait_until_gone(processes)
    require_none_orphaned(before)


@pytest.mark.timeout(200 + 30 * NUM_SCHEDULES)
@pytest.mark.parametrize("shapes", list(SHAPES)[: 1 if NUM_SCHEDULES <= FEW else None])
async def test_streams_go_on_and_nothing_of_a_lost_rank_is_left(
    directory: Path, asked: Sequence[Asked], failpoints_dir: Path, tmp_path: Path, shapes: str
) -> None:
    seen: Counter[str] = Counter()
    seeds = _seeds(shapes)
    environment = {"BATON_FAILPOINTS": str(failpoints_dir)}
    with (
        nothing_is_left() as processes,
        process_cluster(tmp_path / "run", directory, *FLAGS, *SHAPES[shapes], environment=environment) as cluster,
    ):
        for name in ("prefill-1", "decode-1"):
            changed = await asyncio.to_thread(cluster.baton, "set-role", name, ROLES[name])
            assert changed.returncode == 0, changed.stderr
        async with cluster.session() as session:
            nodes = Nodes(session)
            await nodes.wait_until_whole()
            # Everything that is made once and kept exists after these.
            warm_up = Schedule(-1, nodes, asked, failpoints_dir)
            await warm_up.stream()
            await nodes.wait_until_whole()
            before, of_ranks = Counted(session), _holdings(nodes.ranks_seen)
            # A mover's helper starts when there is something to move while digests are to be computed.
            of_ranks["thread"] += 1
            began = orphaned_segments()
            for seed in seeds:
                schedule = Schedule(seed, nodes, asked, failpoints_dir)
                with named_seed(seed):
                    await schedule.run()
                require_none_orphaned(began)
                processes |= nodes.ranks_seen
                seen += schedule.seen
            await nodes.wait_until_whole()
            processes |= nodes.ranks_seen
            await before.no_process_holds_more()
            # A stage has a transfer agent, whose sockets may be closed a little later, as a node's.
            with suppress(TimeoutError):
                await until(lambda: not _holdings(nodes.ranks_seen) - of_ranks)
            assert not _holdings(nodes.ranks_seen) - of_ranks
    assert seen["right"] == len(seeds) * NUM_CLIENTS * REQUESTS_PER_CLIENT, seen
    if NUM_SCHEDULES >= 20:
        assert seen["failed over"] >= 2, seen
        assert seen["connections cut"] >= 2, seen
        assert {f"{one} to {other}" for one in PREFILL for other in DECODE} <= seen.keys(), seen


def _seeds(shapes: str) -> range:
    """A few seeds are all for the first shapes; of many, three fifths are, and the others for the other shapes."""
    seeds = seeds_from_first(NUM_SCHEDULES)
    num_first = -(-NUM_SCHEDULES * 3 // 5) if NUM_SCHEDULES > FEW else NUM_SCHEDULES
    return seeds[:num_first] if shapes == next(iter(SHAPES)) else seeds[num_first:]


def _holdings(pids: Iterable[int]) -> Counter[str]:
    """The most of each kind of descriptor, and of threads, that any of these processes holds."""
    most: Counter[str] = Counter()
    for pid in pids:
        most |= holdings(pid).counted()
    return most
