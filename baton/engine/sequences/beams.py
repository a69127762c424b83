"""Beam search: the search over one request as pure decisions, and the engine's requests that compute its beams.

The rules are those of transformers' `generate(num_beams=..., do_sample=False)`, so that the results are equal. A step
considers the best `num_candidates` continuations of all beams. Those that end the sequence are finished if they are
among the best `width`; of the others, the best `width` run on. A finished beam is scored by its log-probability divided
by its length to the power of `length_penalty`. A beam is stored as one token and a link to the beam that it continues,
so the cost of a step does not depend on length.

A request that has computed its beam is parked: it gives up its seat at once, since other beams may need the seat. When
the search advances, the best beam that continues the parked one becomes its heir: the same request, in the same blocks,
with one more token. The other continuations are forked: they share the full blocks and copy the block to which they
would write. A beam that gets no seat in the next step loses its blocks (see SchedulerState.free_parked) and recomputes
them later, so that a search can't starve itself.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace

from baton.engine.batch import EngineCoreOutput
from baton.engine.request import Request
from baton.messages.node import Outcome


@dataclass(frozen=True, slots=True, eq=False)
class Beam:
    """Output tokens and their score: the sum of their log-probabilities, length-penalised in a finished beam."""

    before: Beam | None = field(repr=False)
    """The beam that this one continues; None for the beam without tokens."""
    token_id: int
    """The last token."""
    score: float
    parent: int = 0
    """The index of `before` in `BeamSearch.running`."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens of the beam."""
        token_ids, beam = [], self
        while beam.before is not None:
            token_ids.append(beam.token_id)
            beam = beam.before
        return tuple(reversed(token_ids))


class BeamSearch:
    """One search. It is over at the maximum length, or when no running beam can beat the finished ones."""

    def __init__(
        self,
        width: int,
        stop_ids: Set[int],
        max_tokens: int,
        *,
        length_penalty: float = 1.0,
        early_stopping: bool = False,
    ) -> None:
        """`early_stopping`: the search is over as soon as `width` beams are finished."""
        self.running: Sequence[Beam] = (Beam(None, -1, 0.0),)
        """Beams that may be continued, best first."""
        self.length = 0
        """Tokens of each running beam."""
        self.finished: Sequence[Beam] = ()
        """Beams that have ended, best first."""
        self.is_over = False
        self._width = width
        self._stop_ids = stop_ids
        self._max_tokens = max_tokens
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping

    @property
    def num_candidates(self) -> int:
        """How many of each beam's likeliest tokens a step needs: enough to continue even if all stop tokens are among
        them."""
        return max(2, 1 + len(self._stop_ids)) * self._width

    def advance(self, continuations: Sequence[Sequence[tuple[int, float]]]) -> None:
        """Advance by one step.

        `continuations`: (token id, log-probability) of the likeliest tokens of each running beam, best first.
        """
        candidates = [
            Beam(beam, token_id, beam.score + logprob, parent)
            for parent, (beam, likeliest) in enumerate(zip(self.running, continuations, strict=True))
            for token_id, logprob in likeliest
        ]
        candidates.sort(key=_score, reverse=True)
        del candidates[self.num_candidates :]
        self.length += 1
        ends = [self.length >= self._max_tokens or beam.token_id in self._stop_ids for beam in candidates]
        divisor = self.length**self._length_penalty
        ended = [
            replace(beam, score=beam.score / divisor)
            for beam, is_end in zip(candidates[: self._width], ends, strict=False)
            if is_end
        ]
        self.finished = sorted((*self.finished, *ended), key=_score, reverse=True)[: self._width]
        self.running = [beam for beam, is_end in zip(candidates, ends, strict=True) if not is_end][: self._width]
        self.is_over = not self.running or (self._is_full and not self._may_improve(divisor))

    @property
    def _is_full(self) -> bool:
        return len(self.finished) == self._width

    def _may_improve(self, divisor: float) -> bool:
        return not self._early_stopping and self.running[0].score / divisor > self.finished[-1].score


def _score(beam: Beam) -> float:
    return beam.score


MIN_BEAMS, MAX_BEAMS = 2, 8


class BeamGroup:
    """The beams of one request inside one engine. Only the scheduler writes to it."""

    def __init__(self, root: Request, max_model_len: int) -> None:
        """`root`: the request as it was submitted. It computes the prompt, and outputs are reported under its id."""
        params = root.sampling_params
        self.root = root
        self.search = BeamSearch(
            params.beam_width,
            root.stop_ids,
            min(params.max_tokens, max_model_len - root.num_prompt_tokens),
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
        )
        self.members = [root]
        """Requests whose beam is still to be computed in this step."""
        self.computed: list[Request] = []
        """Requests whose beam was computed in this step; after `next_requests`, those of them without an heir."""
        self.is_closed = False
        """Whether the end of the search has been reported to the client."""
        self._num_returned = params.n
        root.sampling_params = replace(params, temperature=0.0, logprobs=self.search.num_candidates)
        self._by_place: Sequence[Request] = (root,)
        """The request of each running beam, in the order of `BeamSearch.running`."""
        self._likeliest: dict[str, Sequence[tuple[int, float]]] = {}

    @property
    def request_id(self) -> str:
        return self.root.request_id

    def restart_from_prompt(self) -> Request:
        """A request that computes the last prompt token again, for its likeliest successors: arrived KV lacks those."""
        request = self._fork(0, self.root)
        self.computed = [self.root]
        self._begin([request])
        return request

    def add_continuations(self, request: Request, likeliest: Sequence[tuple[int, float]]) -> bool:
        """Add the likeliest continuations of a computed beam. Returns whether this completed the search's step."""
        self.members.remove(request)
        self.computed.append(request)
        self._likeliest[request.request_id] = likeliest
        if self.members:
            return False
        self.search.advance([self._likeliest[beam.request_id] for beam in self._by_place])
        return True

    def next_requests(self) -> list[Request]:
        """The requests that compute the next step, best beam first."""
        requests: list[Request] = []
        for index, beam in enumerate(self.search.running):
            parent = self._by_place[beam.parent]
            # The root stands for the search towards the client, so it stays as it is.
            is_heir = parent is not self.root and parent not in requests
            requests.append(parent if is_heir else self._fork(index, parent))
        # Only after all forks are made, since they copy the tokens that their parents have computed.
        for request, beam in zip(requests, self.search.running, strict=True):
            request.output_token_ids.append(beam.token_id)
        self.computed = [request for request in self.computed if request not in requests]
        self._begin(requests)
        return requests

    def outputs(self) -> list[EngineCoreOutput]:
        """The best sequences, best first; fewer than requested if the search found fewer."""
        best = self.search.finished[: self._num_returned]
        return [self._output(index, list(beam.token_ids)) for index, beam in enumerate(best)]

    @property
    def num_returned(self) -> int:
        return self._num_returned

    def _output(self, index: int, token_ids: list[int]) -> EngineCoreOutput:
        root, last = self.root, token_ids[-1]
        is_stop = last in root.stop_ids
        is_eos = last in root.eos_token_ids and not root.sampling_params.ignore_eos
        return EngineCoreOutput(
            root.attempt,
            token_ids,
            0,
            sequence_index=index,
            outcome=Outcome.STOP if is_stop else Outcome.LENGTH,
            stop_reason=last if is_stop and not is_eos else None,
            num_cached_tokens=root.num_cached_tokens,
            num_external_tokens=root.num_external_tokens,
        )

    def _begin(self, requests: Sequence[Request]) -> None:
        self._by_place = requests
        self._likeliest = {}
        self.members = list(requests)

    def _fork(self, index: int, parent: Request) -> Request:
        root = self.root
        request = root.sibling(f"{root.request_id}~0^{self.search.length}.{index}", root.sampling_params)
        request.output_token_ids = list(parent.output_token_ids)
        request.block_hashes = list(parent.block_hashes)
        request.beams = self
        request.parent_id = parent.request_id
        return request
