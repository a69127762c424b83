"""A beam search in the engine: which requests compute its beams, and the output that its client gets.

A request that has computed its beam is parked: it gives up its seat at once, since other beams may need the seat. When
the search advances, the best beam that continues the parked one becomes its heir: the same request, in the same blocks,
with one more token. The other continuations are forked: they share the full blocks and copy the block to which they
would write. A beam that gets no seat in the next step loses its blocks (see SchedulerState.free_parked) and recomputes
them later, so that a search can't starve itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from baton.engine.batch import EngineCoreOutput
from baton.engine.request import Request
from baton.engine.sequences.beam_search import BeamSearch
from baton.engine.sequences.sequence_group import beam_id, sequence_id
from baton.messages.node import Outcome

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
        self.search.advance([self._likeliest[one.request_id] for one in self._by_place])
        return True

    def next_requests(self) -> list[Request]:
        """The requests that compute the next step, best beam first."""
        requests: list[Request] = []
        for place, beam in enumerate(self.search.running):
            parent = self._by_place[beam.parent]
            # The root stands for the search towards the client, so it stays as it is.
            is_heir = parent is not self.root and parent not in requests
            requests.append(parent if is_heir else self._fork(place, parent))
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
            sequence_id(root.request_id, index),
            token_ids,
            0,
            outcome=Outcome.STOP if is_stop else Outcome.LENGTH,
            stop_reason=last if is_stop and not is_eos else None,
            num_cached_tokens=root.num_cached_tokens,
            num_external_tokens=root.num_external_tokens,
        )

    def _begin(self, requests: Sequence[Request]) -> None:
        self._by_place = requests
        self._likeliest = {}
        self.members = list(requests)

    def _fork(self, place: int, parent: Request) -> Request:
        root = self.root
        request = root.sibling(beam_id(root.request_id, self.search.length, place), root.sampling_params)
        request.output_token_ids = list(parent.output_token_ids)
        request.block_hashes = list(parent.block_hashes)
        request.beams = self
        request.parent_id = parent.request_id
        return request
