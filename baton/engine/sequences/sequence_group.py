"""Several sequences of one request: they share its prompt, and each has tokens of its own.

Each sequence is a `Request` to the engine. The one that was submitted is sequence 0; the others come to be when its
prompt has been computed (or has arrived), so whatever happens to a prompt happens once.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from baton.engine.request import Request, RequestStatus

MAX_SEQUENCES = 8
"""Of one request."""

_MARK = "~"
"""Between a request's id and a sequence's index; no request id contains it."""
_BEAM_MARK = "^"
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def sequence_id(request_id: str, index: int) -> str:
    """The engine's id of a sequence. Sequence 0 has the request's own."""
    return f"{request_id}{_MARK}{index}" if index else request_id


def lone_sequence_id(request_id: str, index: int) -> str:
    """Names one sequence where the request's own id would name all of them."""
    return f"{request_id}{_MARK}{index}"


def split_sequence_id(engine_id: str) -> tuple[str, int]:
    """(request id, sequence index) of an engine's id."""
    request_id, mark, index = engine_id.partition(_MARK)
    return request_id, int(index.partition(_BEAM_MARK)[0]) if mark else 0


def beam_id(request_id: str, step: int, index: int) -> str:
    """The engine's id of the beams that one request computes; to everybody else it is part of sequence 0.

    `step`, `index`: how many tokens the first of them had, and its place among those that ran then.
    """
    return f"{request_id}{_MARK}0{_BEAM_MARK}{step}.{index}"


def sequence_seed(seed: int, index: int) -> int:
    """The seed of a request's sequence, 64 bits: a function of both alone, and of sequence 0 the request's own.

    The steps are those of splitmix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators").
    """
    if index == 0:
        return seed
    value = (seed + index * _GOLDEN) & _MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31


class SequenceGroup:
    """The sequences of one request inside one engine. Only the scheduler writes to it."""

    def __init__(self, root: Request) -> None:
        """`root`: the request as it was submitted, sequence 0."""
        self.root = root
        self.members = [root]
        """Those that have not ended, by index."""
        self.is_forked = False

    @property
    def request_id(self) -> str:
        return self.root.request_id

    def fork(self) -> list[Request]:
        """The other sequences, new and without blocks; call once, when the prompt's KV is known to be there."""
        self.is_forked = True
        children = [self._child(index) for index in range(1, self.root.sampling_params.n)]
        self.members += children
        return children

    def running_sibling(self, request: Request, decoding: Collection[str]) -> Request | None:
        """Another member that runs, best one of `decoding` (it has the whole prompt's KV, from an earlier step)."""
        running = [m for m in self.members if m is not request and m.status is RequestStatus.RUNNING]
        return next((m for m in running if m.request_id in decoding), running[0] if running else None)

    @property
    def all_run(self) -> bool:
        """Whether nobody is to come who would share what another one computed."""
        return self.is_forked and all(member.status is RequestStatus.RUNNING for member in self.members)

    def member(self, index: int) -> Request | None:
        """A live sequence, once they have been forked."""
        engine_id = sequence_id(self.request_id, index)
        return next((m for m in self.members if self.is_forked and m.request_id == engine_id), None)

    def _child(self, index: int) -> Request:
        root = self.root
        params = replace(root.sampling_params, seed=sequence_seed(root.sampling_params.seed, index))
        child = root.sibling(sequence_id(root.request_id, index), params)
        child.group = self
        child.matchers = root.matchers[index : index + 1]
        return child
