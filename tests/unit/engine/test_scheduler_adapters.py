"""Requests with adapters: they wait until theirs is loaded, few different ones run at a time, and no KV is shared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.engine.request import RequestStatus
from baton.messages.node import Leg, Outcome
from tests.doubles.fake_grammar import FakeMatcher
from tests.support.engine_rig import EngineRig, prompt_of

A, B, C = ("a" * 64, "b" * 64, "c" * 64)


def rig_with(**limits: Any) -> EngineRig:
    """An engine whose runner has the adapters A, B and C loaded."""
    rig = EngineRig(**limits)
    rig.runner.adapters.loaded.update(dict.fromkeys((A, B, C), Path("/adapter")))
    return rig


def running(rig: EngineRig) -> set[str]:
    return {name for name, request in rig.scheduler.requests.items() if request.status is RequestStatus.RUNNING}


# --- waiting for an adapter ---


def test_a_request_waits_for_its_adapter_while_others_run() -> None:
    rig = rig_with()
    waiting = rig.add("a", 6, adapter=A, awaits_adapter=True, max_tokens=3)
    assert not rig.core.has_work()
    rig.complete("other", 6, max_tokens=2)
    assert rig.reason("other") is Outcome.LENGTH
    assert waiting.status is RequestStatus.WAITING_FOR_ADAPTER
    assert rig.scheduler.make_stats().num_requests_waiting_by_reason["adapter"] == 1
    assert rig.scheduler.adapters_in_use() == {A}
    rig.scheduler.adapter_loaded("a")
    rig.run()
    assert rig.reason("a") is Outcome.LENGTH
    assert rig.scheduler.adapters_in_use() == set()


def test_a_request_keeps_its_place_while_its_adapter_is_loaded() -> None:
    rig = rig_with(max_num_seqs=1)
    rig.begin("first", 6, max_tokens=2)
    rig.add("a", 6, adapter=A, awaits_adapter=True, max_tokens=2)
    rig.add("later", 6, max_tokens=2)
    rig.scheduler.adapter_loaded("a")
    rig.run()
    assert list(rig.ends) == ["first", "a", "later"]


@pytest.mark.parametrize("adapter_first", [True, False])
def test_a_request_may_wait_for_its_adapter_and_for_its_grammar(adapter_first: bool) -> None:
    rig = rig_with()
    rig.add("a", 6, adapter=A, awaits_adapter=True, json_schema="{}", max_tokens=2)
    arrivals: list[Callable[[], None]] = [
        lambda: rig.scheduler.adapter_loaded("a"),
        lambda: rig.scheduler.grammar_compiled("a", [FakeMatcher([], range(1000))]),
    ]
    first, second = arrivals if adapter_first else reversed(arrivals)
    first()
    assert not rig.core.has_work()
    second()
    rig.run()
    assert rig.reason("a") is Outcome.LENGTH


@pytest.mark.parametrize("outcome", [Outcome.ABORTED, Outcome.ADAPTER_UNAVAILABLE])
def test_a_request_can_end_while_it_waits_for_its_adapter(outcome: Outcome) -> None:
    rig = rig_with()
    rig.add("a", 6, adapter=A, awaits_adapter=True)
    (end,) = rig.abort("a", outcome=outcome)
    assert end.outcome is outcome
    rig.scheduler.adapter_loaded("a")
    assert not rig.core.has_work()
    assert sum(rig.scheduler.make_stats().num_requests_waiting_by_reason.values()) == 0


def test_a_decode_leg_reads_its_prompt_only_once_its_adapter_is_loaded() -> None:
    rig = rig_with()
    rig.complete("d", 9, leg=Leg.DECODE, adapter=A, awaits_adapter=True, max_tokens=3)
    assert not rig.connector.loads
    rig.scheduler.adapter_loaded("d")
    rig.step()
    assert set(rig.connector.loads) == {"d"}


# --- few different adapters at a time ---


def test_a_step_has_at_most_max_loras_adapters_and_a_skipped_request_blocks_nobody() -> None:
    rig = rig_with(max_loras=2)
    for name, adapter in (("a", A), ("b", B), ("c", C), ("base", ""), ("a2", A)):
        rig.add(name, 6, adapter=adapter, max_tokens=4)
    rig.step()
    assert running(rig) == {"a", "b", "base", "a2"}
    rig.run()
    assert set(rig.ends) == {"a", "b", "c", "base", "a2"}


def test_a_skipped_request_is_passed_so_often_and_then_gets_the_next_slot() -> None:
    rig = rig_with(max_loras=1, max_times_passed=2, max_num_seqs=3)
    rig.begin("a0", 6, adapter=A, max_tokens=4)
    rig.add("c", 6, adapter=C, max_tokens=2)
    order = []
    for number in range(1, 8):
        rig.add(f"a{number}", 6, adapter=A, max_tokens=4)
    rig.add("base", 6, max_tokens=2)
    while rig.core.has_work():
        rig.step()
        order += [name for name in sorted(running(rig)) if name not in order]
    # Two pass it, and then its slot is kept, also while no seat is taken: others with adapters wait, and the base model
    # goes on.
    assert order.index("c") == 4, order
    assert {"a1", "a2", "base"} == set(order[1:4])


def test_however_many_requests_wait_for_a_slot_they_hold_up_nobody() -> None:
    rig = rig_with(max_loras=1, max_num_seqs=4)
    rig.begin("a", 6, adapter=A, max_tokens=4)
    for number in range(500):
        rig.add(f"c{number}", 6, adapter=C, max_tokens=1)
    for number in range(200):
        rig.add(f"load{number}", 9, leg=Leg.DECODE, adapter=B, max_tokens=2)
    rig.add("base", 6, max_tokens=2)
    rig.begin("a2", 6, adapter=A, max_tokens=2)
    assert running(rig) == {"a", "base", "a2"}


def test_requests_whose_kv_has_arrived_are_skipped_and_not_forgotten() -> None:
    rig = rig_with(max_loras=1, max_times_passed=1)
    rig.begin("a", 6, adapter=A, max_tokens=6)
    for name, adapter in (("c", C), ("a2", A), ("base", "")):
        rig.add(name, 9, leg=Leg.DECODE, adapter=adapter, max_tokens=4)
    rig.step()
    for name in ("c", "a2", "base"):
        rig.complete_transfer(name)
    rig.step()
    assert running(rig) == {"a", "a2", "base"}
    rig.add("a3", 9, leg=Leg.DECODE, adapter=A, max_tokens=4)
    rig.begin("a4", 6, adapter=A, max_tokens=4)
    assert running(rig) == {"a", "a2", "base"}
    assert "a3" not in rig.connector.loads, "the slot is kept for c, so nothing begins that would come before it"
    rig.run()
    assert list(rig.ends).index("c") < list(rig.ends).index("a4")
    assert "a3" in rig.connector.loads


def test_a_preempted_request_gets_its_slot_back_before_others() -> None:
    rig = rig_with(num_blocks=9, max_loras=1)
    rig.add("a", 8, adapter=A, max_tokens=16)
    rig.add("base", 8, max_tokens=16)
    rig.complete("c", 4, adapter=C, max_tokens=2)
    assert rig.reason("a") is Outcome.LENGTH
    assert set(rig.ends) == {"a", "base", "c"}


# --- KV ---


def test_no_kv_is_shared_between_adapters_or_with_the_base_model() -> None:
    rig = rig_with()
    prompt = prompt_of(12)
    rig.complete("base", prompt, max_tokens=1)
    for name, adapter, cached in (("a", A, 0), ("b", B, 0), ("a again", A, 8), ("base again", "", 8)):
        request = rig.complete(name.replace(" ", "-"), prompt, adapter=adapter, max_tokens=1)
        assert request.num_cached_tokens == cached, name


def test_further_sequences_and_beams_have_the_adapter_of_their_request() -> None:
    rig = rig_with()
    rig.add("many", 6, adapter=A, n=3, max_tokens=3)
    rig.add("beams", 6, adapter=B, n=2, beam_width=2, max_tokens=3)
    seen = set()
    while rig.core.has_work():
        rig.step()
        seen |= {request.adapter for request in rig.scheduler.requests.values()}
        assert rig.scheduler.adapters_in_use() <= {A, B}
    assert seen == {A, B}
