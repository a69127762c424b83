"""Which nodes have room for one more request."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from baton.messages.ids import AttemptKey
from baton.messages.node import LoadReport, NodeDescription
from router.placement.room import Lack, RoomRules
from tests.support.router_parts import decode, view_of

RULES = RoomRules()
BLOCKS, BLOCK_SIZE = 64, 4


def lack(
    node: NodeDescription, sequences: float = 0.0, unreported: int = 0, *, goes_ahead: bool = False, **load: int
) -> Lack | None:
    report = LoadReport(total_blocks=BLOCKS, **load)  # type: ignore[arg-type]
    return RULES.lack(node, report, sequences, unreported, goes_ahead=goes_ahead)


def test_a_node_needs_seats_tokens_and_blocks() -> None:
    node = decode(max_num_seqs=16, max_num_batched_tokens=100)
    assert lack(node, 17, waiting=1, uncomputed_tokens=399, promised_blocks=40, unreported=23) is None
    assert lack(node, 18) is Lack.SEATS
    assert [lack(node, 19, goes_ahead=True), lack(node, 20, goes_ahead=True)] == [None, Lack.SEATS]
    assert lack(node, 3, waiting=2) is Lack.SEATS, "it has none for those that wait"
    assert lack(node, 1, uncomputed_tokens=400) is Lack.TOKENS
    assert lack(node, 1, promised_blocks=40, unreported=24) is Lack.KV
    size_unknown = decode()
    assert lack(size_unknown, 10_000, waiting=10_000, uncomputed_tokens=10**9) is None


def test_no_bound_of_blocks_is_kept_where_none_is_wanted() -> None:
    load = LoadReport(total_blocks=BLOCKS, promised_blocks=10 * BLOCKS)
    assert RoomRules(kv_room=0.0).lack(decode(), load, 1, 0) is None
    assert RoomRules(kv_room=11.0).lack(decode(), load, 1, 0) is None


@given(st.sampled_from([0.5, 1.0, 1.5]), st.lists(st.integers(-4, 60), max_size=60))
@example(1.0, [60, 60, 60, 60, 0, 60, 60])
def test_a_node_is_never_promised_more_than_its_room_and_one_request(kv_room: float, events: list[int]) -> None:
    """A number above 0: a request with so many tokens comes; 0: the node reports a step, with what was sent before the
    report in front of it; below 0: one of the requests ends.
    """
    view = view_of(decode(num_blocks=BLOCKS, block_size=BLOCK_SIZE), rules=RoomRules(kv_room))
    sent: dict[AttemptKey, int] = {}
    known: set[AttemptKey] = set()
    on_the_way: set[AttemptKey] = set()
    largest = 0
    for number, event in enumerate(events):
        if event > 0:
            if view.why_full("d1.1"):
                continue
            key, blocks = AttemptKey(f"r{number}", 1), event // BLOCK_SIZE + 1
            view.dispatched("d1.1", key, 1, event)
            sent[key] = blocks
            on_the_way.add(key)
            largest = max(largest, blocks)
            assert sum(sent.values()) <= kv_room * BLOCKS + largest
        elif event == 0:
            promised = sum(blocks for key, blocks in sent.items() if key in known)
            view.step_reported("d1.1")
            view.reported("d1.1", LoadReport(running=len(known), total_blocks=BLOCKS, promised_blocks=promised))
            known, on_the_way = known | on_the_way, set()
        elif sent:
            key = [*sent][event % len(sent)]
            view.released("d1.1", key)
            del sent[key]
            known.discard(key)
            on_the_way.discard(key)


def test_a_node_of_an_earlier_version_is_bounded_by_seats_and_tokens_alone() -> None:
    assert lack(decode(), 1, running=1, unreported=BLOCKS) is None
    assert lack(decode(), 1, unreported=BLOCKS) is Lack.KV, "nothing runs yet"


def test_blocks_of_each_group_of_layers_are_promised() -> None:
    view = view_of(decode(num_blocks=BLOCKS, block_size=BLOCK_SIZE, kv_groups=4))
    view.dispatched("d1.1", AttemptKey("r", 1), 1, 15 * BLOCK_SIZE)
    assert view.candidates()[0].lack is Lack.KV


def test_a_full_node_is_counted_when_it_comes_to_be_full() -> None:
    view = view_of(decode(num_blocks=BLOCKS, block_size=BLOCK_SIZE))
    for promised in (BLOCKS, BLOCKS + 1, BLOCKS - 1, BLOCKS):
        view.reported("d1.1", LoadReport(total_blocks=BLOCKS, promised_blocks=promised))
        assert (view.candidates()[0].lack is Lack.KV) == (promised >= BLOCKS)
    assert view.num_full == {Lack.KV: 2}
