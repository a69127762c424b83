"""Drafts in simulations: how often they are right is given, and at which tokens follows from the seed.

Whether a drafted token is right depends on seed, request and position alone: not on the node, the attempt or the length
of the draft. So a larger share of right drafts only adds right positions, and two simulations that differ in anything
else have the same text. The drafts take their way through the real scheduler, which allocates their blocks, fits them
into the token budget and takes the wrong ones back. Their lengths are adapted by the engine's own `DraftLength`, at the
price that its `StepCost` finds in the simulated steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import xxhash

from baton.bench.simulator.prompt import TOKEN
from baton.engine.request import Request, RequestStatus
from baton.engine.speculation.request_drafts import PAUSE_OF_MODEL, SHARE_OF_MODEL, DraftLength
from baton.engine.speculation.speculation import LEAST_PRICE
from baton.engine.speculation.step_cost import StepCost
from baton.errors import InvalidRequest
from baton.messages.speculation import MAX_DRAFTS, SpeculationConfig

_OF_DRAFT, _OF_TEXT = 0, 1
"""What a random number decides: whether a drafted token is right, and whether there is something to draft."""


@dataclass(frozen=True, slots=True)
class SimulatedSpeculation:
    """How nodes draft tokens. Raises InvalidRequest, which names the command's option, for a number out of bounds."""

    share: float
    """The share of drafted tokens that are right, if all tokens before them in their draft are; 0 to 1."""
    num_speculative_tokens: int = SpeculationConfig().num_speculative_tokens
    """The most drafted tokens of one request in one step."""
    coverage: float = 1.0
    """The share of steps of a request before which there is something to draft, 0 to 1: a text repeats itself only in
    places."""
    row_ms: float | None = None
    """Time that a drafted token adds to a step; None: as much as one more sequence."""
    adapts: bool = True
    """Whether the length of drafts adapts to how often they are right; if not, all are as long as they may be."""

    def __post_init__(self) -> None:
        for name, share in (("--draft-share", self.share), ("--draft-coverage", self.coverage)):
            if not 0.0 <= share <= 1.0:
                raise InvalidRequest(name, f"must be from 0 to 1, not {share:g}")
        if not 1 <= self.num_speculative_tokens <= MAX_DRAFTS:
            raise InvalidRequest("--draft-tokens", f"must be from 1 to {MAX_DRAFTS}, not {self.num_speculative_tokens}")
        if self.row_ms is not None and not 0.0 <= self.row_ms < math.inf:
            raise InvalidRequest("--draft-row-ms", f"must be a duration, not {self.row_ms:g}")


@dataclass(slots=True)
class DraftTotals:
    """What became of the drafts of a simulation, or of a real node's steps."""

    num_decodes: int = 0
    """Sequences that decoded, over all steps."""
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def add(self, other: DraftTotals) -> None:
        """Add the totals of another node, cell or step."""
        self.num_decodes += other.num_decodes
        self.num_drafts += other.num_drafts
        self.num_draft_tokens += other.num_draft_tokens
        self.num_accepted_tokens += other.num_accepted_tokens

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a sequence got from a step on average."""
        return 1.0 + self.num_accepted_tokens / self.num_decodes if self.num_decodes else 1.0


class SimulatedDrafts:
    """The drafts of one node's requests."""

    def __init__(self, speculation: SimulatedSpeculation, seed: int) -> None:
        self._speculation = speculation
        self._seed = seed
        self._cost = StepCost()
        self._price = LEAST_PRICE
        self._lengths: dict[str, DraftLength] = {}
        """By the ids that the scheduler knows."""
        self._asked_at: dict[str, int] = {}
        """How many output tokens a request had when a draft was last made, or not made, for it."""
        self.row_s = None if speculation.row_ms is None else speculation.row_ms / 1e3
        """Time that a drafted token adds to a step, in seconds; None: as much as one more sequence."""
        self.totals = DraftTotals()

    def note_step(self, num_rows: int, seconds: float) -> None:
        """Note the duration of a step that computed so many tokens of decoding sequences, and nothing else."""
        self._cost.add(num_rows, seconds)

    def propose(self, requests: Iterable[tuple[str, Request]]) -> dict[str, Sequence[int]]:
        """Draft tokens before a step is decided. `requests`: the names of texts, and the requests that have them.

        Once for each step of a request: before a step that computes others alone it keeps its draft, or goes without.
        """
        decoding = [(name, request) for name, request in requests if _decodes(request)]
        self._price = max(LEAST_PRICE, self._cost.price(max(1, len(decoding))))
        proposed: dict[str, Sequence[int]] = {}
        for name, request in decoding:
            request_id, num_output_tokens = request.request_id, request.num_output_tokens
            if self._asked_at.get(request_id) == num_output_tokens:
                continue
            self._asked_at[request_id] = num_output_tokens
            count = self._length(name, request)
            if count > 0:
                proposed[request_id] = [TOKEN] * count
        return proposed

    def verify(self, name: str, request: Request, num_drafted: int) -> int:
        """How many leading tokens of a draft are right. The request is as it was when they were drafted."""
        first, share = request.num_output_tokens, self._speculation.share
        num_right = 0
        while num_right < num_drafted and self._chance(name, first + num_right, _OF_DRAFT) < share:
            num_right += 1
        length = self._lengths.get(request.request_id)
        if length is not None:
            length.verified(num_drafted, num_right, self._price)
        totals = self.totals
        totals.num_drafts += 1
        totals.num_draft_tokens += num_drafted
        totals.num_accepted_tokens += num_right
        return num_right

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._lengths.pop(request_id, None)
        self._asked_at.pop(request_id, None)

    def _length(self, name: str, request: Request) -> int:
        """How many tokens to draft for a request now."""
        speculation = self._speculation
        coverage = speculation.coverage
        if coverage < 1.0 and self._chance(name, request.num_output_tokens, _OF_TEXT) >= coverage:
            return 0
        most = speculation.num_speculative_tokens
        if not speculation.adapts:
            return most
        length = self._lengths.get(request.request_id)
        if length is None:
            length = self._lengths[request.request_id] = DraftLength(most, PAUSE_OF_MODEL, SHARE_OF_MODEL)
        return length.next(self._price)

    def _chance(self, name: str, position: int, of: int) -> float:
        """A random number from 0 up to 1 that belongs to an output position of a text."""
        return (xxhash.xxh3_64_intdigest(f"{name} {position} {of}".encode(), seed=self._seed) >> 11) / (1 << 53)


def _decodes(request: Request) -> bool:
    """Whether the request's next step computes its last token and nothing else."""
    return request.status is RequestStatus.RUNNING and request.num_computed_tokens == request.num_tokens - 1


def num_tokens_of(drafts: Mapping[str, Sequence[int]]) -> int:
    """The number of tokens of all drafts of a step."""
    return sum(map(len, drafts.values()))
