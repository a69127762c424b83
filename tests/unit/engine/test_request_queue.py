"""The request queues of all policies: one suite for what they share, and tests of turns and of priorities."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.request import Request
from baton.engine.waiting.request_queue import RequestQueue
from baton.engine.waiting.waiting_requests import WaitingRequests
from baton.errors import ConfigError
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams
from tests.support.engine_rig import EngineRig


def request(name: str, priority: int = 0, arrival: float = 0.0, turn_in_s: float = 0.0) -> Request:
    spec = RequestSpec([1], SamplingParams(), priority=priority)
    return Request(name, spec, arrival_time=arrival, turn_in_s=turn_in_s)


def names(requests: Sequence[Request] | RequestQueue) -> list[str]:
    return [one.request_id for one in requests]


@pytest.fixture(params=["turns", "fcfs", "priority"])
def queue(request: pytest.FixtureRequest) -> RequestQueue:
    return RequestQueue(policy=request.param, ageing_s=60.0)


def test_requests_of_equal_priority_keep_their_order(queue: RequestQueue) -> None:
    for name in "abc":
        queue.add(request(name))
    assert (names(queue), len(queue)) == (["a", "b", "c"], 3)
    assert [queue.pop().request_id for _ in range(3)] == ["a", "b", "c"]
    with pytest.raises(IndexError):
        queue.pop()


def test_requests_that_are_put_back_are_next_and_in_order(queue: RequestQueue) -> None:
    for name in "abcd":
        queue.add(request(name))
    queue.put_back([queue.pop(), queue.pop()])
    assert names(queue) == ["a", "b", "c", "d"]
    queue.prepend(request("preempted"))
    assert names(queue) == ["preempted", "a", "b", "c", "d"]


def test_several_requests_are_removed_and_unknown_ids_skipped(queue: RequestQueue) -> None:
    for name in "abcd":
        queue.add(request(name))
    queue.remove_many({"b", "d", "stranger"})
    assert (names(queue), len(queue)) == (["a", "c"], 2)
    assert queue.pop().request_id == "a"


def test_of_equal_requests_the_newest_is_preempted(queue: RequestQueue) -> None:
    running = [request("old"), request("new")]
    last = queue.last_in_turn(running)
    assert last is running[1]
    assert queue.last_in_turn([]) is None


def test_smaller_priorities_come_first_and_then_earlier_arrivals() -> None:
    queue = RequestQueue(policy="priority", ageing_s=0.0)
    for one in (
        request("late", 1, 9.0),
        request("urgent", -3, 9.5),
        request("early", 1, 2.0),
        request("plain", 0, 50.0),
    ):
        queue.add(one)
    assert [queue.pop().request_id for _ in range(4)] == ["urgent", "plain", "early", "late"]
    running = [request("large", 5, 1.0), request("small", 0, 9.0)]
    assert queue.last_in_turn(running) is running[0]


def test_waiting_makes_up_for_priority() -> None:
    queue = RequestQueue(policy="priority", ageing_s=10.0)
    queue.add(request("patient", 1, 0.0))
    queue.add(request("hurried", 0, 9.0))
    queue.add(request("too late", 0, 11.0))
    assert names(queue) == ["hurried", "patient", "too late"]


@given(st.lists(st.tuples(st.floats(0, 5), st.none() | st.floats(0, 9), st.booleans()), max_size=40))
def test_a_request_is_overtaken_only_by_those_that_come_before_its_turn(
    arrivals: list[tuple[float, float | None, bool]],
) -> None:
    """Requests come some time after each other, with turns or from routers that tell none (None), and may be served."""
    queue, now, waiting = RequestQueue(policy="turns"), 0.0, dict[str, tuple[float, float]]()
    for number, (later_s, turn_in_s, is_served) in enumerate(arrivals):
        now += later_s
        queue.add(request(f"r{number}", arrival=now, turn_in_s=turn_in_s or 0.0))
        waiting[f"r{number}"] = (now, now + (turn_in_s or 0.0))
        if is_served:
            arrived, turn = waiting.pop(queue.pop().request_id)
            assert all(turn <= other for _, other in waiting.values())
            assert all(arrived <= other for other_arrived, other in waiting.values() if other_arrived <= arrived)
    running = [request(name, arrival=arrived, turn_in_s=turn - arrived) for name, (arrived, turn) in waiting.items()]
    if running:
        last = queue.last_in_turn(running)
        assert last is not None
        assert waiting[last.request_id][1] == pytest.approx(max(turn for _, turn in waiting.values()))


def test_the_heap_agrees_with_sorting() -> None:
    rng = Random(3)
    queue = RequestQueue(policy="priority", ageing_s=7.0)
    known: list[Request] = []
    for number in range(400):
        one = request(f"r{number}", rng.randrange(-3, 4), float(rng.randrange(40)))
        queue.add(one)
        known.append(one)
        if rng.random() < 0.3:
            gone = {rng.choice(known).request_id for _ in range(3)}
            queue.remove_many(gone)
            known = [r for r in known if r.request_id not in gone]
        if known and rng.random() < 0.3:
            best = min(known, key=lambda r: (r.arrival_time + 7.0 * r.spec.priority, r.arrival_time))
            popped = queue.pop()
            assert (popped.arrival_time + 7.0 * popped.spec.priority) == best.arrival_time + 7.0 * best.spec.priority
            known.remove(popped)
    assert sorted(names(queue)) == sorted(names(known))


def test_the_request_whose_turn_is_last_is_preempted_though_it_came_first() -> None:
    rig = EngineRig(num_blocks=6, max_num_seqs=2)
    rig.begin("flood", 8, max_tokens=10, turn_in_s=9.0)
    rig.add("light", 7, max_tokens=10)
    while "light" not in rig.ends:
        rig.step()
    assert [rig.requests[name].num_preemptions for name in ("flood", "light")] == [1, 0]
    rig.run_right("flood", "light")


def test_turns_order_requests_that_have_not_begun() -> None:
    queue, heavy, light = RequestQueue(policy="turns"), request("heavy", turn_in_s=9.0), request("light")
    queue.add(light)
    queue.prepend(heavy)
    assert names(queue) == ["heavy", "light"], "it was preempted"
    queue.put_back([queue.pop()])
    assert names(queue) == ["heavy", "light"]
    assert queue.last_in_turn([heavy, light]) is heavy
    heavy.num_preemptions = 1
    assert queue.last_in_turn([heavy, light]) is light, "none twice before the others"


def test_beams_do_not_wait_for_their_turn_in_each_step() -> None:
    rig = EngineRig(num_blocks=400, max_num_seqs=4)
    rig.begin("search", 4, beam_width=4, max_tokens=9, turn_in_s=30.0)
    for number in range(6):
        rig.add(f"light{number}", 8, max_tokens=20)
    rig.steps(8)
    assert "search" in rig.ends


def test_in_turn_requests_get_seats_and_those_whose_kv_has_arrived_too() -> None:
    rig = EngineRig(max_num_seqs=1)
    rig.begin("first", 4, max_tokens=9)
    for name, turn_in_s in (("c", 3.0), ("a", 0.0), ("b", 2.0)):
        rig.add(name, 4, max_tokens=2, turn_in_s=turn_in_s)
    rig.run()
    assert list(rig.ends) == ["first", "a", "b", "c"]
    waiting = WaitingRequests(rig.config)
    for number, turn_in_s in enumerate((3.0, 0.0, 2.0, 0.0)):
        waiting.kv_arrived(request(f"r{number}", turn_in_s=turn_in_s))
    assert names(waiting.arrived) == ["r1", "r3", "r2", "r0"]


def test_with_priorities_urgent_requests_run_first_and_others_are_preempted() -> None:
    rig = EngineRig(num_blocks=6, policy="priority", max_num_seqs=2)
    rig.begin("cheap", 8, max_tokens=10, priority=5)
    rig.add("urgent", 7, max_tokens=10, priority=-1)
    while "urgent" not in rig.ends:
        rig.step()
    assert rig.requests["cheap"].num_preemptions == 1, "though it came first"
    assert rig.requests["urgent"].num_preemptions == 0
    rig.run()
    assert all(rig.tokens[name] == rig.expected(name, 10) for name in ("cheap", "urgent"))


def test_with_priorities_waiting_requests_are_tried_by_priority() -> None:
    rig = EngineRig(policy="priority", max_num_seqs=1)
    rig.begin("first", 4, max_tokens=2)
    for name, priority in (("c", 3), ("a", 1), ("b", 2)):
        rig.add(name, 4, max_tokens=2, priority=priority)
    rig.run()
    assert list(rig.ends) == ["first", "a", "b", "c"]


def test_a_stream_of_urgent_requests_starves_no_other_request() -> None:
    rig = EngineRig(policy="priority", max_num_seqs=1, priority_ageing_s=5.0)
    rig.add("patient", 4, max_tokens=1, priority=2)
    for number in range(30):
        rig.begin(f"urgent{number}", 4, max_tokens=1, priority=0)
        rig.clock.advance(1.0)
    assert 10 <= list(rig.ends).index("patient") <= 12


@pytest.mark.parametrize("ageing_s", [-1.0, float("nan"), float("inf")])
def test_ageing_is_a_number_of_seconds(ageing_s: float) -> None:
    with pytest.raises(ConfigError, match="priority_ageing_s"):
        EngineRig(priority_ageing_s=ageing_s)
