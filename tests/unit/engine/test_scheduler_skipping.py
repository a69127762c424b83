"""Requests that wait for one resource do not delay those that wait for another, and none is passed for ever."""

from __future__ import annotations

from typing import Any

import pytest

from baton.engine.request import RequestStatus
from baton.messages.node import Leg, Outcome
from tests.doubles.fake_grammar import FakeMatcher
from tests.support.engine_rig import EngineRig

SCHEMA = '{"type": "integer"}'


def with_all_loads_under_way(num_loads: int, **limits: Any) -> EngineRig:
    """An engine with as many loads as may run at once, none of which has arrived."""
    rig = EngineRig(num_blocks=257, max_num_seqs=num_loads, **limits)
    for number in range(num_loads):
        rig.add(f"d{number}", 8, leg=Leg.DECODE, max_tokens=3)
    rig.step()
    assert len(rig.connector.loads) == num_loads
    return rig


# --- decode legs that wait until fewer loads are under way ---


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_decode_leg_that_waits_for_a_load_slot_delays_no_request_that_needs_a_seat(policy: str) -> None:
    rig = EngineRig(num_blocks=257, max_num_seqs=16, policy=policy)
    for number in range(17):
        rig.add(f"d{number}", 8, leg=Leg.DECODE, max_tokens=3)
    rig.step()
    assert not rig.core.has_work(), "16 loads are under way, and the 17th can't begin"
    rig.add("whole", 12, max_tokens=2)
    rig.add("embedding", 12, leg=Leg.EMBED)
    assert rig.core.has_work()
    output = rig.scheduler.schedule()
    assert output.num_scheduled_tokens == {"whole": 12, "embedding": 12}
    rig.commit(output)
    rig.run_right("whole")
    assert rig.reason("embedding") is not None
    assert rig.requests["d16"].status is RequestStatus.WAITING
    assert not rig.core.has_work()


def test_a_passed_decode_leg_loads_as_soon_as_a_load_slot_is_free() -> None:
    rig = with_all_loads_under_way(2)
    rig.add("third", 8, leg=Leg.DECODE, max_tokens=3)
    for number in range(40):
        rig.add(f"whole{number}", 6, max_tokens=1)
    rig.run()
    assert sum(name.startswith("whole") for name in rig.ends) == 40, "there were seats for all of them"
    rig.complete_transfer("d0")
    rig.step()
    rig.step()
    assert "third" in rig.connector.loads
    for name in ("d1", "third"):
        rig.complete_transfer(name)
    rig.run_right("d0", "d1", "third")


def test_decode_legs_begin_to_load_in_their_own_order() -> None:
    rig = with_all_loads_under_way(1)
    for name in ("second", "third"):
        rig.add(name, 8, leg=Leg.DECODE, max_tokens=1)
        rig.add(f"beside {name}", 6, max_tokens=1)
    rig.run()
    order = []
    for name in ("d0", "second", "third"):
        order += list(rig.connector.loads)
        rig.complete_transfer(name)
        rig.run()
    assert order == ["d0", "second", "third"]


# --- requests that wait for a seat ---


def test_a_load_may_begin_while_an_earlier_request_waits_for_a_seat() -> None:
    rig = EngineRig(max_num_seqs=1)
    rig.begin("stream", 4, max_tokens=20)
    rig.add("whole", 8, max_tokens=2)
    rig.begin("d", 8, leg=Leg.DECODE, max_tokens=2)
    assert list(rig.connector.loads) == ["d"]
    rig.complete_transfer("d")
    rig.run()
    for name, count in (("stream", 20), ("whole", 2), ("d", 2)):
        assert rig.tokens[name] == rig.expected(name, count)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_loads_pass_a_request_that_waits_for_a_seat_a_bounded_number_of_times(policy: str) -> None:
    """A loaded request gets the next seat, so without a bound a stream of decode legs could delay it for ever."""
    rig = EngineRig(max_num_seqs=1, max_times_passed=3, policy=policy)
    rig.begin("stream", 4, max_tokens=2)
    rig.add("whole", 8, max_tokens=2)
    for number in range(20):
        rig.add(f"d{number}", 8, leg=Leg.DECODE, max_tokens=2)
        while rig.core.has_work() and "whole" not in rig.ends:
            rig.step()
            for name in [n for n in rig.connector.loads if rig.scheduler.requests.get(n) is not None]:
                if rig.requests[name].status is RequestStatus.WAITING_FOR_REMOTE_KVS:
                    rig.complete_transfer(name)
        if "whole" in rig.ends:
            break
    assert "whole" in rig.ends
    assert sum(name.startswith("d") for name in rig.ends) <= 3
    assert rig.tokens["whole"] == rig.expected("whole", 2)


def test_no_load_begins_before_a_preempted_request_runs() -> None:
    rig = EngineRig(num_blocks=6)
    rig.add("old", 8, max_tokens=10)
    rig.add("new", 7, max_tokens=10)
    while rig.requests["new"].status is not RequestStatus.PREEMPTED:
        rig.step()
    rig.add("d", 1, leg=Leg.DECODE, max_tokens=2)
    while "old" not in rig.ends:
        assert "d" not in rig.connector.loads
        rig.step()


def test_without_chunked_prefill_loads_begin_while_a_prompt_waits_for_a_step() -> None:
    rig = EngineRig(max_num_batched_tokens=40, max_model_len=40, max_num_seqs=4, enable_chunked_prefill=False)
    rig.begin("stream", 4, max_tokens=12)
    rig.add("whole", 40 - 1, max_tokens=1)
    rig.begin("d", 8, leg=Leg.DECODE, max_tokens=2)
    assert list(rig.connector.loads) == ["d"]
    rig.step()
    assert "whole" in rig.ends, "and its own step comes next"


# --- requests whose grammar had to be compiled ---


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("leg", [Leg.WHOLE, Leg.DECODE])
def test_a_request_whose_grammar_was_compiled_keeps_its_place(policy: str, leg: Leg) -> None:
    rig = EngineRig(max_num_seqs=1, policy=policy)
    rig.add("first", 4, max_tokens=2)
    rig.add("with grammar", 8, leg=leg, json_schema=SCHEMA, max_tokens=2)
    rig.add("later", 8, leg=leg, max_tokens=2)
    rig.scheduler.grammar_compiled("with grammar", [FakeMatcher([], range(1000))])
    order: list[str] = []
    while rig.core.has_work():
        rig.step()
        order += [name for name in rig.connector.loads if name not in order]
        for name in [n for n in order if n in rig.scheduler.requests and n in rig.connector.loads]:
            if rig.requests[name].status is RequestStatus.WAITING_FOR_REMOTE_KVS:
                rig.complete_transfer(name)
    assert list(rig.ends) == ["first", "with grammar", "later"]
    assert rig.reason("later") is Outcome.LENGTH


def test_grammars_compiled_in_another_order_change_no_places() -> None:
    rig = EngineRig(max_num_seqs=1)
    rig.begin("running", 4, max_tokens=3)
    for name in ("a", "b", "c"):
        rig.add(name, 6, json_schema=SCHEMA, max_tokens=1)
    rig.add("plain", 6, max_tokens=1)
    for name in ("c", "a", "b"):
        rig.scheduler.grammar_compiled(name, [FakeMatcher([], range(1000))])
    rig.run()
    assert list(rig.ends) == ["running", "a", "b", "c", "plain"]


# --- with the prefix cache off ---


def test_no_lookups_are_counted_with_prefix_caching_off() -> None:
    rig = EngineRig(enable_prefix_caching=False)
    for name in ("one", "again"):
        rig.complete(name, list(range(20)), max_tokens=2)
    rig.begin("d", list(range(20)), leg=Leg.DECODE, max_tokens=2)
    rig.complete_transfer("d")
    rig.run()
    cache = rig.scheduler.make_stats().prefix_cache
    assert (cache.num_requests, cache.num_tokens) == (0, 0)
    assert cache.num_hit_tokens == {"device": 0, "host": 0, "remote": 20}, "and what came from elsewhere is known"
    assert rig.tokens["one"] == rig.tokens["again"] == rig.tokens["d"] == rig.expected("one", 2)
