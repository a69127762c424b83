"""The sender's side of join probes: known bytes for readers that have not read its memory yet. Pure: a clock and chance
go in, effects come out.

The rules that it keeps:

1. The bytes are new whenever no other reader is reading them, and in memory only once they are said to be: what a
   reader finds there was written under the registration through which it reads. Readers that are probing at the same
   time share them, so that none waits for another. For one that reads them as a block of another group of layers the
   same bytes are written again, with the digests of that group.
2. A probe has passed when the reader says so with the digest of these bytes. Otherwise its link ends, with the cause
   PROBE_FAILED, and the condition is shown until a probe of the reader passes, or its process is known to be gone.
   Readers try again within a minute or so: the condition of one that is not heard of for `kept_s` goes, too.
3. While a probe is open, the transfer agent makes progress. That ends with the result, with the link, or after
   `patience_s`.
4. Late and unknown results change nothing and are counted.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from baton.clock import Clock
from baton.messages.node_report import FailedProbe, ProbeFault
from kv_transfer.link.failures import MAX_DETAIL_CHARS, FailedProbes, count_outcome
from kv_transfer.link.link_messages import AskProbe, ProbeReady, ProbeResult
from kv_transfer.sender.lease_values import TellReader

_MAX_FAILURES = 1024
"""Readers name themselves, so the number of failures that are kept is bounded."""


@dataclass(frozen=True, slots=True)
class FillProbe:
    """Fill this block with the bytes of the seed; `filled` or `fill_failed` answers with the id."""

    fill_id: int
    block: int
    seed: str
    group: int = 0
    """The group of layers as a block of which the bytes are digested."""


@dataclass(frozen=True, slots=True)
class FailLink:
    """End this link with the cause PROBE_FAILED and these words."""

    link: int
    detail: str


OfferEffect = TellReader | FillProbe | FailLink


@dataclass(frozen=True, slots=True)
class ProbePatience:
    """Bounds of the sender's waits, in seconds."""

    patience_s: float = 60.0
    """How long a probe may be open while the link lives. The reader gives it up much earlier."""
    kept_s: float = 180.0
    """How long a failure is shown that is not repeated: three times the longest pause of a reader."""


@dataclass(slots=True)
class _Reader:
    node_id: str
    incarnation: str
    probe: int
    group: int
    parts: int
    until: float
    told_digest: int | None = None
    """Digest of the bytes that it was told to read; None before."""


class ProbeOffers:
    """All probes of one sender. Every method returns at once with the effects, in order. Links are numbered."""

    def __init__(
        self,
        node_id: str,
        incarnation: str,
        block: int | None,
        clock: Clock,
        patience: ProbePatience | None = None,
        new_nonce: Callable[[], str] = secrets.token_hex,
        num_groups: int = 1,
    ) -> None:
        """`block`: the probe block to be used; None: there is none. `new_nonce`: returns text that it never returned
        before, and that nobody can guess. `num_groups`: groups of layers of the model."""
        self._node_id = node_id
        self._incarnation = incarnation
        self._block = block
        self._clock = clock
        self._patience = patience or ProbePatience()
        self._new_nonce = new_nonce
        self._num_groups = num_groups
        self._readers: dict[int, _Reader] = {}
        """Readers with an open probe, by link."""
        self._asked: dict[int, set[int]] = {}
        """The groups for which a probe was asked for on each open link."""
        self._fill_id = 0
        """The latest filling of the block."""
        self._is_filling = False
        self._filling_group = 0
        self._seed = ""
        """The seed of the latest bytes."""
        self._digests: dict[int, Mapping[int, int]] = {}
        """Digests of these bytes, by group, once the block is filled with them: of its last part, by their number."""
        self._failed = FailedProbes(clock, self._patience.kept_s, _MAX_FAILURES)
        self.outcomes: Counter[tuple[str, str]] = Counter()
        """Probes that ended, by reader and outcome: "passed", or the fault."""
        self.counters: Counter[str] = Counter()
        """Messages and events that changed nothing, by kind."""

    @property
    def num_open(self) -> int:
        """Probes that are not over: so many readers may be reading known bytes."""
        return len(self._readers)

    def asked(self, link: int, node_id: str, incarnation: str, message: AskProbe, parts: int = 1) -> list[OfferEffect]:
        """A reader asks for known bytes. It may ask once on each link for each group of layers, one after the other,
        since filling a block costs time.

        `parts`: how many blocks of the reader have the tokens of one here; it reads the last such part of the block.
        """
        group, asked = message.group, self._asked.setdefault(link, set())
        if link in self._readers or group in asked:
            self.counters["AskProbe_again"] += 1
            return []
        until = self._clock.monotonic() + self._patience.patience_s
        is_in_use = any(reader.told_digest is not None for reader in self._readers.values())
        reader = self._readers[link] = _Reader(node_id, incarnation, message.probe, group, parts, until)
        if self._block is None:
            return self._fail(link, ProbeFault.READ_FAILED, f"{self._node_id} has no probe blocks")
        if group >= self._num_groups:
            words = f"{self._node_id} has {self._num_groups} groups of layers, and {node_id} asks for number {group}"
            return self._fail(link, ProbeFault.READ_FAILED, words)
        asked.add(group)
        if is_in_use and group in self._digests:
            return [self._tell(link, reader, self._block)]
        if self._is_filling:
            return []
        if not is_in_use:
            self._seed, self._digests = f"{self._incarnation}/{self._new_nonce()}", {}
        return [self._fill(group, self._block)]

    def filled(self, fill_id: int, digests: Mapping[int, int]) -> list[OfferEffect]:
        """The block holds the known bytes. `digests`: of its last part, by the number of parts."""
        if fill_id != self._fill_id or not self._is_filling or self._block is None:
            self.counters["filled_unknown"] += 1
            return []
        self._is_filling, group = False, self._filling_group
        self._digests[group] = digests
        waiting = [(link, reader) for link, reader in self._readers.items() if reader.told_digest is None]
        effects = [self._tell(link, reader, self._block) for link, reader in waiting if reader.group == group]
        others = [reader.group for _, reader in waiting if reader.group != group]
        return [*effects, self._fill(others[0], self._block)] if others else [*effects]

    def fill_failed(self, fill_id: int, detail: str) -> list[OfferEffect]:
        """The block could not be filled."""
        if fill_id != self._fill_id or not self._is_filling:
            self.counters["filled_unknown"] += 1
            return []
        self._is_filling = False
        effects: list[OfferEffect] = []
        for link in [link for link, reader in self._readers.items() if reader.told_digest is None]:
            words = f"{self._node_id} could not provide known bytes: {detail}"
            effects += self._fail(link, ProbeFault.READ_FAILED, words)
        return effects

    def result(self, link: int, message: ProbeResult) -> list[OfferEffect]:
        """A reader says how its probe ended."""
        reader = self._readers.get(link)
        if reader is None or message.probe != reader.probe:
            self.counters["ProbeResult_unknown"] += 1
            return []
        if message.fault is not None:
            return self._fail(link, message.fault, message.detail)
        if message.digest != reader.told_digest:
            words = f"{reader.node_id} takes other bytes for the known ones of {self._node_id}"
            return self._fail(link, ProbeFault.WRONG_BYTES, words)
        del self._readers[link]
        self._failed.passed(reader.incarnation, reader.node_id)
        count_outcome(self.outcomes, reader.node_id, "passed")
        return []

    def link_closed(self, link: int) -> None:
        """A link has ended."""
        self._readers.pop(link, None)
        self._asked.pop(link, None)

    def reader_gone(self, incarnation: str) -> None:
        """The process of a reader has ended."""
        self._failed.forget(incarnation)

    def next_deadline(self) -> float | None:
        """When to call `tick`, on the clock; None: not before something else happens."""
        return min((reader.until for reader in self._readers.values()), default=None)

    def tick(self) -> None:
        """Wait no longer for readers that took too long."""
        now = self._clock.monotonic()
        for link in [link for link, reader in self._readers.items() if reader.until <= now]:
            del self._readers[link]

    def failures(self) -> list[FailedProbe]:
        """The latest failure of each reader; that which began to fail first comes first."""
        return self._failed.shown()

    def _fill(self, group: int, block: int) -> FillProbe:
        self._is_filling, self._filling_group = True, group
        self._fill_id += 1
        return FillProbe(self._fill_id, block, self._seed, group)

    def _tell(self, link: int, reader: _Reader, block: int) -> TellReader:
        # Readers are linked only if their blocks fit, and then there is such a digest.
        reader.told_digest = digest = self._digests[reader.group].get(reader.parts, 0)
        return TellReader(link, ProbeReady(reader.probe, block, digest))

    def _fail(self, link: int, fault: ProbeFault, detail: str) -> list[OfferEffect]:
        reader, detail = self._readers.pop(link), detail[:MAX_DETAIL_CHARS]
        self._failed.failed(reader.incarnation, reader.node_id, fault, detail)
        count_outcome(self.outcomes, reader.node_id, fault.value)
        return [FailLink(link, detail)]
