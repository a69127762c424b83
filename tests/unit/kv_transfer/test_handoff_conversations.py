"""Golden conversations of a sender's leases with a receiver's transfers, joined back to back.

A file begins with why it is told. Lines with `>` are what happens, the lines after one are what the two do about it:

  > offer 0 5 6                 the prefill node computed the prompt's blocks 0 and 1, which lie in its blocks 5 and 6
  > close 2 9                   and the last one; the first token is 7
  > plan 40 41 42 from 1        the decode node wants the KV in these blocks; it has the first one
  > ended sender                its engine has ended the request (or `receiver`)
  > withdraw aborted            the prefill node gives the offer up
  > abandon                     the decode node does
  > link up                     it is open and the sender's blocks are connected; `link down` is its end, for both
  > link down sender            only that one knows of its end
  > read 1 done                 (or `failed`, or `stalled`: nothing of it arrives, and it may still write)
  > reopen                      the while after a ReopenLink is over
  > wait 10                     seconds; the receiver's heartbeats come every second while the link is up
  > hold                        from now on messages are on their way; `arrive` lets them
  > reader gone                 its process is known to have ended

  receiver: subscribe 1         to the sender (`sender:` says something to the receiver)
  receiver* reads 1: 40<5 41<6  does something (`sender*` likewise)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from baton.errors import TransferCause
from baton.messages.ids import AttemptKey, Peer
from kv_transfer.effects import Recorded, Released
from kv_transfer.link.link_messages import (
    Abandon,
    Begun,
    Closing,
    ConfirmRead,
    Expect,
    Heartbeat,
    Offer,
    OfferLost,
    ReadConfirmed,
    ReadProgress,
    Subscribe,
)
from kv_transfer.receiver.transfer import TransferBook
from kv_transfer.receiver.transfer_values import (
    AbandonRead,
    Arrived,
    CutLink,
    Failed,
    MayPlan,
    OpenLink,
    ReopenLink,
    StartRead,
    TellSender,
    TransferPlan,
)
from kv_transfer.sender.lease import LeaseBook
from kv_transfer.sender.lease_values import CutLink as CutReader
from kv_transfer.sender.lease_values import LeaseTimes, OpenLeases, TellReader
from tests.doubles.fake_clock import FakeClock

CONVERSATIONS = sorted((Path(__file__).parent / "handoff_conversations").glob("*.txt"))
ATTEMPT = AttemptKey("r", 1)
SOURCE = Peer("p0", "p0.x", "host:1")
TIMES = LeaseTimes(lease_s=10, unclaimed_s=30, grace_s=5)


class Pair:
    """The lease book, the transfer book, and the link between them."""

    def __init__(self) -> None:
        self._clock = FakeClock(100.0)
        self._leases = LeaseBook(self._clock, TIMES)
        self._transfers = TransferBook()
        self._link = 0
        self._is_up = False
        self._on_their_way: deque[tuple[str, Any]] = deque()
        self._held = False
        self._num_tokens = 0
        self._said: list[str] = []

    def say(self, line: str) -> list[str]:
        """Play one event, and return what the two books do."""
        self._said = []
        match line.split():
            case ["offer", first, *blocks]:
                self._sender(self._leases.offer(ATTEMPT, int(first), _numbers(blocks)))
            case ["close", first, *blocks]:
                closing = Closing(self._num_tokens or 4 * (int(first) + len(blocks)), (7,), False)
                self._sender(self._leases.offer(ATTEMPT, int(first), _numbers(blocks), closing))
            case ["expect"]:
                self._receiver(self._transfers.expect(ATTEMPT, SOURCE))
            case ["begin"]:
                self._sender(self._leases.begun(ATTEMPT))
            case ["plan", *blocks, "from", first]:
                self._num_tokens = 4 * len(blocks)
                plan = TransferPlan(ATTEMPT, SOURCE, self._num_tokens, _numbers(blocks), int(first))
                self._receiver(self._transfers.plan(plan))
            case ["ended", "sender"]:
                self._sender(self._leases.ended(ATTEMPT))
            case ["ended", "receiver"]:
                self._receiver(self._transfers.ended(ATTEMPT))
            case ["withdraw", cause, *broken]:
                self._sender(self._leases.withdraw(ATTEMPT, cause, promise_broken=bool(broken)))
            case ["abandon"]:
                self._receiver(self._transfers.abandon(ATTEMPT))
            case ["link", "up"]:
                self._link_up()
            case ["link", "down", *who]:
                self._link_down(who or ["receiver", "sender"])
            case ["read", number, "done"]:
                self._receiver(self._transfers.read_done(int(number), 64))
            case ["read", number, "failed"]:
                self._receiver(self._transfers.read_failed(int(number), TransferCause.PEER_GONE, "gone"))
            case ["read", number, "stalled"]:
                self._receiver(self._transfers.read_stalled(int(number), "nothing arrives"))
            case ["reopen"]:
                self._receiver(self._transfers.reopen(SOURCE))
            case ["wait", seconds]:
                self._wait(int(seconds))
            case ["hold"]:
                self._held = True
            case ["arrive"]:
                self._held = False
            case ["reader", "gone"]:
                self._sender(self._leases.reader_gone("d0.x"))
            case _:
                raise AssertionError(f"no such event: {line}")
        self._deliver()
        return self._said

    def _link_up(self) -> None:
        self._link += 1
        self._is_up = True
        self._sender(self._leases.link_opened(self._link, "d0", "d0.x"))
        self._receiver(self._transfers.peer_ready("p0.x", 100))

    def _link_down(self, who: Sequence[str]) -> None:
        self._is_up = False
        self._on_their_way.clear()
        if "receiver" in who:
            self._receiver(self._transfers.peer_lost("p0.x", TransferCause.PEER_GONE, "link lost"))
        if "sender" in who:
            self._sender(self._leases.link_closed(self._link))

    def _wait(self, seconds: int) -> None:
        for _ in range(seconds):
            self._clock.advance(1)
            if self._is_up and not self._held:
                self._sender(self._leases.received(self._link, Heartbeat(1)))
            self._sender(self._leases.tick())

    def _deliver(self) -> None:
        while self._on_their_way and not self._held:
            whose, message = self._on_their_way.popleft()
            if whose == "sender":
                self._receiver(self._transfers.received("p0.x", message))
            else:
                self._sender(self._leases.received(self._link, message))

    def _sender(self, effects: Iterable[Any]) -> None:
        self._take("sender", effects)

    def _receiver(self, effects: Iterable[Any]) -> None:
        self._take("receiver", effects)

    def _take(self, who: str, effects: Iterable[Any]) -> None:
        for effect in effects:
            match effect:
                case TellReader(_, message) | TellSender(_, message):
                    self._said.append(f"{who}: {_message(message)}")
                    if self._is_up:
                        self._on_their_way.append((who, message))
                case Recorded():
                    continue
                case _:
                    self._said.append(f"{who}* {_act(effect)}")

    def state(self) -> str:
        """The final states, as the last line of a conversation."""
        lease, transfer = self._leases.state(ATTEMPT), self._transfers.state(ATTEMPT)
        return f"= lease {lease.name if lease else 'over'}, transfer {transfer.name if transfer else 'over'}"


def _numbers(words: Sequence[str]) -> tuple[int, ...]:
    return tuple(map(int, words))


def _message(message: Any) -> str:
    match message:
        case Expect():
            return "expect"
        case Begun():
            return "begun"
        case Subscribe(_, first):
            return f"subscribe {first}"
        case Offer() as offer:
            last = ", the last" if offer.closing else ""
            return " ".join(["offer", str(offer.first_block), *map(str, offer.block_ids)]) + last
        case ReadProgress(_, blocks):
            return f"progress {blocks}"
        case ConfirmRead():
            return "confirm?"
        case ReadConfirmed() as answer:
            return "held" if answer.held else "not held"
        case Abandon(_, reading):
            return "abandon, reads go on" if reading else "abandon"
        case OfferLost(_, cause):
            return f"lost: {cause}"
    raise AssertionError(message)


def _act(effect: Any) -> str:
    match effect:
        case OpenLeases(count):
            return f"may be read: {count}"
        case Released():
            return "released"
        case CutReader(_, reason) | CutLink(_, reason):
            return f"cuts the link: {reason}"
        case OpenLink():
            return "opens a link"
        case ReopenLink():
            return "will reopen the link"
        case MayPlan():
            return "may reserve blocks"
        case StartRead(number, _, ranges, _):
            pairs = [(r.local_block + i, r.remote_block + i) for r in ranges for i in range(r.count)]
            return f"reads {number}: " + " ".join(f"{local}<{remote}" for local, remote in pairs)
        case AbandonRead(number):
            return f"abandons {number}"
        case Arrived(_, closing, _):
            return f"arrived, first token {closing.first_token_ids[0]}"
        case Failed(_, cause, story):
            return f"failed, {cause.value}: {story}"
    raise AssertionError(effect)


def replay(text: str) -> str:
    """The conversation as the code holds it now."""
    pair, told = Pair(), []
    for line in text.splitlines():
        if line.startswith("#"):
            told.append(line)
        elif line.startswith("> "):
            told += [line, *pair.say(line[2:])]
    return "\n".join([*told, pair.state(), ""])


@pytest.mark.parametrize("path", CONVERSATIONS, ids=lambda path: path.stem)
def test_the_hand_off_follows_the_golden_conversation(path: Path) -> None:
    text = path.read_text()
    assert replay(text) == text


def test_conversation_files_are_found() -> None:
    assert len(CONVERSATIONS) >= 10
