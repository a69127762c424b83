"""Several sequences of one request, which share its prompt and have outputs of their own.

Each sequence is a `Request` of the engine. The submitted request is sequence 0; the others are created when its prompt
has been computed (or has arrived), so a prompt is computed or transferred once.

A request gets at most half of the seats (`most_at_once`). Its other sequences are held back, and each is queued
behind all that waits when an earlier one ends. So a request of 128 sequences delays others no more than several clients
with one request each do.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from baton.engine.request import Request, RequestStatus

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def sequence_id(request_id: str, index: int) -> str:
    """The engine's own id of a sequence, which nobody reads: `Request.root_id` and `sequence_index` say the same.

    Sequence 0 has the request's own id; no request id contains a tilde.
    """
    return f"{request_id}~{index}" if index else request_id


def sequence_seed(seed: int, index: int) -> int:
    """The 64-bit seed of one sequence, a function of the request's seed and the index; sequence 0 has the request's.

    The steps are those of splitmix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators").
    """
    if index == 0:
        return seed
    value = (seed + index * _GOLDEN) & _MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31


def most_at_once(max_num_seqs: int) -> int:
    """How many sequences of one request may have a seat, or wait for one, in an engine with so many seats."""
    return max(2, max_num_seqs // 2)


class SequenceGroup:
    """The sequences of one request inside one engine. Only the scheduler writes to it."""

    def __init__(self, root: Request, max_num_seqs: int) -> None:
        """`root`: the request as it was submitted, sequence 0. `max_num_seqs`: the seats of the engine."""
        self.root = root
        self.members = [root]
        """The sequences that have not ended, in the order of their indices."""
        self.held: dict[str, Request] = {}
        """The members that are held back: they are in no queue. In the order of their indices."""
        self.is_forked = False
        self._most_at_once = most_at_once(max_num_seqs)

    @property
    def request_id(self) -> str:
        return self.root.request_id

    def fork(self) -> list[Request]:
        """Create the other sequences, without blocks, and hold them back; see `take_due`.

        Call once, when the prompt's KV is computed or has arrived.
        """
        self.is_forked = True
        children = [self._child(index) for index in range(1, self.root.sampling_params.n)]
        self.members += children
        self.held = {child.request_id: child for child in children}
        return children

    @property
    def has_due(self) -> bool:
        """Whether `take_due` has a sequence to return."""
        return bool(self.held) and len(self.members) - len(self.held) < self._most_at_once

    def take_due(self) -> list[Request]:
        """The sequences that are held back no longer, and are to be queued now."""
        due: list[Request] = []
        while self.has_due:
            due.append(self.held.pop(next(iter(self.held))))
        return due

    def leave(self, request: Request) -> None:
        """Forget a sequence that has ended."""
        self.members.remove(request)
        self.held.pop(request.request_id, None)

    def running_sibling(self, request: Request, decoding: Collection[str]) -> Request | None:
        """Another running sequence, preferably one of `decoding`: those have the KV of the whole prompt.

        Its rotary angles are the same, which those of a sequence that has grown long are not.
        """
        running = [
            m
            for m in self.members
            if m is not request and m.status is RequestStatus.RUNNING and m.is_long == request.is_long
        ]
        return next((m for m in running if m.request_id in decoding), running[0] if running else None)

    @property
    def all_run(self) -> bool:
        """Whether all sequences run, so that none still has to take over the KV that another one computed."""
        return (
            self.is_forked and not self.held and all(member.status is RequestStatus.RUNNING for member in self.members)
        )

    def member(self, index: int) -> Request | None:
        """The sequence with this index if it has not ended; None before the sequences are forked."""
        return next((m for m in self.members if self.is_forked and m.sequence_index == index), None)

    def _child(self, index: int) -> Request:
        root = self.root
        # The prompt is computed, and what is reported of it, for the first sequence.
        seed = sequence_seed(root.sampling_params.seed, index)
        params = replace(root.sampling_params, seed=seed, prompt_logprobs=None)
        child = root.sibling(sequence_id(root.request_id, index), params, sequence_index=index)
        child.group = self
        child.matchers = root.matchers[index : index + 1]
        return child
