"""The streams of a simulated node that are on their way to other nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from baton.bench.simulator.attempt import Attempt
from baton.bench.simulator.handoff import HandOffNode, HandOffs
from baton.messages.node import MoveOut


@dataclass(frozen=True, slots=True)
class Cut:
    """A stream that is to end on its node now."""

    attempt: Attempt
    to: str
    """The attempt that continues it."""
    num_computed_tokens: int
    token_ids: tuple[int, ...]
    """Its tokens that the other node was not submitted with."""


class StreamsOut:
    """Offers the streams' KV, and says when they end: as on a node after a step, when all but a block is read."""

    def __init__(self, node: HandOffNode, handoffs: HandOffs, block_size: int) -> None:
        self._node = node
        self._handoffs = handoffs
        self._block_size = block_size
        self._moves: dict[str, MoveOut] = {}
        """By the attempt that is to have the stream."""
        self._read: dict[str, None] = {}
        """The attempts of which all that was offered is read, in that order."""

    def begin(self, move: MoveOut, attempt: Attempt) -> None:
        """Offer what a stream has computed so far."""
        self._moves[str(move.to)] = move
        self._handoffs.computed(self._node, str(move.to), attempt.request.num_computed_tokens)

    def read(self, to: str) -> bool:
        """All that was offered is read. Returns whether that is of a stream that moves."""
        if to in self._moves:
            self._read[to] = None
        return to in self._moves

    def forget(self, to: str) -> None:
        """The stream does not move any more."""
        self._moves.pop(to, None)
        self._read.pop(to, None)

    @property
    def is_due(self) -> bool:
        """Whether there is something to do after the next step."""
        return bool(self._read)

    def after_step(self, attempts: Mapping[str, Attempt]) -> list[Cut]:
        """The streams that end now; of others it offers what they have computed since."""
        cuts = []
        for to in list(self._read):
            move, num_read = self._moves[to], self._handoffs.num_read(to)
            attempt = attempts.get(str(move.attempt))
            if attempt is None or num_read is None or attempt.request.num_tokens >= move.cut_by:
                self.forget(to)
                continue
            request, num_computed = attempt.request, attempt.request.num_computed_tokens
            if num_computed - num_read > self._block_size:
                del self._read[to]
                self._handoffs.computed(self._node, to, num_computed)
            elif request.num_tokens > move.num_tokens:
                self.forget(to)
                new = request.output_token_ids[move.num_tokens - request.num_prompt_tokens :]
                cuts.append(Cut(attempt, to, num_computed, tuple(new)))
        return cuts
