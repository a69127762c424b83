"""A beam search in the engine: which requests compute its beams, and what its client gets.

A beam that goes on is a new request, forked from the one that it continues. That one has done its part with a single
step: it gives up its seat at once and its blocks when its successors have had a chance to share them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from baton.engine.beam_search import BeamSearch
from baton.engine.outputs import EngineCoreOutput
from baton.engine.request import FinishReason, Leg, Request
from baton.engine.sequence_group import beam_id, sequence_id

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
        self.is_closed = False
        """The client has been told how it ended."""
        self._num_returned = params.n
        root.sampling_params = replace(params, temperature=0.0, logprobs=self.search.num_candidates)
        self._beams = {root.request_id: 0}
        self._likeliest: dict[int, Sequence[tuple[int, float]]] = {}
        self._parents: Sequence[Request] = (root,)
        self._num_steps = 0

    @property
    def request_id(self) -> str:
        return self.root.request_id

    def again_from_prompt(self) -> Request:
        """The prompt arrived from elsewhere, but not what may follow it: compute that from its last token."""
        return self._next([((), 0)])[0]

    def take(self, request: Request, likeliest: Sequence[tuple[int, float]]) -> bool:
        """What may follow a beam; whether the step is complete and the search went on to the next one."""
        self.members.remove(request)
        self._likeliest[self._beams[request.request_id]] = likeliest
        if self.members:
            return False
        self.search.advance([self._likeliest[index] for index in range(len(self.search.running))])
        return True

    def next_requests(self) -> list[Request]:
        """The requests that compute the next step."""
        return self._next([(beam.token_ids, beam.parent) for beam in self.search.running])

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
            finish_reason=FinishReason.STOP if is_stop else FinishReason.LENGTH,
            stop_reason=last if is_stop and not is_eos else None,
            num_cached_tokens=root.num_cached_tokens,
            num_external_tokens=root.num_external_tokens,
        )

    def _next(self, beams: Sequence[tuple[tuple[int, ...], int]]) -> list[Request]:
        self._num_steps += 1
        parents = self._parents
        requests = [self._continue(index, tokens, parents[parent]) for index, (tokens, parent) in enumerate(beams)]
        self._beams = {request.request_id: index for index, request in enumerate(requests)}
        self._likeliest = {}
        self._parents = requests
        self.members = list(requests)
        return requests

    def _continue(self, index: int, token_ids: Sequence[int], parent: Request) -> Request:
        root = self.root
        request = Request(
            beam_id(root.request_id, self._num_steps, index),
            root.prompt_token_ids,
            root.sampling_params,
            eos_token_ids=root.eos_token_ids,
            client_index=root.client_index,
            priority=root.priority,
            arrival_time=root.arrival_time,
            cache_salt=root.cache_salt,
            leg=Leg.WHOLE,
        )
        request.prompt_token_ids = root.prompt_token_ids
        request.output_token_ids = list(token_ids)
        request.block_hashes = list(parent.block_hashes)
        request.beams = self
        request.parent_id = parent.request_id
        return request
