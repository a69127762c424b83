"""Requests with given rows in the engine: what is found, lost and computed again has the tokens of their own rows."""

from __future__ import annotations

from baton.engine.sequences.sequence_group import sequence_id
from baton.messages.node import Leg
from baton.messages.spans import Span
from tests.support.engine_rig import EngineRig

TOKENS = [0, 0, 0, 0, 0, 0, 9, 8, 7, 0, 0, 0, 6]
SPANS = (Span(0, 6, "a" * 64), Span(9, 3, "b" * 64))
OTHERS = (Span(0, 6, "a" * 64), Span(9, 3, "c" * 64))


def test_only_blocks_with_the_same_rows_are_found(rig: EngineRig) -> None:
    rig.complete("warm", TOKENS, spans=SPANS, max_tokens=3)
    for name, spans, cached in (("same", SPANS, 12), ("other", OTHERS, 8), ("text", (), 0)):
        rig.complete(name, TOKENS, spans=spans, max_tokens=3)
        assert rig.requests[name].num_cached_tokens == cached
        assert rig.tokens[name] == rig.expected(name, 3)
    assert len({tuple(rig.tokens[name]) for name in ("same", "other", "text")}) == 3


def test_a_preempted_decode_leg_computes_its_rows_again() -> None:
    rig = EngineRig(num_blocks=8)
    rig.add("old", 8, max_tokens=16)
    rig.begin("d", TOKENS[:8], spans=SPANS[:1], leg=Leg.DECODE, max_tokens=16)
    rig.complete_transfer("d")
    rig.run()
    assert rig.requests["d"].num_preemptions >= 1
    assert rig.tokens["d"] == rig.expected("d", 16)


def test_a_failed_load_computes_its_rows_here() -> None:
    rig = EngineRig(on_transfer_failure="recompute")
    rig.complete("warm", TOKENS[:9], spans=SPANS[:1], max_tokens=1)
    rig.begin("d", TOKENS, spans=SPANS, leg=Leg.DECODE, max_tokens=6)
    rig.transfer(failed={"d": "peer gone"})
    rig.run_right("d")
    assert rig.requests["d"].num_cached_tokens == 8
    rig.transfer(released=["d"])


def test_further_sequences_have_the_rows_of_the_first() -> None:
    rig = EngineRig(num_blocks=10, max_num_seqs=3)
    rig.add("r", TOKENS, spans=SPANS, n=3, max_tokens=9)
    rig.complete("mate", TOKENS, spans=OTHERS, max_tokens=9)
    assert rig.scheduler.make_stats().num_preemptions >= 1
    for name in ("mate", *(sequence_id("r", index) for index in range(3))):
        assert rig.tokens[name] == rig.expected(name, 9)
