"""Which inputs of other nodes an encode node makes rows of, and when each node may read them. Pure.

- What waits is bounded, in number and in bytes, and of one tenant a quarter of that: others find room beside a flood.
  A cluster without tenants may fill all of it.
- One input is encoded at a time. It is one of the tenant that was given the fewest rows: a tenant that comes anew
  begins with as many as the one that is served, so nobody saves up, and nobody starves.
- Rows that are there, or are being made for somebody else, are given to all that ask; only who has an input encoded
  is charged.
- Rows are held from the answer until they were read, or the caller left. While others are read and there is no room,
  the next input waits for that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

from baton.engine.encoder_cache import EncoderCache, EncoderInput
from baton.errors import InvalidRequest, QueueFull
from baton.values import value

MOST_WAITING = 64
"""The most inputs that wait."""
MOST_WAITING_BYTES = 256 << 20
"""Their most bytes."""


@value(frozen=True, slots=True)
class WantedRows:
    """Rows that another node asks for."""

    number: int
    """Names the call."""
    encoder_input: EncoderInput
    """The input, with its data, at the beginning of a prompt; its tenant is the one that is charged."""
    answer: Callable[[Exception | None], None]
    """To be called once: with None when its rows are there, or with the reason why they can't be made."""

    @property
    def digest(self) -> str:
        return self.encoder_input.digest

    @property
    def tenant(self) -> str:
        return self.encoder_input.tenant

    @property
    def num_bytes(self) -> int:
        """Bytes of the input."""
        return len(self.encoder_input.content.data)


Answers: TypeAlias = Sequence[tuple[WantedRows, Exception | None]]
"""Calls that can be answered, each with None (its rows are held) or an error."""


class RowRequests:
    """The calls of other nodes. It is the only one that holds rows in its cache; the engine's thread alone calls it."""

    def __init__(
        self, cache: EncoderCache, most_waiting: int = MOST_WAITING, most_bytes: int = MOST_WAITING_BYTES
    ) -> None:
        self.is_used = False
        """Whether a call has ever come."""
        self._cache = cache
        self._most_waiting = most_waiting
        self._most_bytes = most_bytes
        self._waiting: dict[str, deque[WantedRows]] = {}
        """What waits, by tenant. Tenants with nothing have no entry."""
        self._encoding: dict[str, list[WantedRows]] = {}
        """The calls for inputs that are being encoded, by digest."""
        self._held: dict[int, WantedRows] = {}
        """The calls whose rows are being read, by number."""
        self._given: dict[str, int] = {}
        """The rows that tenants were given; those with no more than `_base` have no entry."""
        self._base = 0
        """The rows that a tenant without an entry counts as having been given."""

    @property
    def num_waiting(self) -> int:
        """Calls that wait for their turn."""
        return sum(map(len, self._waiting.values()))

    @property
    def num_running(self) -> int:
        """Calls whose rows are being made or read."""
        return sum(map(len, self._encoding.values())) + len(self._held)

    def add(self, wanted: WantedRows) -> Answers:
        """A call has come."""
        self.is_used = True
        if not self._cache.can_ever_hold((wanted.encoder_input,)):
            field, most = wanted.encoder_input.content.kind.field, self._cache.num_rows
            reason = f"one has {wanted.encoder_input.num_rows} rows, and the node keeps {most} (num_encoder_rows)"
            return [(wanted, InvalidRequest(field, reason))]
        if wanted.digest in self._encoding:
            self._hold(wanted)
            self._encoding[wanted.digest].append(wanted)
            return []
        if wanted.digest in self._cache.digests:
            self._hold(wanted)
            return [(wanted, None)]
        if reason := self._why_full(wanted):
            return [(wanted, QueueFull(reason))]
        self._waiting.setdefault(wanted.tenant, deque()).append(wanted)
        return self._begin_next()

    def end(self, number: int) -> Answers:
        """A caller has its rows, or has left. Unknown numbers are ignored."""
        if (held := self._held.pop(number, None)) is not None:
            self._cache.computed(_holder(held), (held.encoder_input,), held.encoder_input.stop)
        for calls in list(self._encoding.values()):
            for wanted in [wanted for wanted in calls if wanted.number == number]:
                calls.remove(wanted)
                # Nobody else may want it, and then it is not encoded any more.
                self._cache.drop(_holder(wanted), (wanted.encoder_input,))
                if not calls:
                    del self._encoding[wanted.digest]
        for tenant, queue in list(self._waiting.items()):
            for wanted in [wanted for wanted in queue if wanted.number == number]:
                self._remove(tenant, wanted)
        return self._begin_next()

    def encoded(self, digest: str) -> Answers:
        """The rows of an input are there, and the cache knows it."""
        answers: list[tuple[WantedRows, Exception | None]] = []
        for wanted in self._encoding.pop(digest, ()):
            self._hold(wanted)
            answers.append((wanted, None))
        return [*answers, *self._begin_next()]

    def failed(self, digest: str, error: Exception) -> Answers:
        """An input can't be encoded, and the cache knows it."""
        answers = [(wanted, error) for wanted in self._encoding.pop(digest, ())]
        return [*answers, *self._begin_next()]

    def _begin_next(self) -> Answers:
        """Have the next input encoded, if none is."""
        answers: list[tuple[WantedRows, Exception | None]] = []
        while self._waiting and not self._encoding:
            tenant = min(self._waiting, key=self._given_to)
            wanted = self._waiting[tenant][0]
            if self._hold(wanted):
                # Another node's call for it had its turn meanwhile.
                self._remove(tenant, wanted)
                answers.append((wanted, None))
            elif self._cache.awaits(wanted.digest):
                self._remove(tenant, wanted)
                self._encoding[wanted.digest] = [wanted]
                self._charge(tenant, wanted.encoder_input.num_rows)
            else:
                # The rows that are being read leave no room.
                break
        return answers

    def _hold(self, wanted: WantedRows) -> bool:
        """Whether the rows are there, which are held then. Otherwise they are made, if there is room for them."""
        is_there = self._cache.hold_for_chunk(_holder(wanted), (wanted.encoder_input,), 0, 1) > 0
        if is_there:
            self._held[wanted.number] = wanted
        return is_there

    def _given_to(self, tenant: str) -> int:
        return max(self._base, self._given.get(tenant, 0))

    def _charge(self, tenant: str, num_rows: int) -> None:
        self._base = self._given_to(tenant)
        self._given[tenant] = self._base + num_rows
        self._given = {name: given for name, given in self._given.items() if given > self._base}

    def _remove(self, tenant: str, wanted: WantedRows) -> None:
        self._waiting[tenant].remove(wanted)
        if not self._waiting[tenant]:
            del self._waiting[tenant]

    def _why_full(self, wanted: WantedRows) -> str:
        own = self._waiting.get(wanted.tenant, ())
        everybody = [each for queue in self._waiting.values() for each in queue]
        share = 4 if wanted.tenant else 1
        for whose, calls, most, most_bytes in (
            ("of this tenant ", own, self._most_waiting // share, self._most_bytes // share),
            ("", everybody, self._most_waiting, self._most_bytes),
        ):
            num_bytes = sum(each.num_bytes for each in calls) + wanted.num_bytes
            if len(calls) >= most or num_bytes > most_bytes:
                return f"{len(calls)} inputs {whose}wait for the encoder, and with this one {num_bytes} bytes"
        return ""


def _holder(wanted: WantedRows) -> str:
    """The name under which a call holds rows."""
    return f"rows-{wanted.number}"
