"""One request of offline use while it runs: the router's flight and answer, over the one engine of this process."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from baton.errors import BatonError, EngineFault
from baton.messages.generation import Chunk, GenerateEvent, SequenceFinished
from baton.messages.node import Abort, NodeDescription, RequestDelta, Submit
from baton.messages.sampling import TokenLogprobs
from baton.messages.speculation import DraftCounts
from baton.offline.outputs import CompletionOutput
from router.admission.request import ValidRequest
from router.flight.answer import Answer
from router.flight.flight import Flight
from router.flight.flight_table import (
    AbortLeg,
    Delta,
    EmitPromptLogprobs,
    EmitTokens,
    Fail,
    Finish,
    FlightEffect,
    GiveUp,
    Place,
    Placed,
    SequenceEnded,
    StopStringFound,
    SubmitLeg,
)
from router.flight.text_stream import TextCodec
from router.placement.placement import Candidate, choose
from router.placement.placer import demand_of


class RunningRequest:
    """A request from its start to its end. Pure: the engine's news in, messages to the engine out."""

    def __init__(self, request: ValidRequest, codec: TextCodec, engine: NodeDescription) -> None:
        self.request = request
        self.error: BatonError | None = None
        """Why the request failed; None if it has not."""
        self.finish: Finish | None = None
        self.prompt_logprobs: Sequence[TokenLogprobs] = ()
        self._flight = Flight(request)
        self._answer = Answer(codec, request)
        self._engine = engine
        self._chunks: list[list[Chunk]] = [[] for _ in range(request.num_returned)]
        self._ends: list[tuple[str, int | str | None]] = [("", None)] * request.num_returned

    @property
    def engine_id(self) -> str:
        """The id under which the engine knows the request, once it was started."""
        return str(self._flight.key)

    @property
    def is_over(self) -> bool:
        return self._flight.is_over

    @property
    def draft_counts(self) -> DraftCounts:
        """What became of the drafts of all sequences."""
        return self._flight.draft_counts

    @property
    def _candidate(self) -> Candidate:
        """The one engine, which has the adapters of all requests."""
        return Candidate(self._engine, 0.0, 0, adapters=frozenset((self.request.adapter,)))

    def start(self) -> Sequence[Submit | Abort]:
        """What to tell the engine first. Raises InvalidRequest for a request that does not fit into its KV cache."""
        choose([self._candidate], demand_of(self.request))
        return self._perform(self._flight.start())

    def take(self, delta: RequestDelta) -> Sequence[Submit | Abort]:
        """Take a result of the engine; returns what to tell the engine now."""
        return self._perform(self._flight.handle(Delta(self._engine.incarnation, delta)))

    def outputs(self) -> Sequence[CompletionOutput]:
        """The outputs of a request that has ended without an error."""
        return [self._output(index) for index in range(len(self._chunks))]

    def _perform(self, effects: Sequence[FlightEffect]) -> Sequence[Submit | Abort]:
        messages: list[Submit | Abort] = []
        pending = deque(effects)
        while pending:
            match pending.popleft():
                case Place(attempt=1) as place:
                    placement = choose([self._candidate], demand_of(self.request), place.exclude)
                    pending.extend(self._flight.handle(Placed(placement)))
                case Place(cause=cause):
                    # There is no other engine that could do better.
                    failed = EngineFault(f"the engine gave the request up ({cause.value})")
                    pending.extend(self._flight.handle(GiveUp(failed)))
                case SubmitLeg(_, submit):
                    messages.append(submit)
                case AbortLeg(_, abort):
                    messages.append(abort)
                case EmitPromptLogprobs(positions):
                    self.prompt_logprobs = positions
                case EmitTokens() as tokens:
                    self._collect(self._answer.push(tokens))
                    if (found := self._answer.stop_string_found(tokens.sequence_index)) is not None:
                        pending.extend(self._flight.handle(StopStringFound(found, tokens.sequence_index)))
                case SequenceEnded() as ended:
                    self._collect(self._answer.end_sequence(ended))
                case Finish() as finish:
                    self._collect(self._answer.finish(finish))
                    self.finish = finish
                    if len(self._ends) == 1:
                        self._ends[0] = (self._answer.finish_reason, self._answer.stop_reason)
                case Fail(error):
                    self.error = error
        return messages

    def _collect(self, events: Sequence[GenerateEvent]) -> None:
        for event in events:
            if isinstance(event, Chunk):
                self._chunks[event.sequence_index].append(event)
            elif isinstance(event, SequenceFinished):
                self._ends[event.sequence_index] = (event.finish_reason, event.stop_reason)

    def _output(self, index: int) -> CompletionOutput:
        chunks = self._chunks[index]
        finish_reason, stop_reason = self._ends[index]
        return CompletionOutput(
            index,
            "".join(chunk.text for chunk in chunks),
            tuple(token for chunk in chunks for token in chunk.token_ids),
            finish_reason,
            stop_reason,
            tuple(position for chunk in chunks for position in chunk.logprobs),
        )
