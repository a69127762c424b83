"""Waiting requests by adapter: one order for all, and adapters that are passed over."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from baton.engine.request import Request
from baton.engine.waiting.request_queue import (
    NO_TURN,
    AdapterQueues,
    QueuePositions,
    RequestQueue,
)
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams

A, B = "a" * 64, "b" * 64


def request(request_id: str, adapter: str = "", priority: int = 0, arrived: float = 0.0) -> Request:
    made = Request(request_id, RequestSpec([1, 2, 3], SamplingParams(), adapter=adapter, priority=priority))
    made.arrival_time = arrived
    return made


def fcfs(positions: QueuePositions) -> RequestQueue:
    return RequestQueue(positions)


def by_priority(positions: QueuePositions) -> RequestQueue:
    return RequestQueue(positions, "priority", ageing_s=2.0)


@pytest.mark.parametrize("policy", [fcfs, by_priority])
@pytest.mark.parametrize("seed", range(20))
def test_requests_come_in_the_order_of_a_single_queue(
    policy: Callable[[QueuePositions], RequestQueue], seed: int
) -> None:
    rng, positions = Random(seed), QueuePositions()
    queues, single = AdapterQueues(lambda: policy(positions)), policy(QueuePositions())
    number = 0
    for _ in range(300):
        action = rng.random()
        if action < 0.5:
            number += 1
            fields = f"r{number}", rng.choice(["", A, B]), rng.randint(0, 3), float(number)
            sibling = f"s{number}", *fields[1:]
            if action < 0.4:
                queues.add(request(*fields))
                single.add(request(*fields))
            else:
                queues.prepend_many([request(*fields), request(*sibling)])
                single.prepend(request(*sibling))
                single.prepend(request(*fields))
        elif action < 0.6:
            gone = {f"r{rng.randint(1, number + 1)}" for _ in range(3)}
            queues.remove_many(gone)
            single.remove_many(gone)
        elif len(single):
            popped = [[queue.pop() for _ in range(min(3, len(queue)))] for queue in (queues, single)]
            assert [one.request_id for one in popped[0]] == [one.request_id for one in popped[1]]
            if action < 0.8:
                queues.put_back(popped[0])
                single.put_back(popped[1])
        assert (len(queues), queues.num_tokens) == (len(single), single.num_tokens)
        assert queues.next_turn == single.next_turn


def test_an_adapter_that_is_passed_over_is_left_out_until_the_next_step() -> None:
    positions = QueuePositions()
    queues = AdapterQueues(lambda: RequestQueue(positions))
    for one in (request("a1", A), request("b1", B), request("base"), request("a2", A)):
        queues.add(one)
    first = queues.pop()
    queues.pass_over(A)
    assert [queues.pop().request_id for _ in range(2)] == ["b1", "base"]
    assert (len(queues), queues.next_turn, queues.next_request) == (1, NO_TURN, None)
    queues.put_back([first])
    queues.pass_over("")
    queues.pass_over(B)
    with pytest.raises(IndexError):
        queues.pop()
    queues.begin_step()
    assert [queues.pop().request_id for _ in range(2)] == ["a1", "a2"]
    with pytest.raises(IndexError):
        queues.pop()
