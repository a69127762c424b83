"""The reader's transfers: what their table never allows, cases, and messages of a peer that must do no harm.

Cases are in transfer_cases.txt, and in kept_block_cases.txt those about blocks that stay valid when a transfer fails. A
line is what happens, and behind `->` all that the book does about it. Attempts have one letter, and their sender is p0
with the incarnation p0.x, unless another sender is named:

  given reading                 what GIVEN says happened before
  plan a                        the engine wants the KV of 18 tokens in the blocks 40, 41, 42, 43 and 10
  plan a 40 0 from 1 of 8 tokens    others; the first one is there, and nothing is wanted in the second
  expect a, ended a, abandon a  what the engine and the router say
  opens p0, refuse p0 CAUSE     a link is wanted; what waits for it is refused
  ready, cut CAUSE, reopen      the link is open (`with blocks of 4 for 8`: the sender's and the reader's block size),
                                is lost, may be opened again
  offer a 0 5 6                 a message of the sender: prompt blocks 0 and 1 are its blocks 5 and 6; `close` has the
                                last ones; with `digests`, or `digests in 2` for each block
  held a 50 60, denied a        the lease was held, and the digests are these; it was not
  part a 0 50 60, begun a, lost a WHY    other messages; `from p1.x` before a message: it is of another sender
  done 1 64, failed 1 CAUSE, stalled 1   the end of a read
  digested 1 40=50, undigested 1         the digests of what read 1 brought; they can't be computed
  state a, counts, counters, failures, awaits    answer what the book shows
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from baton.errors import TransferCause
from baton.messages.ids import AttemptKey, Peer
from kv_transfer.backends.base import check_ranges
from kv_transfer.link.link_messages import (
    Begun,
    Closing,
    Heartbeat,
    Offer,
    OfferLost,
    OfferMessage,
    PartConfirmed,
    ReadConfirmed,
)
from kv_transfer.receiver.block_map import BlockMap
from kv_transfer.receiver.transfer import TransferBook
from kv_transfer.receiver.transfer_values import (
    TRANSFER_TABLE,
    Arrived,
    Failed,
    StartRead,
    TransferEvent,
    TransferPlan,
    TransferState,
)
from tests.support.conversation import lines, numbers, read_cases, replay, told

A = AttemptKey("a", 1)
SOURCE = Peer("p0", "p0.x", "host:1")
OTHER = Peer("p1", "p1.x", "host:2")
PEERS = {peer.node_id: peer for peer in (SOURCE, OTHER)}
PLAN = TransferPlan(A, SOURCE, 18, (40, 41, 42, 43, 10), 0)
CLOSING = Closing(18, (7,), False)
DIGESTS = (50, 60, 70, 200, 210)
S, E = TransferState, TransferEvent
CASES = Path(__file__).parent


class Reader:
    """A transfer book that a case plays with."""

    def __init__(self, keeps_valid_blocks: bool = False) -> None:
        self.book = TransferBook(max_quarantined_blocks=4, keeps_valid_blocks=keeps_valid_blocks)
        self.num_tokens: dict[str, int] = {}

    def say(self, line: str) -> list[str]:
        match line.split():
            case ["from", incarnation, kind, name, *words]:
                return told(self.book.received(incarnation, self.message(kind, name, words)))
            case ["expect", name]:
                return told(self.book.expect(AttemptKey(name, 1), SOURCE))
            case ["expect", name, source]:
                return told(self.book.expect(AttemptKey(name, 1), PEERS[source]))
            case ["plan", name, *words]:
                return told(self.book.plan(self.plan(name, words)))
            case ["refuse", source, cause]:
                waits_for = PEERS[source].incarnation
                return told(self.book.refuse_waiting(waits_for, TransferCause(cause), "no probe block is left"))
            case ["opens", source]:
                return told(self.book.open(PEERS[source]))
            case ["ended", name]:
                return told(self.book.ended(AttemptKey(name, 1)))
            case ["abandon", name]:
                return told(self.book.abandon(AttemptKey(name, 1)))
            case ["ready"]:
                return told(self.book.peer_ready("p0.x", 100, None))
            case ["ready", "with", "blocks", "of", theirs, "for", ours]:
                return told(self.book.peer_ready("p0.x", 100, BlockMap(int(theirs), int(ours))))
            case ["cut", cause]:
                return told(self.book.peer_lost("p0.x", TransferCause(cause), "cut"))
            case ["reopen"]:
                return told(self.book.reopen(SOURCE))
            case ["done", read, num_bytes, *seconds]:
                return told(self.book.read_done(int(read), int(num_bytes), float(seconds[0]) if seconds else 0.0))
            case ["failed", read, cause]:
                return told(self.book.read_failed(int(read), TransferCause(cause), "bad"))
            case ["stalled", read]:
                return told(self.book.read_stalled(int(read), "nothing arrived"))
            case ["digested", read, *pairs]:
                digests = {int(block): int(digest) for block, digest in (pair.split("=") for pair in pairs)}
                return told(self.book.digested(int(read), digests))
            case ["undigested", read]:
                return told(self.book.digests_failed(int(read), "no memory"))
            case ["state" | "counts" | "counters" | "failures" | "awaits", *_]:
                return [self.shown(line)]
            case [kind, name, *words]:
                return told(self.book.received("p0.x", self.message(kind, name, words)))
        raise ValueError(line)

    def plan(self, name: str, words: list[str]) -> TransferPlan:
        source, first = SOURCE, 0
        if words and words[0] in PEERS:
            source, words = PEERS[words[0]], words[1:]
        if "from" in words:
            at = words.index("from")
            first, words = int(words[at + 1]), words[:at] + words[at + 2 :]
        blocks, self.num_tokens[name] = PLAN.block_ids, 18
        if words:
            *block_ids, of, num_tokens, unit = words
            assert (of, unit) == ("of", "tokens"), words
            blocks, self.num_tokens[name] = numbers(block_ids), int(num_tokens)
        return TransferPlan(AttemptKey(name, 1), source, self.num_tokens[name], blocks, first)

    def message(self, kind: str, name: str, words: list[str]) -> OfferMessage:
        attempt = AttemptKey(name, 1) if name != "old" else AttemptKey("a", 0)
        match kind:
            case "begun":
                return Begun(attempt)
            case "offer" | "close":
                parts = 1
                if words[-2:-1] == ["in"]:
                    words, parts = words[:-2], int(words[-1])
                digested = words[-1] == "digests"
                first, *blocks = numbers(words[:-1] if digested else words)
                closing = Closing(self.num_tokens[name], (7,), False) if kind == "close" else None
                return Offer(attempt, first, tuple(blocks), 1000, closing, int(digested), parts)
            case "lost":
                (why,) = words
                return OfferLost(attempt, why)
            case "held":
                return ReadConfirmed(attempt, True, numbers(words))
            case "denied" if not words:
                return ReadConfirmed(attempt, False)
            case "part":
                first, *digests = numbers(words)
                return PartConfirmed(attempt, first, digests)
        raise ValueError(kind)

    def shown(self, line: str) -> str:
        match line.split():
            case ["state", name]:
                state = self.book.state(AttemptKey(name, 1))
                return state.name if state else "none"
            case ["counts"]:
                counts = self.book.counts()
                assert counts.live == counts.waiting_to_start + counts.in_progress
                words = f"{counts.waiting_to_start} waiting, {counts.in_progress} in progress"
                return f"{words}, {counts.quarantined} in quarantine with {counts.quarantined_blocks} blocks"
            case ["counters"]:
                return str(self.book.counters)
            case ["failures"]:
                failures = self.book.failures.items()
                return ", ".join(f"{node} {cause.name}: {count}" for (node, cause), count in failures) or "none"
            case ["awaits"]:
                return str(self.book.awaits_digests)
        raise ValueError(line)


@pytest.fixture
def book() -> TransferBook:
    return TransferBook(max_quarantined_blocks=4)


def test_the_one_way_to_arrive_is_a_confirmed_lease() -> None:
    assert [pair for pair, after in TRANSFER_TABLE.items() if after is S.ARRIVED] == [(S.CONFIRMING, E.HELD)]
    assert not any(state in (S.ARRIVED, S.FAILED, S.ABANDONED) for state, _ in TRANSFER_TABLE)


def test_the_one_way_out_of_quarantine_is_the_end_of_the_reads() -> None:
    out = {event for (state, event), after in TRANSFER_TABLE.items() if state is S.QUARANTINED and after is not state}
    assert out == {E.READS_ENDED_FAILED, E.READS_ENDED_ABANDONED}


GIVEN = {
    "reading": "plan a; ready; offer a 0 5 6 7 8 9",
    "reading the last": "plan a; ready; close a 0 5 6 7 8 9",
    "two reads": "plan a; ready; offer a 0 5 6; close a 2 7 8 9",
    "all read": "plan a; ready; close a 0 5 6 7 20 21 digests; done 1 320",
    "two blocks digested": "plan a; ready; offer a 0 5 6 digests; done 1 128; digested 1 40=50 41=60",
}


@pytest.mark.parametrize("case", read_cases(CASES / "transfer_cases.txt"))
def test_a_reader_goes_through_its_transfers(case: str) -> None:
    assert replay(case, Reader().say, GIVEN) == case


@pytest.mark.parametrize("case", read_cases(CASES / "kept_block_cases.txt"))
def test_a_reader_keeps_valid_blocks(case: str) -> None:
    assert replay(case, Reader(keeps_valid_blocks=True).say, GIVEN) == case


@pytest.mark.parametrize("cause", TransferCause)
@pytest.mark.parametrize("is_planned", [False, True])
def test_a_lost_offer_fails_for_the_senders_reason(book: TransferBook, cause: TransferCause, is_planned: bool) -> None:
    book.expect(A, SOURCE)
    book.peer_ready("p0.x", 100)
    if is_planned:
        book.plan(PLAN)
    effects = book.received("p0.x", OfferLost(A, "why", cause))
    assert [effect for effect in effects if isinstance(effect, Failed)] == [Failed(A, cause, "why")]
    assert book.failures == {("p0", cause): 1}


def test_a_plan_for_a_live_attempt_is_a_fault_of_the_caller(book: TransferBook) -> None:
    book.plan(PLAN)
    with pytest.raises(ValueError, match="being transferred"):
        book.plan(PLAN)


@pytest.mark.parametrize("seed", range(300))
def test_a_transfer_ends_once_and_no_block_is_released_under_a_read(seed: int) -> None:
    rng, book = Random(seed), TransferBook(max_quarantined_blocks=1000)
    flying: dict[int, int] = {}
    told: list[str] = []
    ended = released = False

    def take(effects: list) -> None:  # type: ignore[type-arg]
        nonlocal released
        for effect in effects:
            if isinstance(effect, StartRead):
                flying[effect.read_id] = sum(r.count for r in effect.ranges)
            elif type(effect).__name__ in ("Arrived", "Failed"):
                told.append(type(effect).__name__)
            elif type(effect).__name__ == "Released":
                assert ended
                assert not released
                assert not flying
                released = True

    def end_a_read(done: bool) -> None:
        if flying:
            read_id = rng.choice(list(flying))
            num_blocks = flying.pop(read_id)
            ok = book.read_done(read_id, num_blocks * 64) if done else book.read_failed(read_id, rng.choice(causes), "")
            take(ok)

    causes = list(TransferCause)
    next_block = 0
    take(book.plan(PLAN))
    for _ in range(rng.randrange(4, 40)):
        match rng.randrange(9):
            case 0 | 1:
                take(book.peer_ready("p0.x", 100))
            case 2 | 3:
                count = rng.randrange(0, 6 - next_block)
                closing = CLOSING if next_block + count == 5 else None
                ids = tuple(range(next_block + 5, next_block + 5 + count))
                if book.state(A) in (S.RESERVED, S.READING):
                    take(book.received("p0.x", Offer(A, next_block, ids, 1000, closing)))
                    next_block += count
            case 4 | 5:
                end_a_read(rng.random() < 0.9)
            case 6:
                take(book.received("p0.x", ReadConfirmed(A, rng.random() < 0.8)))
            case 7 if rng.random() < 0.3:
                take(book.received("p0.x", OfferLost(A, "")))
            case 8 if rng.random() < 0.3:
                take(book.peer_lost("p0.x", TransferCause.PEER_GONE, ""))
    if not told or rng.random() < 0.5:
        ended = True
        take(book.ended(A))
    while flying:
        assert not released
        end_a_read(rng.random() < 0.5)
    if not ended:
        ended = True
        take(book.ended(A))
    assert released
    assert len(told) <= 1
    assert book.counts().live == book.counts().quarantined == 0


@pytest.mark.parametrize("seed", range(200))
def test_reads_stay_within_the_plan_and_the_pool_whatever_a_sender_sends(seed: int) -> None:
    rng, book = Random(seed), TransferBook(max_quarantined_blocks=1000, vocab_size=100)
    edges = [0, 1, 4, 5, 6, 99, 100, 2**31, 2**32 - 1, -1]
    filled: list[int] = []

    def number() -> int:
        return rng.choice(edges) if rng.random() < 0.3 else rng.randrange(10)

    def offer() -> Offer:
        left = len(PLAN.block_ids) - len(filled)
        ids = rng.sample(range(1, 100), rng.randint(0, left)) if rng.random() < 0.9 else [number() for _ in range(left)]
        at = len(filled) if rng.random() < 0.8 else rng.choice([len(filled) - 1, len(filled) + 1, number()])
        first_token = (7,) if rng.random() < 0.7 else tuple(number() for _ in range(rng.randrange(3)))
        closing = Closing(18 if rng.random() < 0.9 else number(), first_token, False)
        closes = rng.random() < (0.9 if len(ids) == left else 0.1)
        return Offer(A, at, ids, number(), closing if closes else None, 0 if rng.random() < 0.9 else number())

    def message() -> OfferMessage:
        match rng.randrange(12):
            case 0:
                return Begun(A)
            case 1:
                return Heartbeat(number())
            case 2 if rng.random() < 0.1:
                return OfferLost(A, "", rng.choice(list(TransferCause)))
            case 3 | 4 | 5:
                return ReadConfirmed(A, rng.random() < 0.8, [number() for _ in range(rng.randrange(7))])
        return offer()

    book.plan(PLAN)
    book.peer_ready("p0.x", 100)
    for _ in range(12):
        effects = book.received("p0.x", message())
        for read in [effect for effect in effects if isinstance(effect, StartRead)]:
            check_ranges(read.ranges, 64, 100)
            filled += [r.local_block + offset for r in read.ranges for offset in range(r.count)]
            if rng.random() < 0.9:
                effects += book.read_done(read.read_id, 64)
        arrived = [effect for effect in effects if isinstance(effect, Arrived)]
        assert all(sorted(filled) == sorted(PLAN.block_ids) for _ in arrived)
        assert all(0 <= token < 100 for effect in arrived for token in effect.closing.first_token_ids)
    assert len(filled) == len(set(filled)) <= len(PLAN.block_ids)
    assert set(filled) <= set(PLAN.block_ids)


@pytest.mark.parametrize("place", range(5))
@pytest.mark.parametrize("digested_first", [True, False])
def test_a_block_that_is_not_what_was_computed_fails_its_prompt(
    book: TransferBook, place: int, digested_first: bool
) -> None:
    book.plan(PLAN)
    book.peer_ready("p0.x", 100)
    book.received("p0.x", Offer(A, 0, (5, 6, 7, 20, 21), 1000, CLOSING, 1))
    book.read_done(1, 320)
    computed = dict(zip(PLAN.block_ids, DIGESTS, strict=True))
    said = tuple(digest + (index == place) for index, digest in enumerate(DIGESTS))
    effects = book.digested(1, computed) if digested_first else []
    effects += book.received("p0.x", ReadConfirmed(A, True, said))
    effects += book.digested(1, computed) if not digested_first else []
    assert lines(effects) == [
        f"Failed a#1 DIGEST_MISMATCH block {PLAN.block_ids[place]} is not what p0 computed {place}",
        "TellSender p0.x (Abandon a#1 False)",
    ]
    assert book.failures == {("p0", TransferCause.DIGEST_MISMATCH): 1}
    assert book.counts().live == 0


@pytest.mark.parametrize(("keeps", "every"), [(False, 1), (True, 16), (True, 0)])
def test_no_parts_are_confirmed_without_all_digests_or_if_valid_blocks_are_not_kept(keeps: bool, every: int) -> None:
    book = TransferBook(keeps_valid_blocks=keeps, digest_every=every)
    book.plan(PLAN)
    book.peer_ready("p0.x", 100)
    book.received("p0.x", Offer(A, 0, (5, 6, 7, 8, 9), 1000))
    assert lines(book.read_done(1, 320)) == ["TellSender p0.x (ReadProgress a#1 5)"]


@pytest.mark.parametrize(
    ("ours", "theirs", "flight", "to_digest"),
    [
        (1, 1, 3, [40, 41, 42, 43, 10]),
        (2, 1, 0, [40, 42, 10]),
        (2, 1, 3, [41, 43]),
        (1, 3, 0, [40, 43]),
        (2, 3, 0, [40]),
        (2, 3, 4, [42]),
        (0, 1, 0, []),
        (1, 0, 0, []),
    ],
)
def test_the_blocks_that_are_compared_have_a_digest_on_both_sides(
    ours: int, theirs: int, flight: int, to_digest: list[int]
) -> None:
    book, attempt = TransferBook(digest_every=ours), A._replace(flight=flight)
    book.plan(replace(PLAN, attempt=attempt))
    book.peer_ready("p0.x", 100)
    effects = book.received("p0.x", Offer(attempt, 0, (5, 6, 7), 1000, None, theirs))
    effects += book.received("p0.x", Offer(attempt, 3, (20, 21), 1000, CLOSING, theirs))
    assert [block for e in effects if isinstance(e, StartRead) for block in e.to_digest] == to_digest
    book.read_done(1, 192)
    book.read_done(2, 128)
    known = {e.read_id: dict.fromkeys(e.to_digest, 7) for e in effects if isinstance(e, StartRead) and e.to_digest}
    for read_id, digests in known.items():
        book.digested(read_id, digests)
    said = [7 if block in to_digest else 0 for block in PLAN.block_ids]
    assert lines(book.received("p0.x", ReadConfirmed(attempt, True, said)))[0].startswith("Arrived")


@pytest.mark.parametrize("arrives", [True, False])
def test_blocks_that_were_filled_in_part_are_named_whatever_becomes_of_the_transfer(arrives: bool) -> None:
    book = TransferBook(digest_every=0)
    # 30 tokens in blocks of 8; the query at 29 sees 19 to 29, so of block 42 the first half is not read.
    book.plan(TransferPlan(A, SOURCE, 30, (0, 0, 42, 43), 0))
    book.peer_ready("p0.x", 100, BlockMap(4, 8, (10,)))
    offer = Offer(A, 0, (0, 0, 0, 0, 0, 5, 6, 7), 1000, Closing(30, (7,), False))
    assert lines(book.received("p0.x", offer)) == ["StartRead 1 p0.x [(ReadRange 85 5 3)] [] 2"]
    book.read_done(1, 48)
    effects = (
        book.received("p0.x", ReadConfirmed(A, True))
        if arrives
        else book.peer_lost("p0.x", TransferCause.PEER_GONE, "gone")
    )
    (outcome,) = (effect for effect in effects if isinstance(effect, (Arrived, Failed)))
    assert outcome.partly_filled == (2,)


@pytest.mark.parametrize("digest_parts", [0, 1, 3, 16, 1 << 31])
def test_digests_that_cant_be_compared_are_refused_before_anything_is_read(digest_parts: int) -> None:
    book = TransferBook()
    book.plan(TransferPlan(A, SOURCE, 20, (40, 41, 42, 43, 44), 0))
    book.peer_ready("p0.x", 100, BlockMap(8, 4))
    effects = book.received("p0.x", Offer(A, 0, (5,), 1000, digest_every=1, digest_parts=digest_parts))
    [failed] = [effect for effect in effects if isinstance(effect, Failed)]
    assert (failed.cause, f"{digest_parts} digests for each block" in failed.detail) == (TransferCause.REFUSED, True)
    assert not any(isinstance(effect, StartRead) for effect in effects)
