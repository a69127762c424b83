"""Streams that survive their router, which is killed or stopped, together with Redis, or is the only one."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

from baton.client import AsyncGenerationClient
from baton.messages.generation import Accepted, Chunk, Finished, GenerateRequest
from tests.support.always_first import AlwaysFirst
from tests.support.caller import Answer
from tests.support.process_cluster import ClusterSession
from tests.support.slow_model import assert_undisturbed, slow_request


class Watched:
    """A client of several routers, and the events that it received."""

    def __init__(self, client: AsyncGenerationClient) -> None:
        self._client = client
        self._read = asyncio.Event()
        self.num_tokens: dict[str, int] = {}

    async def generate(self, request: GenerateRequest) -> Answer:
        """Run one request to its end."""
        answer, num_accepted = Answer(), 0
        async for event in self._client.generate(request):
            match event:
                case Accepted():
                    num_accepted += 1
                case Chunk():
                    answer.indices += range(event.first_index, event.first_index + len(event.token_ids))
                    answer.token_ids += event.token_ids
                    self.num_tokens[request.request_id] = len(answer.token_ids)
                    self._read.set()
                case Finished():
                    answer.finished = event
        assert num_accepted == 1
        return answer

    async def wait_for_tokens(self, request: GenerateRequest, count: int) -> None:
        """Return once the client has so many of its tokens."""
        while self.num_tokens.get(request.request_id, 0) < count:
            self._read.clear()
            await self._read.wait()


def routers(session: ClusterSession) -> list[str]:
    return [process.address for process in session.cluster.state.processes if process.role == "router"]


async def disturbed(
    session: ClusterSession, name: str, act: Callable[[], None], num_routers: int = 2
) -> list[tuple[GenerateRequest, Answer]]:
    """Apply a fault to the first router while it streams one answer and another request's prompt is being computed."""
    requests = [
        slow_request(f"{name}-streams", 1, 12),
        slow_request(f"{name}-sampled", 1, 9, sampled=True),
        slow_request(f"{name}-begins", 4, 3),
    ]
    async with AsyncGenerationClient(*routers(session)[:num_routers], rng=AlwaysFirst()) as client:
        watched = Watched(client)
        answering = [asyncio.create_task(watched.generate(request)) for request in requests]
        await watched.wait_for_tokens(requests[0], 3)
        act()
        answers = await asyncio.gather(*answering)
    for request, answer in zip(requests, answers, strict=True):
        assert_undisturbed(answer, request)
    return list(zip(requests, answers, strict=True))


async def test_streams_continue_when_their_router_is_killed(session: ClusterSession) -> None:
    before = session.cluster.process("router-0")
    answers = await disturbed(session, "killed", lambda: os.kill(before.pid, signal.SIGKILL))
    assert all(answer.end.path.attempts == 1 for _, answer in answers), "its nodes went on with all of them"
    assert answers[0][1].end.path.reason == "adopted from another router"
    await session.wait_until_replaced(before)


async def test_streams_continue_when_their_router_is_stopped_and_resumed(session: ClusterSession) -> None:
    pid = session.cluster.process("router-0").pid
    try:
        answers = await disturbed(session, "stopped", lambda: os.kill(pid, signal.SIGSTOP))
    finally:
        os.kill(pid, signal.SIGCONT)
    assert all(answer.end.path.attempts == 1 for _, answer in answers)
    # Nodes tell it that its requests have moved, and it serves as before.
    request = slow_request("after-the-stop", 1)
    assert_undisturbed(await session.generate(request), request)


async def test_streams_start_over_when_router_and_redis_are_killed(session: ClusterSession) -> None:
    """No router can find the requests, so the clients send them again."""
    with session.cluster.stopped(session.cluster.state.pid):
        redis = session.cluster.signal("redis", signal.SIGKILL)
        router = session.cluster.process("router-0")
        answers = await disturbed(session, "unknown", lambda: os.kill(router.pid, signal.SIGKILL))
    assert answers[0][1].end.path.reason != "adopted from another router"
    await session.wait_until_replaced(redis)
    await session.wait_until_replaced(router)


async def test_streams_continue_when_the_only_known_router_restarts(session: ClusterSession) -> None:
    """It is started again on its port, and finds the records of its predecessor."""
    address = session.cluster.state.grpc_address
    before = session.cluster.process("router-0")
    answers = await disturbed(session, "alone", lambda: os.kill(before.pid, signal.SIGKILL), num_routers=1)
    assert all(answer.end.path.attempts <= 2 for _, answer in answers)
    await session.wait_until_replaced(before)
    assert session.cluster.state.grpc_address == address
