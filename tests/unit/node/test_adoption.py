"""Requests that outlive their router: orphans, adoption, and messages of the router that lost them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from baton.engine.connector import ArrivedKV, KVTransferOutput
from baton.engine.sequences.beams import BeamSearch
from baton.engine.sequences.sequence_group import sequence_seed
from baton.messages.ids import AttemptKey
from baton.messages.node import Abort, Adopt, Leg, Outcome, RequestDelta, Role, StageTimings, StepReport
from baton.messages.sampling import SamplingParams, TokenLogprobs
from baton.node.attempts.attempt_times import TransferFigures
from baton.node.router_streams import MAX_QUEUED_REPORTS, Port
from tests.doubles.fake_runner import expected_beams, expected_tokens
from tests.support.node_rig import KEY, PROMPT, SOURCE, VOCAB, NodeRig, deltas, tokens
from tests.support.virtual_time import LoopClock, run_virtually

GRACE_S = 10.0
LONG = SamplingParams(temperature=0.0, seed=3, max_tokens=12)


@pytest.fixture
async def rig() -> NodeRig:
    """A node that keeps orphans for a while."""
    return NodeRig(orphan_grace_s=GRACE_S)


@pytest.fixture
async def first(rig: NodeRig) -> Port:
    return attach(rig, "router-0")


@pytest.fixture
async def second(rig: NodeRig) -> Port:
    return attach(rig, "router-1")


def attach(rig: NodeRig, name: str, run: int = 1) -> Port:
    return rig.service.open_port(name, f"{name}.run{run}")


def whole(num_tokens: int, index: int = 0, seed: int = 3) -> list[int]:
    return expected_tokens(PROMPT, num_tokens, seed=sequence_seed(seed, index), vocab_size=VOCAB)


def of(sequence_index: int, told: list[RequestDelta]) -> list[RequestDelta]:
    """The deltas of one sequence, which are checked to have no gaps."""
    own = [delta for delta in told if delta.sequence_index == sequence_index]
    for before, after in pairwise(own):
        if after.token_ids:
            assert after.first_index == before.first_index + len(before.token_ids)
    return own


async def check_replayed(rig: NodeRig, port: Port) -> None:
    """Let all requests end; this router was then told the whole output of the long one."""
    rig.driver.run()
    assert tokens(of(0, await deltas(port))) == whole(12)


@pytest.mark.parametrize("turns", [0, 1, 4])
async def test_an_orphan_runs_on_and_is_replayed_from_the_beginning_to_the_router_that_adopts_it(
    rig: NodeRig, first: Port, second: Port, turns: int
) -> None:
    rig.begin(first, sampling_params=LONG, turns=turns)
    first.close()
    rig.driver.turns(2)
    assert rig.role.aborted == []
    second.receive(Adopt(KEY))
    rig.driver.run()
    told = await deltas(second)
    assert tokens(of(0, told)) == whole(12)
    assert told[0].first_index == 0
    assert [delta.outcome for delta in told if delta.outcome is not None] == [Outcome.LENGTH]
    assert any(delta.timings is not None for delta in told)
    assert not rig.service.running_for(second)
    await rig.service.draining.wait_idle()


def test_an_attempt_that_ended_as_an_orphan_or_just_before_is_replayed_as_well() -> None:
    run_virtually(_told_as_well())


async def _told_as_well() -> None:
    for closes_after in (True, False):
        rig = NodeRig(Role.DECODE, clock=LoopClock(), orphan_grace_s=GRACE_S)
        first, second = attach(rig, "router-0"), attach(rig, "router-1")
        rig.submit(first)
        of_prompt = StageTimings(cached_tokens=16)
        rig.role.moved[KEY] = TransferFigures(4096, 1.5, of_prompt)
        if not closes_after:
            first.close()
        rig.driver.run()
        first.close()
        second.receive(Adopt(KEY))
        told = await deltas(second)
        assert tokens(of(0, told)) == whole(4)
        assert told[-1].outcome is Outcome.LENGTH
        assert told[-1].token_ids, "a stop token is told with its end: nobody may take it for text"
        assert told[-1].timings is not None
        assert any(delta.prompt_timings == of_prompt for delta in told)
        await rig.service.draining.wait_idle()


async def test_the_router_that_lost_an_attempt_is_told_and_its_aborts_change_nothing(
    rig: NodeRig, first: Port, second: Port
) -> None:
    rig.begin(first, sampling_params=LONG, turns=3)
    await deltas(first)
    second.receive(Adopt(KEY))
    (moved,) = await deltas(first)
    assert (moved.attempt, moved.outcome) == (KEY, Outcome.MOVED)
    first.receive(Abort(KEY, "it was lost, I thought"))
    first.receive(Abort(KEY, "its text is over", 0))
    await check_replayed(rig, second)
    assert await deltas(first) == []
    first.receive(Abort(KEY, "the other leg died"))
    assert rig.role.aborted == [], "what is on offer is the new router's"


@pytest.mark.parametrize("how", ["running", "orphaned", "forgotten"])
async def test_of_several_routers_the_one_with_the_latest_call_owns_it_in_whatever_order_they_adopt(
    rig: NodeRig, how: str
) -> None:
    first, second, third = (attach(rig, f"router-{index}") for index in range(3))
    rig.begin(first, sampling_params=LONG, takeover=1, turns=3)
    await deltas(first)
    third.receive(Adopt(KEY, 3))
    (moved,) = await deltas(first)
    assert (moved.outcome, moved.takeover) == (Outcome.MOVED, 3)
    if how == "orphaned":
        third.close()
    elif how == "forgotten":
        third.receive(Abort(KEY, "client left", takeover=3))
        rig.role.aborted.clear()
    # The client has left this router long ago; its message was only slow.
    second.receive(Adopt(KEY, 2))
    second.receive(Abort(KEY, "the client went away", takeover=2))
    first.receive(Abort(KEY, "the client went away", takeover=1))
    (late,) = await deltas(second)
    if how != "forgotten":
        assert (late.outcome, late.takeover) == (Outcome.MOVED, 3)
    else:
        assert late.outcome is Outcome.UNKNOWN or late.takeover == 3
    assert rig.role.aborted == []
    if how == "orphaned":
        third = attach(rig, "router-3")
        third.receive(Adopt(KEY, 4))
    rig.driver.run()
    if how != "forgotten":
        assert tokens(of(0, await deltas(third))) == whole(12)
    await rig.service.draining.wait_idle()


async def test_of_two_routers_with_the_same_number_the_first_one_keeps_the_attempt(rig: NodeRig) -> None:
    first, second, third = (attach(rig, f"router-{index}") for index in range(3))
    rig.begin(first, sampling_params=LONG, takeover=1, turns=3)
    second.receive(Adopt(KEY, 2))
    third.receive(Adopt(KEY, 2))
    (late,) = await deltas(third)
    assert (late.outcome, late.takeover) == (Outcome.MOVED, 2)
    # The router that owns it may have it replayed.
    second.receive(Adopt(KEY, 2))
    rig.driver.run()
    assert {delta.outcome for delta in await deltas(second)} == {None, Outcome.LENGTH}


async def test_a_router_without_takeover_numbers_adopts_and_aborts(rig: NodeRig) -> None:
    first, old = attach(rig, "router-0"), attach(rig, "router-1")
    rig.begin(first, sampling_params=LONG, takeover=3, turns=3)
    await deltas(first)
    old.receive(Adopt(KEY))
    assert (await deltas(first))[-1].outcome is Outcome.MOVED
    first.receive(Abort(KEY, "late", takeover=3))
    assert rig.role.aborted == []
    old.receive(Abort(KEY, "client left"))
    assert rig.role.aborted == [KEY]


async def test_the_takeover_number_is_remembered_after_the_attempt_is_forgotten() -> None:
    """The prefill leg ended long ago and its node has forgotten it, but its blocks may still be read."""
    rig = NodeRig(Role.PREFILL, orphan_grace_s=0.0)
    first, second = attach(rig, "router-0"), attach(rig, "router-1")
    rig.submit(first, leg=Leg.PREFILL)
    second.receive(Adopt(KEY))
    rig.driver.run()
    second.receive(Adopt(KEY))
    assert (await deltas(second))[-1].outcome is Outcome.UNKNOWN
    first.receive(Abort(KEY, "late"))
    assert rig.role.aborted == []
    second.receive(Abort(KEY, "its decode leg died"))
    assert rig.role.aborted == [KEY]


async def test_the_owner_may_adopt_its_own_attempt_to_have_it_replayed(rig: NodeRig) -> None:
    port = attach(rig, "router-0")
    rig.begin(port, sampling_params=LONG, turns=3)
    await deltas(port)
    port.receive(Adopt(KEY))
    rig.driver.run()
    assert tokens(of(0, await deltas(port))) == whole(12)


@pytest.mark.parametrize("reason", ["never heard of", "aborted", "ended long ago"])
async def test_an_attempt_that_is_not_here_is_unknown(reason: str) -> None:
    rig = NodeRig(orphan_grace_s=0.0 if reason == "ended long ago" else GRACE_S)
    first, second = attach(rig, "router-0"), attach(rig, "router-1")
    if reason != "never heard of":
        rig.begin(first, turns=2)
    if reason == "aborted":
        first.receive(Abort(KEY, "client left"))
    rig.driver.run()
    second.receive(Adopt(KEY))
    (answer,) = await deltas(second)
    assert (answer.attempt, answer.outcome) == (KEY, Outcome.UNKNOWN)
    second.receive(Abort(KEY, "so I tried elsewhere"))


async def test_an_adopted_attempt_can_be_aborted_by_its_new_router(rig: NodeRig, first: Port, second: Port) -> None:
    rig.begin(first, sampling_params=LONG, turns=2)
    second.receive(Adopt(KEY))
    await deltas(first)
    second.receive(Abort(KEY, "client left"))
    rig.driver.run()
    assert rig.role.aborted == [KEY]
    assert not rig.scheduler.requests
    assert await deltas(first) == [], "not its business any more"
    await rig.service.draining.wait_idle()


async def test_an_attempt_outlives_several_lost_routers(rig: NodeRig) -> None:
    ports = [attach(rig, f"router-{index}") for index in range(4)]
    rig.submit(ports[0], sampling_params=LONG)
    for before, after in pairwise(ports):
        rig.driver.turns(2)
        before.close()
        rig.driver.turns(1)
        after.receive(Adopt(KEY))
    rig.driver.run()
    assert tokens(of(0, await deltas(ports[-1]))) == whole(12)
    await rig.service.draining.wait_idle()


async def test_all_sequences_are_replayed_those_that_have_ended_included(
    rig: NodeRig, first: Port, second: Port
) -> None:
    rig.begin(first, sampling_params=replace(LONG, n=3), turns=5)
    first.receive(Abort(KEY, "its text is over", 1))
    rig.driver.turns(1)
    first.close()
    second.receive(Adopt(KEY))
    rig.driver.run()
    told = await deltas(second)
    for index in range(3):
        own = of(index, told)
        got = tokens(own)
        assert got == whole(12, index)[: len(got)]
        ends = [delta for delta in own if delta.outcome is not None]
        assert [end.outcome for end in ends] == [Outcome.ABORTED if index == 1 else Outcome.LENGTH]
        assert bool(ends[0].token_ids) == (index != 1)
    await rig.service.draining.wait_idle()


async def test_a_beam_search_can_be_adopted() -> None:
    best = expected_beams(PROMPT, BeamSearch(3, frozenset(), 5), vocab_size=VOCAB)
    for turns in (3, 50):
        rig = NodeRig(orphan_grace_s=GRACE_S)
        first, second = attach(rig, "router-0"), attach(rig, "router-1")
        rig.begin(first, sampling_params=SamplingParams(temperature=0.0, max_tokens=5, n=2, beam_width=3), turns=turns)
        first.close()
        second.receive(Adopt(KEY))
        rig.driver.run()
        told = await deltas(second)
        assert [tokens(of(index, told)) for index in range(2)] == best[:2]


async def test_the_output_that_an_attempt_was_submitted_with_is_replayed_first(
    rig: NodeRig, first: Port, second: Port
) -> None:
    rig.begin(first, sampling_params=LONG, output_token_ids=whole(5), turns=3)
    second.receive(Adopt(KEY))
    rig.driver.run()
    told = of(0, await deltas(second))
    assert (told[1].first_index, tokens(told)) == (0, whole(12))


async def test_logprobs_are_replayed_with_their_tokens(rig: NodeRig, first: Port, second: Port) -> None:
    rig.begin(first, sampling_params=replace(LONG, logprobs=2, seed=0), turns=4)
    first.close()
    second.receive(Adopt(KEY))
    rig.driver.run()
    for delta in await deltas(second):
        assert [position.token_id for position in delta.logprobs] == list(delta.token_ids)


async def test_an_adopted_decode_leg_brings_the_first_token_without_its_prefill_leg(
    rig: NodeRig, first: Port, second: Port
) -> None:
    undisturbed = whole(12, seed=0)
    drawn = undisturbed[0]
    rig.begin(first, leg=Leg.DECODE, kv_source=SOURCE, sampling_params=replace(LONG, logprobs=0, seed=0))
    first.close()
    load = rig.role.connector.loads[str(KEY)]
    rig.write_kv(load.block_ids, PROMPT)
    arrived = ArrivedKV((drawn,), (TokenLogprobs(drawn, -0.5, 1, ()),))
    rig.driver.tell_transfer(KVTransferOutput(arrived={str(KEY): arrived}))
    rig.driver.turns(3)
    second.receive(Adopt(KEY))
    rig.driver.run()
    told = await deltas(second)
    assert tokens(of(0, told)) == undisturbed
    assert [position.token_id for delta in told for position in delta.logprobs] == undisturbed


async def test_another_router_can_not_submit_an_orphan(rig: NodeRig, first: Port, second: Port) -> None:
    rig.begin(first)
    first.close()
    rig.submit(second)
    (refused,) = await deltas(second)
    assert refused.outcome is Outcome.ERROR
    assert "a router that is gone" in refused.error
    second.receive(Abort(KEY, "nobody wants it"))
    rig.driver.run()
    assert rig.role.aborted == [KEY]


@pytest.mark.parametrize("is_open", [True, False])
async def test_a_router_that_attaches_again_has_given_up_its_earlier_attempts(rig: NodeRig, is_open: bool) -> None:
    first, other = attach(rig, "router-0"), attach(rig, "router-1")
    stays, moved = AttemptKey("stays", 1, 9), AttemptKey("moved", 1, 9)
    rig.submit(first)
    rig.submit(first, moved)
    rig.begin(other, stays)
    other.receive(Adopt(moved))
    if not is_open:
        first.close()
    again = attach(rig, "router-0")
    rig.driver.run()
    assert rig.role.aborted == [KEY]
    assert {delta.attempt for delta in await deltas(other) if delta.outcome is Outcome.LENGTH} == {stays, moved}
    again.receive(Adopt(KEY))
    assert (await deltas(again))[-1].outcome is Outcome.UNKNOWN
    assert first.num_queued == 0 or [report async for report in first.reports()], "its stream has ended"
    await rig.service.draining.wait_idle()


@pytest.mark.parametrize("is_open", [True, False])
async def test_a_router_whose_link_was_cut_goes_on_with_the_attempts_that_it_keeps(rig: NodeRig, is_open: bool) -> None:
    """It does not matter whether the node has noticed that the link is cut. Attempts that are not kept are aborted."""
    first, dropped = attach(rig, "router-0"), AttemptKey("dropped", 1, 9)
    rig.submit(first, sampling_params=LONG)
    rig.begin(first, dropped, sampling_params=LONG, turns=4)
    told = tokens(of(0, [delta for delta in await deltas(first) if delta.attempt == KEY]))
    assert 0 < len(told) < len(whole(12))
    if not is_open:
        first.close()
    again = rig.service.open_port("router-0", "router-0.run1", [KEY])
    rig.driver.turns(2)
    again.receive(Adopt(KEY, num_tokens=(len(told),)))
    rig.driver.run()
    assert rig.role.aborted == [dropped]
    assert told + tokens(await deltas(again)) == whole(12)


async def test_a_restarted_router_may_adopt_the_attempts_of_its_earlier_process(rig: NodeRig) -> None:
    first = attach(rig, "router-0", run=1)
    rig.begin(first, sampling_params=LONG, turns=2)
    first.close()
    second = attach(rig, "router-0", run=2)
    second.receive(Adopt(KEY))
    await check_replayed(rig, second)


async def test_attempts_of_a_router_that_does_not_read_can_be_adopted_by_another(rig: NodeRig) -> None:
    slow, other = attach(rig, "router-0"), attach(rig, "router-1")
    rig.begin(slow, sampling_params=LONG)
    for _ in range(MAX_QUEUED_REPORTS):
        slow.push(StepReport((), rig.service.report().load))
    rig.driver.turns(1)
    other.receive(Adopt(KEY))
    await check_replayed(rig, other)


async def test_a_node_that_closes_ends_everything_at_once(rig: NodeRig) -> None:
    port, gone = attach(rig, "router-0"), attach(rig, "router-1")
    rig.submit(port)
    rig.begin(gone, AttemptKey("orphan", 1, 9))
    gone.close()
    rig.service.close()
    rig.driver.run()
    assert sorted(rig.role.aborted) == [AttemptKey("orphan", 1, 9), KEY]
    assert not rig.scheduler.requests


# In virtual time: what the grace is.


def in_time(test: Callable[[NodeRig], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """A test in virtual time; it is given a node."""

    async def main() -> None:
        errors: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        await test(NodeRig(clock=LoopClock(), orphan_grace_s=GRACE_S))
        assert not errors

    def run() -> None:
        run_virtually(main())

    return run


@in_time
async def test_an_orphan_that_nobody_adopts_is_aborted_after_the_grace(rig: NodeRig) -> None:
    port = attach(rig, "router-0")
    rig.begin(port, sampling_params=LONG, turns=2)
    port.close()
    idle = asyncio.create_task(rig.service.draining.wait_idle())
    await asyncio.sleep(GRACE_S - 0.5)
    assert rig.role.aborted == []
    assert not idle.done()
    await asyncio.sleep(1)
    assert rig.role.aborted == [KEY]
    rig.driver.run()
    assert not rig.scheduler.requests
    await idle


@in_time
async def test_an_adopted_attempt_has_no_deadline(rig: NodeRig) -> None:
    port, other = attach(rig, "router-0"), attach(rig, "router-1")
    rig.begin(port, sampling_params=LONG)
    port.close()
    await asyncio.sleep(GRACE_S - 1)
    other.receive(Adopt(KEY))
    await asyncio.sleep(GRACE_S * 3)
    assert rig.service.running_for(other) == [KEY]
    await check_replayed(rig, other)


@in_time
async def test_a_node_that_drains_waits_until_a_router_was_told_of_an_orphans_end(rig: NodeRig) -> None:
    port, other = attach(rig, "router-0"), attach(rig, "router-1")
    rig.begin(port)
    port.close()
    rig.service.draining.refuse_new_work()
    idle = asyncio.create_task(rig.service.draining.wait_idle())
    await asyncio.sleep(GRACE_S / 2)
    rig.driver.run()
    await asyncio.sleep(GRACE_S / 4)
    assert not idle.done(), "nobody has heard of its end"
    other.receive(Adopt(KEY))
    assert tokens(of(0, [delta for delta in await deltas(other) if delta.outcome is not Outcome.REFUSED])) == whole(4)
    await idle
    await asyncio.sleep(GRACE_S + 1)
    other.receive(Adopt(KEY))
    assert (await deltas(other))[-1].outcome is Outcome.UNKNOWN
    assert rig.role.aborted == [], "it ended by itself"


@in_time
async def test_the_grace_of_an_ended_attempt_begins_when_its_router_is_lost(rig: NodeRig) -> None:
    port, other = attach(rig, "router-0"), attach(rig, "router-1")
    rig.complete(port)
    await rig.service.draining.wait_idle()
    await asyncio.sleep(GRACE_S - 1)
    port.close()
    await rig.service.draining.wait_idle()
    await asyncio.sleep(GRACE_S - 1)
    other.receive(Adopt(KEY))
    assert tokens(of(0, await deltas(other))) == whole(4)
