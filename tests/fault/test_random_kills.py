"""SIGKILL of prefill nodes, decode nodes, routers and Redis at random moments under load: no request is lost or wrong.

Streams are moved between decode nodes, and prompts pulled, all the time. One process of each kind is killed, and more
until a kill has met an answer in its middle, which another node went on with. `BATON_KILLS=300` kills 300 times,
`BATON_KILLS_SEED=N` draws other kills.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from random import Random

import pytest

from baton.client import AsyncGenerationClient, OperatorClient
from baton.config import bundled_model_dir
from baton.errors import BatonError
from tests.support.kill_drill import ROLES, Killer, Load, observe_answer, quantile, requests
from tests.support.process_cluster import ProcessCluster, process_cluster

NUM_KILLS = int(os.environ.get("BATON_KILLS", "4"))
SEED = int(os.environ.get("BATON_KILLS_SEED", "1"))
NUM_CLIENTS = 8
NUM_REQUESTS = 6 if NUM_KILLS < 20 else 18
"""Different requests; six are one of each kind."""
VOCAB_SIZE = 1024
SIZES = ("--prefill", "2", "--decode", "2", "--routers", "2")
FLAGS = (*SIZES, "--threads", "1", "--http-port", "0", "--kv-pulls", "always")


@pytest.fixture(scope="module")
def doomed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    with process_cluster(tmp_path_factory.mktemp("doomed") / "run", bundled_model_dir(), *FLAGS) as running:
        yield running


class Moves:
    """Moves streams between decode nodes, at whatever router they are, until it is stopped."""

    def __init__(self, cluster: ProcessCluster, rng: Random) -> None:
        self._cluster = cluster
        self._rng = rng
        self.num_moved = 0
        self.stopped = threading.Event()

    def run(self) -> None:
        """Move one stream after the other; called in a thread."""
        while not self.stopped.wait(0.05):
            # A router that was killed comes back with another address.
            routers = self._cluster.state.operator_addresses
            if not routers:
                continue
            with suppress(BatonError), closing(OperatorClient(self._rng.choice(routers))) as operator:
                live = [row for row in operator.requests(0, timeout_s=1.0) if row.state == "Decoding"]
                if live:
                    operator.move(self._rng.choice(live).request_id, timeout_s=5.0)
                    self.num_moved += 1


@pytest.mark.timeout(180 + 20 * NUM_KILLS)
async def test_random_kills_lose_no_request_and_change_no_token(
    doomed: ProcessCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = Random(SEED)
    addresses = [process.address for process in doomed.state.processes if process.role == "router"]
    asked = requests(rng, NUM_REQUESTS, VOCAB_SIZE, longest_prompt=400)
    async with AsyncGenerationClient(*addresses, rng=rng) as client:
        undisturbed = [await observe_answer(client, request) for request in asked]
    assert all(seen.check(seen) == "" for seen in undisturbed)
    load = Load(addresses, asked, undisturbed)
    killer = Killer(doomed, rng, NUM_KILLS, pause_s=(0.2, 1.0))
    clients = [asyncio.create_task(load.client(Random(rng.getrandbits(32)))) for _ in range(NUM_CLIENTS)]
    result = load.result
    moves = Moves(doomed, rng)
    moving = asyncio.create_task(asyncio.to_thread(moves.run))

    def is_enough() -> bool:
        return (moves.num_moved > 0 and result.moved(killer.times) > 0) or bool(result.lost or result.wrong)

    await killer.run(is_enough)
    moves.stopped.set()
    await moving
    load.stop()
    await asyncio.gather(*clients)
    with capsys.disabled():
        kills = ", ".join(f"{killer.killed[role]} {role}" for role in ROLES)
        stalls_s = result.stalls_s(killer.times)
        stalls = ", ".join(f"{share:.0%} {quantile(stalls_s, share):.2f}" for share in (0.5, 0.9, 0.99, 1.0))
        sys.stdout.write(
            f"\nseed {SEED}, killed {kills}: {len(result.answers)} answers, {result.retried} retried, "
            f"{result.moved(killer.times)} of them in the middle, {moves.num_moved} streams moved, "
            f"{len(result.lost)} lost, {len(result.wrong)} wrong; longest stall of {len(stalls_s)} that a kill met "
            f"(s): {stalls}\n"
        )
    assert killer.killed.total() >= NUM_KILLS
    assert result.lost == []
    assert result.wrong == []
    async with doomed.session() as session:
        await session.wait_until_whole()
        await session.wait_until_idle()
