"""What an engine says of its load: who waits for what, and where prompts were found."""

from __future__ import annotations

from baton.engine.request import Leg, RequestStatus
from tests.support.engine_rig import EngineRig, prompt_of


def waiting(rig: EngineRig) -> dict[str, int]:
    """Reasons that anybody has."""
    by_reason = rig.core.make_stats().num_requests_waiting_by_reason
    return {reason: number for reason, number in by_reason.items() if number}


def test_everybody_who_waits_has_one_reason() -> None:
    rig = EngineRig(max_num_seqs=2)
    rig.connector.unknown.add("unsure")
    rig.add("runs", 8, max_tokens=9)
    rig.add("runs too", 8, max_tokens=9)
    rig.add("pulls", 8, leg=Leg.DECODE, max_tokens=3)
    rig.add("unsure", 8, leg=Leg.DECODE, max_tokens=3)
    assert waiting(rig) == {"capacity": 4}
    rig.step()
    rig.add("queues", 8, max_tokens=3)
    rig.step()
    assert waiting(rig) == {"remote_kv": 1, "deferred": 1, "capacity": 1}
    rig.deliver("pulls")
    assert waiting(rig) == {"arrived": 1, "deferred": 1, "capacity": 1}
    rig.connector.unknown.clear()
    rig.abort("queues", "unsure")
    assert waiting(rig) == {"arrived": 1}
    rig.run()
    assert waiting(rig) == {}


def test_a_deferred_request_that_is_told_its_answer_waits_for_something_else() -> None:
    rig = EngineRig()
    rig.connector.unknown.add("unsure")
    rig.add("unsure", 8, leg=Leg.DECODE, max_tokens=3)
    rig.step()
    assert waiting(rig) == {"deferred": 1}
    rig.connector.unknown.clear()
    rig.transfer()
    rig.step()
    assert waiting(rig) == {"remote_kv": 1}


def test_preempted_and_swapped_requests_are_told_apart() -> None:
    for mode, reason, status in (
        ("recompute", "preempted", RequestStatus.PREEMPTED),
        ("swap", "swapped", RequestStatus.SWAPPED),
    ):
        rig = EngineRig(6, preemption_mode=mode, num_host_blocks=8)
        rig.add("old", 8, max_tokens=8)
        rig.add("new", 7, max_tokens=8)
        while rig.requests["new"].status is not status:
            rig.step()
        assert waiting(rig) == {reason: 1}
        assert rig.core.make_stats().num_preemptions_by_mode[mode] == 1
        rig.run()
        assert waiting(rig) == {}


def test_hits_are_counted_where_they_were_found() -> None:
    rig = EngineRig()
    prompt = prompt_of(16)
    rig.add("pulled", prompt, leg=Leg.DECODE, max_tokens=2)
    rig.step()
    assert rig.core.make_stats().prefix_cache.num_hits == {"device": 0, "host": 0, "remote": 0}, "not yet"
    rig.deliver("pulled")
    rig.run()
    rig.add("found", prompt, max_tokens=2)
    rig.run()
    stats = rig.core.make_stats().prefix_cache
    assert (stats.num_requests, stats.num_tokens) == (2, 32)
    assert stats.num_hits == {"device": 1, "host": 0, "remote": 1}
    assert stats.num_hit_tokens == {"device": 12, "host": 0, "remote": 16}
