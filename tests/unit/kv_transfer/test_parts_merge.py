"""How reads, peers and fillings of a node in parts are divided, and how the answers are merged: every event in every
state of a read, and drawn orders of events."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.runner import KVLayout, LayerGeometry, LayerGroup
from baton.errors import TransferCause, TransferFailed
from kv_transfer.backends.base import PeerMemory
from kv_transfer.layout import MAX_PARTS, PeerNode, part_name
from kv_transfer.mover.merge_values import (
    AbandonPart,
    ConnectPart,
    Deliver,
    DisconnectPart,
    FillPart,
    MergeEffect,
    ReadPart,
)
from kv_transfer.mover.part_mover import (
    BlockFilled,
    BlocksDigested,
    Connected,
    ConnectFailed,
    DigestsFailed,
    FillFailed,
    MoverEvent,
    ReadDone,
    ReadFailed,
    ReadStalled,
)
from kv_transfer.mover.parts_merge import PartsMerge
from kv_transfer.piece_plan import ReadRange

LAYOUT = KVLayout.uniform(16, 6, 2, 64, "bfloat16")
IN_TWO = (range(3), range(3, 6))
IN_THREE = (range(2), range(2, 4), range(4, 6))
"""Together with IN_TWO it has four pairs."""
WHOLE = (range(6),)
RANGES = [ReadRange(0, 10, 2), ReadRange(5, 20, 1)]
GONE = TransferFailed(TransferCause.PEER_GONE, "killed")


def peer_node(name: str, layers: Sequence[range], **changes: object) -> PeerNode:
    parts = [
        PeerMemory(part_name(name, n), b"x", 4096, 64, 128, "DRAM", 0, 2, 16, layers=each)
        for n, each in enumerate(layers)
    ]
    return PeerNode(name, tuple(dataclasses.replace(part, **changes) for part in parts))  # type: ignore[arg-type]


def pairs_of(effects: Sequence[MergeEffect]) -> list[tuple[int, str]]:
    """The part and the peer's agent of each effect that is about a pair."""
    found = []
    for effect in effects:
        match effect:
            case ConnectPart(part, peer):
                found.append((part, peer.incarnation))
            case DisconnectPart(part, agent) | ReadPart(part, _, agent):
                found.append((part, agent))
    return found


def said(effects: Sequence[MergeEffect]) -> list[MoverEvent]:
    """What the node is told."""
    return [effect.event for effect in effects if isinstance(effect, Deliver)]


class Rig:
    """A node in two parts that is connected to a peer in three, unless told otherwise."""

    def __init__(
        self, ours: Sequence[range] = IN_TWO, theirs: Sequence[range] = IN_THREE, layout: KVLayout = LAYOUT
    ) -> None:
        self.merge = PartsMerge(ours, layout)
        self.peer = peer_node("p", theirs)
        effects = self.merge.connect(self.peer)
        for part, agent in pairs_of(effects):
            effects = self.merge.said(part, Connected(agent))
        assert said(effects) == [Connected("p")]
        self.sub_reads: list[ReadPart] = []

    def read(
        self,
        read_id: int = 1,
        ranges: Sequence[ReadRange] = tuple(RANGES),
        to_digest: Sequence[int] = (),
        parts: int = 1,
    ) -> list[ReadPart]:
        effects = self.merge.read(read_id, "p", ranges, to_digest, parts)
        self.sub_reads = [effect for effect in effects if isinstance(effect, ReadPart)]
        assert len(self.sub_reads) == len(effects)
        return self.sub_reads

    def done(self, n: int, num_bytes: int = 10, post_s: float = 0.5, total_s: float = 1.0) -> list[MergeEffect]:
        return self.said(n, lambda read_id: ReadDone(read_id, num_bytes, post_s, total_s, 3))

    def failed(self, n: int, cause: TransferCause = TransferCause.PEER_GONE) -> list[MergeEffect]:
        return self.said(n, lambda read_id: ReadFailed(read_id, cause, f"sub-read {n}"))

    def stalled(self, n: int) -> list[MergeEffect]:
        return self.said(n, lambda read_id: ReadStalled(read_id, f"sub-read {n}"))

    def digested(self, n: int, digests: dict[int, int]) -> list[MergeEffect]:
        return self.said(n, lambda read_id: BlocksDigested(read_id, digests))

    def digests_failed(self, n: int) -> list[MergeEffect]:
        return self.said(n, lambda read_id: DigestsFailed(read_id, f"sub-read {n}"))

    def said(self, n: int, event: Callable[[int], MoverEvent]) -> list[MergeEffect]:
        """What the merge does when the part of a sub-read reports this event of it."""
        return self.merge.said(self.sub_reads[n].part, event(self.sub_reads[n].read_id))

    def abandons(self, *left: int) -> list[MergeEffect]:
        return [AbandonPart(self.sub_reads[n].part, self.sub_reads[n].read_id) for n in left]


@pytest.fixture
def rig() -> Rig:
    return Rig()


# Peers


def test_a_pair_is_every_part_here_and_there_with_layers_in_common() -> None:
    merge = PartsMerge(IN_TWO, LAYOUT)
    assert pairs_of(merge.connect(peer_node("p", IN_THREE))) == [(0, "p"), (0, "p/1"), (1, "p/1"), (1, "p/2")]
    assert pairs_of(merge.connect(peer_node("q", IN_TWO))) == [(0, "q"), (1, "q/1")]
    assert pairs_of(merge.connect(peer_node("r", WHOLE))) == [(0, "r"), (1, "r")]
    all_layers = PeerNode.of(dataclasses.replace(peer_node("s", WHOLE).parts[0], layers=None))
    assert pairs_of(merge.connect(all_layers)) == [(0, "s"), (1, "s")]


def test_a_peer_is_connected_when_all_its_pairs_are_and_each_call_is_answered() -> None:
    merge = PartsMerge(IN_TWO, LAYOUT)
    peer = peer_node("p", IN_TWO)
    assert pairs_of(merge.connect(peer)) == pairs_of(merge.connect(peer)) == [(0, "p"), (1, "p/1")]
    assert merge.said(0, Connected("p")) == merge.said(0, Connected("p")) == []
    assert merge.said(1, Connected("p/1")) == merge.said(1, Connected("p/1")) == [Deliver(Connected("p"))]
    assert merge.said(1, Connected("p/1")) == []
    assert merge.counters == {"connect_unknown": 1}


def test_a_pair_that_fails_disconnects_the_others_once_all_have_answered() -> None:
    merge = PartsMerge(IN_TWO, LAYOUT)
    peer = peer_node("p", IN_TWO)
    merge.connect(peer)
    assert merge.said(0, ConnectFailed("p", GONE)) == []
    effects = merge.said(1, Connected("p/1"))
    assert pairs_of(effects) == [(0, "p"), (1, "p/1")]
    assert said(effects) == [ConnectFailed("p", GONE)]
    assert merge.num_open == 0
    (refused,) = said(merge.read(1, "p", RANGES))
    assert isinstance(refused, ReadFailed)
    assert refused.cause is TransferCause.PEER_GONE


def test_a_call_that_fails_leaves_the_pairs_to_the_next_call() -> None:
    merge = PartsMerge(IN_TWO, LAYOUT)
    peer = peer_node("p", IN_TWO)
    merge.connect(peer)
    merge.connect(peer)
    merge.said(0, ConnectFailed("p", GONE))
    assert merge.said(1, Connected("p/1")) == [Deliver(ConnectFailed("p", GONE))]
    merge.said(0, Connected("p"))
    assert merge.said(1, Connected("p/1")) == [Deliver(Connected("p"))]
    assert len(merge.read(1, "p", RANGES)) == 2


def test_a_peer_that_changed_is_refused_and_the_old_one_stays(rig: Rig) -> None:
    for changed in (peer_node("p", IN_THREE, num_blocks=7), peer_node("p", WHOLE)):
        (event,) = said(rig.merge.connect(changed))
        assert isinstance(event, ConnectFailed)
        assert event.error.cause is TransferCause.REFUSED
    assert len(rig.read()) == 4


@pytest.mark.parametrize(
    "layers",
    [
        (),
        (range(3), range(4, 6)),
        (range(4), range(3, 6)),
        (range(3, 6), range(3)),
        (range(3), range(3, 7)),
        (range(3), range(3, 3), range(3, 6)),
        (range(1 << 40),),
        tuple(range(n, n + 1) for n in range(MAX_PARTS + 1)),
    ],
)
def test_parts_that_have_not_all_layers_once_and_in_order_are_refused(layers: Sequence[range]) -> None:
    merge = PartsMerge(IN_TWO, LAYOUT)
    (event,) = said(merge.connect(peer_node("p", layers)))
    assert isinstance(event, ConnectFailed)
    assert event.error.cause is TransferCause.LAYOUT_MISMATCH
    assert merge.num_open == 0


def test_without_a_layout_only_nodes_with_one_part_fit() -> None:
    merge = PartsMerge(WHOLE, None)
    assert pairs_of(merge.connect(peer_node("p", WHOLE))) == [(0, "p")]
    assert isinstance(said(merge.connect(peer_node("q", IN_TWO)))[0], ConnectFailed)


def test_a_disconnected_peer_is_remembered_until_its_last_read_is_over(rig: Rig) -> None:
    rig.read()
    assert pairs_of(rig.merge.disconnect("p")) == [(0, "p"), (0, "p/1"), (1, "p/1"), (1, "p/2")]
    late = rig.merge.read(2, "p", RANGES)
    assert len(late) == 4, "the parts know why they take no more reads of it"
    for effect in late:
        assert isinstance(effect, ReadPart)
        rig.merge.said(effect.part, ReadFailed(effect.read_id, TransferCause.CANCELLED, "disconnected"))
    assert rig.merge.num_open > 0
    for n in range(4):
        rig.failed(n, TransferCause.CANCELLED)
    assert rig.merge.num_open == 0
    assert rig.merge.disconnect("p") == []


def test_a_disconnected_peer_may_connect_again_with_other_values(rig: Rig) -> None:
    rig.read()
    rig.merge.disconnect("p")
    again = rig.merge.connect(peer_node("p", IN_TWO))
    for part, agent in pairs_of(again):
        again = rig.merge.said(part, Connected(agent))
    assert said(again) == [Connected("p")]
    for n in range(4):
        rig.failed(n)
    assert len(rig.read(2)) == 2


# Reads


def test_a_read_is_divided_into_one_for_each_pair_with_layers_of_it() -> None:
    attention, window = LayerGroup((0, 1, 2, 3)), LayerGroup((4, 5), 128)
    rig = Rig(layout=KVLayout(16, (LayerGeometry(2, 64, 64),) * 6, "bfloat16", (attention, window)))
    ranges = [ReadRange(0, 10, 2, group=0), ReadRange(5, 20, 1, group=1)]
    assert [(sub.part, sub.agent, sub.ranges) for sub in rig.read(ranges=ranges)] == [
        (0, "p", ranges[:1]),
        (0, "p/1", ranges[:1]),
        (1, "p/1", ranges[:1]),
        (1, "p/2", ranges[1:]),
    ]
    assert [sub.agent for sub in rig.read(2, ranges=ranges[1:])] == ["p/2"]
    ids = [sub.read_id for sub in rig.read(3)]
    assert min(ids) > 0
    assert len(set(ids)) == len(ids)


def test_sub_reads_of_probes_have_negative_ids() -> None:
    assert all(sub.read_id < 0 for sub in Rig().read(-3))


def test_a_read_id_in_use_is_refused_and_free_once_it_is_answered(rig: Rig) -> None:
    rig.read(to_digest=[0])
    with pytest.raises(ValueError, match="read 1"):
        rig.read()
    for n in range(4):
        rig.done(n)
    rig.read()


def test_a_read_without_ranges_is_left_to_the_parts_to_refuse() -> None:
    assert len(Rig().read(ranges=[])) == 4


def test_bytes_and_descriptors_are_added_and_the_longest_time_counts(rig: Rig) -> None:
    rig.read()
    assert [rig.done(0, 10, 0.1, 4.0), rig.done(1, 20, 0.3, 1.0), rig.done(2)] == [[], [], []]
    assert said(rig.done(3, 30, 0.2, 2.0)) == [ReadDone(1, 70, 0.5, 4.0, 12)]
    assert rig.merge.num_open == 1


State = Callable[[Rig], None]


def reading(rig: Rig) -> None:
    rig.read(to_digest=[0, 5])
    rig.done(0)
    rig.done(1)


def failing(rig: Rig) -> None:
    reading(rig)
    assert rig.failed(2) == rig.abandons(3)
    rig.read_failed = True  # type: ignore[attr-defined]


def digesting(rig: Rig) -> None:
    reading(rig)
    rig.done(2)
    assert said(rig.done(3)) == [ReadDone(1, 40, 0.5, 1.0, 12)]


def over(rig: Rig) -> None:
    digesting(rig)
    for n in range(3):
        assert rig.digested(n, {0: n, 5: n}) == []
    assert said(rig.digested(3, {0: 3, 5: 3})) == [BlocksDigested(1, {0: 6, 5: 6})]


ALL = {0: 1 << 63, 5: 7}
DONE = ReadDone(1, 40, 0.5, 1.0, 12)
LATE = ReadFailed(1, TransferCause.CANCELLED, "sub-read 3")
STALLED = ReadStalled(1, "sub-read 3")
FAILED = ReadFailed(1, TransferCause.PEER_GONE, "sub-read 2")
SUMMED = BlocksDigested(1, {0: 0, 5: 28})
NO_DIGESTS = DigestsFailed(1, "sub-read 3")
EXPECTED: dict[str, Sequence[MoverEvent | None]] = {
    # What the node is told in the states
    #                    reading     failing  digesting   over
    "one is done":      (None,       FAILED,  None,       None),
    "one failed":       (None,       FAILED,  None,       None),
    "the last is done": (DONE,       FAILED,  None,       None),
    "the last failed":  (LATE,       FAILED,  None,       None),
    "stalled":          (STALLED,    STALLED, None,       None),
    "digested":         (SUMMED,     None,    SUMMED,     None),
    "digests failed":   (NO_DIGESTS, None,    NO_DIGESTS, None),
    "abandoned":        (None,       None,    None,       None),
}  # fmt: skip
EVENTS: dict[str, Callable[[Rig], list[MergeEffect]]] = {
    "one is done": lambda rig: rig.done(3),
    "one failed": lambda rig: rig.failed(3, TransferCause.CANCELLED),
    "the last is done": lambda rig: rig.done(2) + rig.done(3),
    "the last failed": lambda rig: rig.done(2) + rig.failed(3, TransferCause.CANCELLED),
    "stalled": lambda rig: rig.stalled(3) + rig.stalled(3),
    "digested": lambda rig: [effect for n in range(4) for effect in rig.digested(n, ALL)],
    "digests failed": lambda rig: rig.digests_failed(3) + rig.digests_failed(2) + rig.digested(1, ALL),
    "abandoned": lambda rig: rig.merge.abandon(1),
}
STATES: dict[str, State] = {"reading": reading, "failing": failing, "digesting": digesting, "over": over}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("event", EVENTS)
def test_every_event_in_every_state(rig: Rig, state: str, event: str) -> None:
    STATES[state](rig)
    told = EXPECTED[event][list(STATES).index(state)]
    assert said(EVENTS[event](rig)) == ([] if told is None else [told])


def test_cancel_reaches_the_sub_reads_that_are_out_and_a_failure_the_others_once(rig: Rig) -> None:
    reading(rig)
    assert rig.merge.abandon(1) == rig.abandons(2, 3)
    assert rig.merge.abandon(99) == []
    assert rig.failed(3) == rig.abandons(2)
    assert rig.merge.abandon(1) == rig.abandons(2)


def test_a_sub_block_is_digested_when_all_pairs_that_bring_some_of_it_have_delivered() -> None:
    attention, window = LayerGroup((0, 1, 2, 3)), LayerGroup((4, 5), 128)
    rig = Rig(layout=KVLayout(16, (LayerGeometry(2, 64, 64),) * 6, "bfloat16", (attention, window)))
    # Two digests a block: 20..23 are of group 0, 30 and 31 of group 1, and 31 is not wanted.
    ranges = [ReadRange(10, 0, 2, group=0), ReadRange(15, 2, 1, group=1)]
    rig.read(ranges=ranges, to_digest=[20, 21, 22, 23, 30, 99], parts=2)
    assert said(rig.digested(3, {30: 3})) == [BlocksDigested(1, {30: 3})]
    assert said(rig.digested(0, {20: 1, 21: 1}) + rig.digested(1, {20: 1, 21: 1, 22: 1})) == []
    assert said(rig.digested(2, {20: (1 << 64) - 1, 22: 5, 23: 5})) == [BlocksDigested(1, {20: 1})]
    assert said(rig.digested(2, {21: 7})) == [BlocksDigested(1, {21: 9})]


def test_a_pair_that_brings_everything_is_asked_for_all_digests() -> None:
    rig = Rig([range(6)], [range(6)])
    (sub,) = rig.read(ranges=[ReadRange(10, 0, 2), ReadRange(15, 4, 1)], to_digest=[20, 21, 31], parts=2)
    assert sorted(sub.to_digest) == [20, 21, 31]
    assert said(rig.done(0)) == [ReadDone(1, 10, 0.5, 1.0, 3)]
    assert said(rig.digested(0, {20: 1, 31: 2})) == [BlocksDigested(1, {20: 1, 31: 2})]
    assert said(rig.digested(0, {21: 3})) == [BlocksDigested(1, {21: 3})]


def test_smaller_blocks_of_a_peer_are_counted_as_sub_blocks(rig: Rig) -> None:
    rig.merge.disconnect("p")
    small = peer_node("p", IN_TWO, block_size=4)
    for part, agent in pairs_of(rig.merge.connect(small)):
        rig.merge.said(part, Connected(agent))
    rig.read(ranges=[ReadRange(6, 0, 2)], to_digest=[6, 7], parts=4)
    assert said(rig.digested(0, {6: 1, 7: 1}) + rig.digested(1, {6: 1})) == [BlocksDigested(1, {6: 2})]


def test_an_answer_that_nobody_waits_for_is_counted(rig: Rig) -> None:
    (sub, *_) = rig.read()
    for event in (ReadDone(5, 1, 1.0, 1.0, 1), ReadFailed(sub.read_id + 99, TransferCause.REFUSED, "")):
        assert rig.merge.said(0, event) == []
    assert rig.merge.said(1, ReadDone(sub.read_id, 1, 1.0, 1.0, 1)) == [], "another part's"
    assert rig.merge.counters == {"ReadDone_unknown": 2, "ReadFailed_unknown": 1}
    rig.done(0)
    assert rig.merge.counters == {"ReadDone_unknown": 2, "ReadFailed_unknown": 1}
    assert rig.done(0) == []
    assert rig.merge.said(0, BlockFilled(7, {})) == []
    assert rig.merge.counters == {"ReadDone_unknown": 3, "ReadFailed_unknown": 1, "fill_unknown": 1}


# Fillings


def test_a_block_is_filled_when_all_parts_have_filled_theirs() -> None:
    merge = PartsMerge(IN_THREE, LAYOUT)
    effects = merge.fill(-4, 9, "seed")
    numbers = [effect.fill_id for effect in effects if isinstance(effect, FillPart)]
    assert effects == [FillPart(part, numbers[part], 9, "seed", 0) for part in range(3)]
    assert merge.said(2, BlockFilled(numbers[2], {1: 5, 2: 6, 4: 8})) == []
    assert merge.said(2, BlockFilled(numbers[2], {1: 5, 2: 6, 4: 8})) == []
    assert merge.said(0, BlockFilled(numbers[0], {1: (1 << 64) - 1, 2: 1})) == []
    assert merge.said(1, BlockFilled(numbers[1], {1: 2, 2: 2})) == [Deliver(BlockFilled(-4, {1: 6, 2: 9}))]
    assert merge.num_open == 0


def test_a_filling_that_fails_is_answered_when_all_parts_have_answered() -> None:
    merge = PartsMerge(IN_TWO, LAYOUT)
    first, second = (effect for effect in merge.fill(-4, 9, "seed") if isinstance(effect, FillPart))
    assert merge.said(0, FillFailed(first.fill_id, "no memory")) == []
    assert merge.said(1, BlockFilled(second.fill_id, {1: 1})) == [Deliver(FillFailed(-4, "no memory"))]


@pytest.mark.parametrize(("group", "parts"), [(0, [0, 1]), (1, [2])])
def test_parts_without_layers_of_the_group_are_not_filled(group: int, parts: Sequence[int]) -> None:
    """A probe reads a block as one of that group: nothing would be compared with what is in the others."""
    groups = (LayerGroup((0, 1, 2, 3)), LayerGroup((4, 5), 128))
    merge = PartsMerge(IN_THREE, KVLayout(16, (LayerGeometry(2, 64, 64),) * 6, "bfloat16", groups))
    filled = [effect for effect in merge.fill(1, 2, "seed", group) if isinstance(effect, FillPart)]
    assert [(effect.part, effect.group) for effect in filled] == [(part, group) for part in parts]


# Drawn orders


@given(st.data())
def test_in_any_order_each_read_gets_one_answer_after_all_its_sub_reads(data: st.DataObject) -> None:
    rig = Rig(*data.draw(st.sampled_from([(IN_TWO, IN_THREE), (WHOLE, IN_TWO), (IN_THREE, WHOLE)])))
    out: list[ReadPart] = []
    for read_id in range(1, data.draw(st.integers(2, 4))):
        out += rig.read(read_id, to_digest=[0, 1, 5])
    owner = {sub.read_id: read for read, subs in _by_read(rig, out).items() for sub in subs}
    digests = [(sub, block) for sub in out for block in (0, 1, 5)]
    answers: Counter[int] = Counter()
    digested: Counter[tuple[int, int]] = Counter()
    failed: set[int] = set()
    events: list[tuple[str, ReadPart, int]] = [("end", sub, 0) for sub in out]
    events += [("digest", sub, block) for sub, block in digests]
    for kind, sub, block in data.draw(st.permutations(events)):
        read_id = owner[sub.read_id]
        if kind == "digest":
            effects = rig.merge.said(sub.part, BlocksDigested(sub.read_id, {block: 1}))
        elif data.draw(st.booleans()):
            out.remove(sub)
            effects = rig.merge.said(sub.part, ReadDone(sub.read_id, 1, 0.0, 0.0, 1))
        else:
            out.remove(sub)
            failed.add(read_id)
            effects = rig.merge.said(sub.part, ReadFailed(sub.read_id, TransferCause.PEER_GONE, ""))
        for event in said(effects):
            match event:
                case ReadDone(answered) | ReadFailed(answered):
                    answers[answered] += 1
                    assert answered == read_id
                    assert isinstance(event, ReadFailed) == (answered in failed)
                    assert answered not in {owner[each.read_id] for each in out}, "some of it may still write"
                case BlocksDigested(_, found):
                    digested.update((read_id, each) for each in found)
                    shares = sum(each == read_id for each in owner.values())
                    assert set(found.values()) == {shares}
    reads = set(owner.values())
    assert answers == dict.fromkeys(reads, 1)
    assert all(digested[read, block] == 1 for read in reads - failed for block in (0, 1, 5))
    assert set(digested.values()) <= {1}
    assert rig.merge.num_open == 1, "the peer alone"


def _by_read(rig: Rig, subs: Sequence[ReadPart]) -> dict[int, list[ReadPart]]:
    num_pairs = len({(sub.part, sub.agent) for sub in subs})
    found: defaultdict[int, list[ReadPart]] = defaultdict(list)
    for at, sub in enumerate(subs):
        found[at // num_pairs + 1].append(sub)
    return found


@given(st.lists(st.sampled_from(["connect", "disconnect", "answer", "fail"]), max_size=40), st.randoms())
def test_in_any_order_each_call_to_connect_gets_one_answer(steps: Sequence[str], chance: object) -> None:
    merge, peer = PartsMerge(IN_TWO, LAYOUT), peer_node("p", IN_THREE)
    waiting: Counter[tuple[int, str]] = Counter()
    calls = answers = 0
    for step in [*steps, *["answer"] * 200]:
        if step == "connect":
            calls += 1
            effects = merge.connect(peer)
            waiting.update(pairs_of(effects))
        elif step == "disconnect":
            effects = merge.disconnect("p")
        else:
            pairs = sorted(waiting.elements())
            if not pairs:
                continue
            part, agent = chance.choice(pairs)  # type: ignore[attr-defined]
            waiting[part, agent] -= 1
            event = Connected(agent) if step == "answer" else ConnectFailed(agent, GONE)
            effects = merge.said(part, event)
        answers += sum(isinstance(event, Connected | ConnectFailed) for event in said(effects))
    assert answers == calls
    merge.disconnect("p")
    assert merge.num_open == 0
