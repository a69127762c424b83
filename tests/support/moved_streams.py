"""Moves streams of a simulated cluster to any other decode node, at any moment."""

from __future__ import annotations

import asyncio
from collections import Counter
from random import Random

from baton.messages.node import Role
from router.flight.active_request import ActiveRequest
from router.flight.flight_table import MoveEnded, MoveTo, StopMove
from router.live_requests import LiveRequests
from tests.support.simulated_cluster import SimulatedCluster

_ROUNDS = 60


def count_moves(requests: LiveRequests, struck: Counter[str]) -> None:
    """Count how the moves of this router end."""
    num_moves: Counter[str] = Counter()

    def note(active: ActiveRequest, ended: MoveEnded) -> None:
        how = (
            "stream moved" if ended.placement is not None else "stream stayed" if ended.why else "over before it moved"
        )
        struck[how] += 1
        num_moves[active.request.request_id] += ended.placement is not None
        struck["moved twice"] += num_moves[active.request.request_id] == 2

    requests.on_move_ended.add(note)


def move_streams(rng: Random, cluster: SimulatedCluster, requests: LiveRequests, struck: Counter[str]) -> None:
    """Begin a move of each stream that can be moved, or end one that is under way."""
    decodes = [node.description for _, node in sorted(cluster.nodes.items()) if node.role is Role.DECODE]
    for active in list(requests.active_requests()):
        others = [node for node in decodes if node is not active.flight.decoder]
        if (key := active.flight.moving_to) is not None:
            if rng.random() < 0.02:
                struck["move ended"] += 1
                requests.feed(active, StopMove(key, "the test ends it"))
        elif others and not active.flight.is_over:
            requests.feed(active, MoveTo(rng.choice(others), rng.choice([3, 10, 40])))


async def keep_moving(rng: Random, cluster: SimulatedCluster, requests: LiveRequests, struck: Counter[str]) -> None:
    """Move streams over and over again for some seconds."""
    for _ in range(_ROUNDS):
        await asyncio.sleep(rng.uniform(0.0, 0.1))
        move_streams(rng, cluster, requests, struck)
