"""A beam search in the engine: which requests compute its beams, and what its client gets.

A request that has computed its beam is parked: it gives up its seat at once, for others may need it to compute theirs.
Then the best beam that continues its own is its heir: the same request, in the same blocks, with one token more. The
others fork from it: they share its full blocks and copy what they would write to. Who finds no room in the next step
finds no blocks any more in a later one (see Ledger.free_parked) and computes them again: a search can't starve itself.
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
        """`root`: the request as it was submitted. It computes the prompt, and its id is what the client hears of."""
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
        """Requests that compute a beam and have not done so."""
        self.computed: list[Request] = []
        """Those that have done so in this step; after `next_requests`, those of them as which no beam goes on."""
        self.is_closed = False
        """The client has been told how it ended."""
        self._num_returned = params.n
        root.sampling_params = replace(params, temperature=0.0, logprobs=self.search.num_candidates)
        self._by_place: Sequence[Request] = (root,)
        """The request of each beam that runs."""
        self._likeliest: dict[str, Sequence[tuple[int, float]]] = {}

    @property
    def request_id(self) -> str:
        return self.root.request_id

    def again_from_prompt(self) -> Request:
        """The prompt arrived from elsewhere, but not what may follow it: compute that from its last token."""
        request = self._fork(0, self.root)
        self.computed = [self.root]
        self._begin([request])
        return request

    def take(self, request: Request, likeliest: Sequence[tuple[int, float]]) -> bool:
        """What may follow a beam; whether the step is complete and the search went on to the next one."""
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
            # The root is what the client hears of: it stays as it is.
            is_heir = parent is not self.root and parent not in requests
            requests.append(parent if is_heir else self._fork(place, parent))
        # Only now: the others forked from what their parents have computed.
        for request, beam in zip(requests, self.search.running, strict=True):
            request.output_token_ids.append(beam.token_id)
        self.computed = [request for request in self.computed if request not in requests]
        self._begin(requests)
        return requests

    def outputs(self) -> list[EngineCoreOutput]:
        """The best sequences, best first; fewer than asked for when the model offered fewer."""
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
