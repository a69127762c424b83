"""Which streams a router moves: those of nodes that are to be empty, a few at a time, and some of crowded nodes."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from baton.errors import DeadlineExceeded
from baton.messages.generation import ModelCard
from baton.messages.ids import AttemptKey
from baton.messages.node import Abort, LoadReport, MoveOut, NodeDescription, Outcome, Submit
from baton.registry.desired import DesiredState
from router.placement.view import ClusterView
from router.stream_moves import AT_ONCE, BALANCE_S, MOVE_S, RETRY_S, StreamMoves
from tests.support.router_parts import MODEL, decode, view_of
from tests.support.router_rig import Reader, RouterRig, all_leave, router_rig

NUM_STREAMS = AT_ONCE + 2
D1, D2 = decode("d1", max_model_len=256), decode("d2", max_model_len=256)


async def streaming(
    rig: RouterRig, count: int, *, max_tokens: int = 50, first: int = 0
) -> dict[str, tuple[Reader, AttemptKey]]:
    """Streams that d1 decodes, by request id."""
    streams = {}
    for number in range(first, first + count):
        reader = rig.ask(request_id=f"r{number}", max_tokens=max_tokens)
        attempt = await rig.next_attempt("d1")
        rig.report("d1", attempt, 0, "abc")
        await reader.wait_for_tokens(3)
        streams[f"r{number}"] = reader, attempt
    return streams


async def told(rig: RouterRig, name: str, count: int) -> list[Submit | MoveOut | Abort]:
    """The next messages to a node; there are no more of them."""
    messages = [await rig.nodes[name].inbox.get() for _ in range(count)]
    assert rig.nodes[name].inbox.empty()
    return messages  # type: ignore[return-value]


async def test_streams_leave_a_cordoned_node_a_few_at_a_time() -> None:
    async with router_rig(D1) as rig:
        streams = await streaming(rig, NUM_STREAMS)
        rig.register(D1, D2)
        await rig.wait_until_attached(2)
        moves = StreamMoves(rig.requests, rig.view, rig.timers)
        moves.look()
        assert rig.nodes["d1"].inbox.empty(), "it is not to be empty"
        rig.view.desired(DesiredState(cordoned=frozenset({"d1"})))
        moves.look()
        begun = await told(rig, "d1", AT_ONCE)
        assert {move.to.request_id for move in begun if isinstance(move, MoveOut)} == {f"r{n}" for n in range(2, 10)}
        legs = await told(rig, "d2", AT_ONCE)
        assert all(isinstance(leg, Submit) and leg.kv_source == D1.as_peer for leg in legs)
        moves.look()
        assert rig.nodes["d1"].inbox.empty(), "no more at a time, and none twice"

        # One has moved, and the next one follows at once; another one stays for now.
        first, second = begun[0], begun[1]
        assert isinstance(first, MoveOut)
        assert isinstance(second, MoveOut)
        rig.report("d1", first.attempt, 3, "d", Outcome.HANDED_OFF)
        (follows,) = await told(rig, "d1", 1)
        assert isinstance(follows, MoveOut)
        rig.report("d2", second.to, outcome=Outcome.KV_LOST)
        aborted, last = await told(rig, "d1", 2)
        assert isinstance(aborted, Abort)
        assert isinstance(last, MoveOut)
        assert aborted.attempt == second.to
        assert {follows.to.request_id, last.to.request_id} == {"r0", "r1"}
        moves.look()
        assert rig.nodes["d1"].inbox.empty()
        rig.timers.advance(RETRY_S)
        rig.report("d1", follows.attempt, 3, "d", Outcome.HANDED_OFF)
        await rig.wait_until(lambda: moves.num_ended["moved"] == 2)
        moves.look()
        (again,) = await told(rig, "d1", 1)
        assert isinstance(again, MoveOut)
        assert again.attempt == second.attempt
        assert again.to.attempt == second.to.attempt + 1

        # What has not moved in time stays, and its leg is taken back.
        rig.timers.advance(MOVE_S)
        await rig.wait_until(lambda: moves.num_ended["stayed"] == 1 + AT_ONCE)
        assert moves.num_ended == {"moved": 2, "stayed": 9}
        assert all(isinstance(message, Abort) for message in await told(rig, "d1", AT_ONCE))
        await all_leave(*(reader for reader, _ in streams.values()))


async def test_an_operator_hears_why_a_stream_has_not_moved() -> None:
    async with router_rig(D1) as rig:
        streams = await streaming(rig, 2)
        rig.register(D1, D2)
        await rig.wait_until_attached(2)
        moves = StreamMoves(rig.requests, rig.view, rig.timers, is_on=False)
        rig.view.desired(DesiredState(cordoned=frozenset({"d1"})))
        moves.look()
        assert rig.nodes["d1"].inbox.empty(), "nothing moves by itself"
        moving = [asyncio.create_task(moves.move(name, "d2")) for name in ("r0", "r1")]
        first, second = await told(rig, "d1", 2)
        assert isinstance(first, MoveOut)
        assert isinstance(second, MoveOut)
        rig.report("d2", first.to, outcome=Outcome.REFUSED)
        with pytest.raises(DeadlineExceeded, match="stays on d1: node d2: refused"):
            await moving[0]
        await all_leave(streams["r1"][0])
        with pytest.raises(DeadlineExceeded, match="the request has ended"):
            await moving[1]
        await all_leave(streams["r0"][0])


def crowded_view(here: LoadReport, there: LoadReport, **changes: object) -> ClusterView:
    one, other = replace(D1, max_num_seqs=8), replace(D2, max_num_seqs=8, **changes)  # type: ignore[arg-type]
    view = view_of(one, other)
    view.reported("d1.1", here)
    view.reported("d2.1", there)
    return view


def load(running: int, promised: int, waiting: int = 0) -> LoadReport:
    return LoadReport(running=running, waiting=waiting, total_blocks=64, free_blocks=0, promised_blocks=promised)


@pytest.mark.parametrize(
    ("here", "there", "changes", "is_crowded"),
    [
        (load(4, 64), load(1, 20), {}, True),
        (load(8, 20, waiting=1), load(3, 20), {}, True),
        (load(4, 60), load(1, 20), {}, False),
        (load(4, 64), load(2, 40), {}, False),
        (load(4, 64), load(1, 20), {"model_fingerprint": "other"}, False),
    ],
    ids=["blocks", "seats", "not full", "no room there", "another version"],
)
def test_a_node_is_crowded_that_is_full_while_another_one_has_much_room(
    here: LoadReport, there: LoadReport, changes: dict[str, object], is_crowded: bool
) -> None:
    view = crowded_view(here, there, **changes)
    assert view.crowded() == ("d1.1" if is_crowded else "")
    view.desired(DesiredState(cordoned=frozenset({"d2"})))
    assert not view.crowded()


def full(node: NodeDescription) -> LoadReport:
    return LoadReport(running=3, total_blocks=node.num_blocks, free_blocks=0, promised_blocks=node.num_blocks)


async def test_one_stream_at_a_time_leaves_a_crowded_node() -> None:
    async with router_rig(D1) as rig:
        rig.card = ModelCard(MODEL, 256, 300)
        short, long = await streaming(rig, 1), await streaming(rig, 3, max_tokens=100, first=1)
        rig.register(D1, D2)
        await rig.wait_until_attached(2)
        moves = StreamMoves(rig.requests, rig.view, rig.timers)
        rig.view.reported("d1.1", full(D1))
        moves.look()
        (first,) = await told(rig, "d1", 1)
        assert isinstance(first, MoveOut)
        assert first.to.request_id == "r3"
        rig.report("d1", first.attempt, 3, "d", Outcome.HANDED_OFF)
        await rig.wait_until(lambda: moves.num_ended["moved"] == 1)
        rig.view.reported("d1.1", full(D1))
        moves.look()
        assert rig.nodes["d1"].inbox.empty(), "a second has not passed"
        for reader, _ in long.values():
            await all_leave(reader)
        await told(rig, "d1", 3)
        rig.timers.advance(BALANCE_S)
        rig.view.reported("d1.1", full(D1))
        moves.look()
        assert rig.nodes["d1"].inbox.empty(), "a stream that is soon at its end stays"
        await all_leave(short["r0"][0])
        rig.view.reported("d1.1", LoadReport())
