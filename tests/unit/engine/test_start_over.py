"""Requests that outgrow the rotary angles of short sequences start over, wherever their prompt was computed."""

from __future__ import annotations

import pytest

from baton.engine.scheduler_config import LongSequences
from baton.errors import InvalidRequest
from baton.messages.node import Leg
from tests.support.engine_rig import EngineRig, prompt_of

MOST_SHORT = 8
STARTS_OVER = LongSequences(MOST_SHORT, starts_over=True)


@pytest.mark.parametrize("num_prompt_tokens", [MOST_SHORT - 1, MOST_SHORT])
def test_a_decode_leg_computes_its_prompt_again_once_it_is_long(num_prompt_tokens: int) -> None:
    rig = EngineRig(long_sequences=STARTS_OVER)
    request = rig.begin("d", num_prompt_tokens, leg=Leg.DECODE, max_tokens=6)
    rig.complete_transfer("d")
    if num_prompt_tokens < MOST_SHORT:
        rig.step()
    output = rig.scheduler.schedule()
    assert output.num_scheduled_tokens == {"d": MOST_SHORT + 1}, "nothing of the short sequence is used"
    rig.commit(output)
    rig.run_right("d")
    assert request.is_long


def test_no_block_of_a_short_sequence_is_found_by_a_long_one() -> None:
    rig = EngineRig(long_sequences=STARTS_OVER)
    text = prompt_of(12)
    for name, length, cached in (("short", 8, 0), ("long", 12, 0), ("short again", 8, 4), ("long again", 12, 8)):
        request = rig.complete(name, text[:length], max_tokens=1)
        assert request.num_cached_tokens == cached, name


def test_beams_that_would_start_over_are_refused() -> None:
    rig = EngineRig(long_sequences=STARTS_OVER)
    with pytest.raises(InvalidRequest, match="set max_tokens to at most 3"):
        rig.add("crosses", 6, beam_width=2, n=2, max_tokens=4)
    rig.add("stays", 6, beam_width=2, n=2, max_tokens=3)
    rig.complete("is long", 9, beam_width=2, n=2, max_tokens=9)
