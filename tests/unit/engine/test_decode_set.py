"""The set of decoding requests: which of them need a block in which step."""

from __future__ import annotations

from baton.engine.decode_set import DecodeSet
from baton.engine.request import Request
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams


def test_a_request_that_left_and_joined_again_before_one_tick_needs_one_block() -> None:
    decodes = DecodeSet(4)
    request = Request("r", RequestSpec([1, 2, 3], SamplingParams()))
    request.num_computed_tokens = 3
    decodes.join(request, 4, num_ticks=9)
    decodes.leave("r")
    decodes.join(request, 4, num_ticks=9)
    assert decodes.pop_needing_block() == []
    decodes.tick()
    assert decodes.pop_needing_block() == [request]
    decodes.note_growth(request)
    for _ in range(4):
        decodes.tick()
        needy = decodes.pop_needing_block()
    assert needy == [request]
