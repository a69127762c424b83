"""A client over real gRPC that records everything it receives, including the indices of tokens."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import grpc

from baton.messages.generation import Accepted, Chunk, Finished, GenerateRequest, PromptLogprobs, SequenceFinished
from baton.messages.sampling import TokenLogprobs
from baton.v1 import generation_pb2, generation_pb2_grpc
from baton.wire import status
from baton.wire.codec.generation import event_from_pb, finished_from_pb, request_to_pb

Call = grpc.aio.UnaryStreamCall[generation_pb2.GenerateRequest, generation_pb2.GenerateResponse]


@dataclass(slots=True)
class Answer:
    """Everything that a client received for one request."""

    token_ids: list[int] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    seed: int = 0
    finished: Finished | None = None
    others: dict[int, Answer] = field(default_factory=dict)
    """The answers of the sequences other than the first, by sequence index."""
    ends: dict[int, SequenceFinished] = field(default_factory=dict)
    """The end of each sequence, by sequence index, if the request has several."""

    def sequence(self, index: int) -> Answer:
        return self.others.setdefault(index, Answer()) if index else self

    @property
    def end(self) -> Finished:
        assert self.finished is not None
        return self.finished


class TokenCount:
    """Counts the tokens of each sequence as they arrive; to be passed as `on_event` to `Caller.generate`."""

    def __init__(self) -> None:
        self.by_sequence: Counter[int] = Counter()
        self._counted = asyncio.Event()

    def __call__(self, event: Accepted | Chunk) -> None:
        if isinstance(event, Chunk):
            self.by_sequence[event.sequence_index] += len(event.token_ids)
            self._counted.set()

    async def wait_for_tokens(self, num_tokens: int, num_sequences: int = 1) -> None:
        """Return once `num_sequences` sequences have at least `num_tokens` tokens each."""
        while sum(count >= num_tokens for count in self.by_sequence.values()) < num_sequences:
            self._counted.clear()
            await self._counted.wait()


class Caller:
    """Calls one router. The owner opens and closes `channel`."""

    channel: grpc.aio.Channel

    async def generate(
        self,
        request: GenerateRequest,
        timeout_s: float = 60.0,
        on_event: Callable[[Accepted | Chunk], None] = lambda event: None,
    ) -> Answer:
        """Run one request to its end. Raises the BatonError that the server reported."""
        answer = Answer()
        call = self.call(request, timeout_s)
        try:
            while isinstance(response := await call.read(), generation_pb2.GenerateResponse):
                event = event_from_pb(response)
                if isinstance(event, generation_pb2.Finished):
                    metadata = [(key, value) for key, value in await call.trailing_metadata()]
                    answer.finished = finished_from_pb(event, metadata)
                    continue
                if isinstance(event, SequenceFinished):
                    answer.ends[event.sequence_index] = event
                    continue
                if isinstance(event, PromptLogprobs):
                    assert not [*answer.prompt_logprobs, *answer.token_ids]
                    answer.prompt_logprobs = event.positions
                    continue
                if isinstance(event, Chunk):
                    own = answer.sequence(event.sequence_index)
                    own.indices += range(event.first_index, event.first_index + len(event.token_ids))
                    own.token_ids += event.token_ids
                    own.text += event.text
                    own.logprobs += event.logprobs
                else:
                    answer.seed = event.seed
                on_event(event)
        except grpc.RpcError as error:
            raise status.from_rpc_error(error, "router") from error
        finally:
            call.cancel()
        code = await call.code()
        if code is not grpc.StatusCode.OK:
            raise status.from_rpc_error(await _as_error(call), "router")
        return answer

    def call(self, request: GenerateRequest, timeout_s: float = 60.0) -> Call:
        """Start the plain gRPC call, for tests that cancel it before its end."""
        stub = generation_pb2_grpc.GenerationStub(self.channel)
        call: Call = stub.Generate(request_to_pb(request), timeout=timeout_s)
        return call


async def _as_error(call: Call) -> grpc.RpcError:
    details = await call.details()
    return grpc.aio.AioRpcError(
        await call.code(), await call.initial_metadata(), await call.trailing_metadata(), details, details
    )
