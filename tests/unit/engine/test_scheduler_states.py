"""Groups of layers that keep states: a sequence goes on only where its states are, and that costs little."""

from __future__ import annotations

from typing import Any

import pytest

from baton.engine.batch import EngineCoreEventType
from baton.engine.core import EngineCore
from baton.engine.runner import STATE_WINDOW
from baton.engine.sequences.sequence_group import sequence_id
from baton.errors import ConfigError
from baton.messages.node import Leg
from tests.doubles.fake_runner import FakeRunner
from tests.support.engine_rig import EngineRig

SIZE = 4


def rig_with_states(num_blocks: int = 65, **limits: Any) -> EngineRig:
    return EngineRig(num_blocks, windows=(None, STATE_WINDOW), keeps_states=True, **limits)


def num_computed(rig: EngineRig) -> int:
    """Run all requests to their ends; returns how many tokens were computed."""
    total = 0
    while rig.core.has_work():
        output = rig.scheduler.schedule()
        total += output.total_num_scheduled_tokens
        rig.commit(output, rig.runner.execute_model(output))
    return total


@pytest.mark.parametrize("length", range(30, 36))
def test_a_second_turn_computes_at_most_its_new_tokens_and_a_block(length: int) -> None:
    rig = rig_with_states()
    first = rig.add("first", length, max_tokens=9)
    num_computed(rig)
    history = [*first.prompt_token_ids, *rig.tokens["first"]]
    rig.add("second", [*history, 7, 8, 9], max_tokens=1)
    # The last output token was never computed.
    assert num_computed(rig) <= 3 + 1 + SIZE
    assert rig.tokens["second"] == rig.expected("second", 1)


def test_what_a_request_holds_of_states_is_the_blocks_of_one_or_two_stripes() -> None:
    rig = rig_with_states()
    rig.add("r", 21, max_tokens=20)
    while rig.core.has_work():
        rig.step()
        # Empty once it has ended.
        held = [block for block in rig.scheduler.kv_cache_manager.block_ids("r")[1::2] if block]
        assert len(held) <= 2


@pytest.mark.parametrize(("length", "n", "stripes"), [(11, 1, [2]), (12, 1, [2]), (9, 1, [1, 2]), (11, 3, [1, 2])])
def test_a_hand_over_has_the_states_behind_the_prompt_and_for_others_those_behind_a_block(
    length: int, n: int, stripes: list[int]
) -> None:
    """A prompt whose last token begins a block has those behind the block before it, since others could need them."""
    rig = rig_with_states()
    rig.add("p", length, leg=Leg.PREFILL, max_tokens=4, n=n)
    num_computed(rig)
    block_ids, _ = rig.connector.leased["p"]
    assert [stripe for stripe, block in enumerate(block_ids[1::2]) if block] == stripes


def test_sequences_of_one_prompt_begin_where_its_states_are() -> None:
    """Behind the prompt's last token, which they compute again, there is no state any more."""
    rig = rig_with_states()
    rig.add("r", 11, max_tokens=4, n=3)
    rig.run()
    names = [sequence_id("r", index) for index in range(3)]
    assert [rig.tokens[name] for name in names] == [rig.expected(name, 4) for name in names]


@pytest.mark.parametrize("caches", [False, True])
def test_sequences_of_one_prompt_compute_at_most_a_block_of_it_again(caches: bool) -> None:
    rig = rig_with_states(enable_prefix_caching=caches)
    rig.add("r", 43, max_tokens=6, n=5)
    assert num_computed(rig) <= 43 + 4 * SIZE + 5 * 5


def test_a_stripe_of_a_sequence_that_a_step_may_have_moved_on_is_not_shared() -> None:
    """A step in flight changes states in place, and the sequence's numbers only when it is committed."""
    rig = rig_with_states()
    request = rig.begin("r", 11, max_tokens=4, n=2)
    manager = rig.scheduler.kv_cache_manager
    assert request.num_computed_tokens == 11
    shared, copied = manager.shared_prefix(request, 11), manager.shared_prefix(request, 11, is_idle=True)
    assert shared is not None
    assert copied is not None
    assert (shared.num_tokens, copied.num_tokens) == (8, 11)


def test_other_sequences_of_a_prompt_that_came_from_elsewhere_compute_a_part_of_a_block() -> None:
    rig = rig_with_states()
    rig.add("d", 11, leg=Leg.DECODE, max_tokens=3, n=3)
    rig.step()
    rig.complete_transfer("d")
    # Each of the two others begins behind 8 of the 11 tokens; then two tokens are decoded of each of the three.
    assert num_computed(rig) == 2 * 3 + 3 * 2


def test_drafts_follow_each_other_though_right_ones_are_computed_again() -> None:
    rig = rig_with_states()
    rig.add("r", 6, max_tokens=24)
    rig.step()
    sizes = []
    while rig.core.has_work():
        known = rig.requests["r"].num_output_tokens
        rig.scheduler.update_draft_token_ids({"r": rig.expected("r", known + 3)[known:]})
        output = rig.scheduler.schedule()
        sizes.append(output.total_num_scheduled_tokens)
        rig.commit(output, rig.runner.execute_model(output))
    assert rig.tokens["r"] == rig.expected("r", 24)
    assert sizes[:3] == [1 + 3, 4 + 3, 4 + 3], "the known tokens, those of right drafts among them, and new drafts"
    chunks = [event for event in rig.scheduler.take_events() if event.type is EngineCoreEventType.CHUNK_COMPUTED]
    assert len(chunks) == 1, "no known token is one of a prompt's chunk"
    assert len(sizes) == 6


def test_a_scheduler_that_knows_nothing_of_states_is_refused() -> None:
    rig = EngineRig(windows=(None, STATE_WINDOW))
    runner = FakeRunner(65, SIZE, windows=(None, STATE_WINDOW), keeps_states=True)
    with pytest.raises(ConfigError, match="keeps_states"):
        EngineCore(rig.scheduler, runner)
