"""The fake of `GenerationHandler`: the operations of a router that the gRPC service calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from baton.messages.generation import (
    Accepted,
    Chunk,
    Finished,
    GenerateEvent,
    GenerateRequest,
    ModelCard,
    Path,
    TakeChunk,
)
from baton.messages.operator import ClusterStatus
from baton.messages.pooling import EmbedRequest, EmbedResponse, EmbedResult

FINISHED = Finished("length", None, 3, 2, 0, 1.0, 2.0, 3.0, 4.0, 5.0, 6, Path("p", "d", 1, "least loaded pair"))


class FakeGenerationHandler:
    """Answers each request with the same events. While `error` is set, all operations raise it."""

    def __init__(self, error: Exception | None = None, *events_before_error: GenerateEvent) -> None:
        self.error = error
        self.events_before_error = events_before_error
        """Events that `generate` yields before it raises the error."""
        self.events: list[GenerateEvent] = [Accepted("r", 5, 3), Chunk(0, [7, 8], "ab", []), FINISHED]
        """Events that `generate` yields if there is no error."""
        self.endless = False
        """Whether `generate` yields chunks for ever after `events`."""
        self.may_end = asyncio.Event()
        """Set by default. While a test has cleared it, streams do not end."""
        self.may_end.set()
        self.closed = asyncio.Event()
        """Set when a stream of `generate` has ended or was closed."""
        self.requests: list[object] = []
        """The requests of `generate` and the request ids of `cancel`, in order."""
        self.offered: Sequence[Chunk] = ()
        """Chunks that are yielded only if the caller does not take them directly."""
        self.num_refused = 0
        """Number of offered chunks that the caller did not take directly."""

    def _maybe_raise(self) -> None:
        if self.error is not None:
            raise self.error

    async def generate(
        self, request: GenerateRequest, timeout_s: float | None, take: TakeChunk | None = None
    ) -> AsyncGenerator[GenerateEvent, None]:
        self.requests.append(request)
        try:
            if self.error is not None:
                for event in self.events_before_error:
                    yield event
                raise self.error
            for event in self.events:
                yield event
            for offered in self.offered:
                if take is None or not take(offered):
                    self.num_refused += 1
                    yield offered
            await self.may_end.wait()
            index = 2
            while self.endless:
                yield Chunk(index, (1,) * 1000, "x" * 1000)
                index += 1000
        finally:
            self.closed.set()

    def resume(
        self,
        request_id: str,
        next_token_index: Sequence[int],
        timeout_s: float | None,
        take: TakeChunk | None,
        call: int,
    ) -> AsyncGenerator[GenerateEvent, None]:
        raise NotImplementedError("no test resumes a request here")

    async def cancel(self, request_id: str) -> None:
        self._maybe_raise()
        self.requests.append(request_id)

    async def tokenize(self, model: str, text: str) -> Sequence[int]:
        self._maybe_raise()
        return [len(text)]

    async def detokenize(self, model: str, token_ids: Sequence[int]) -> str:
        self._maybe_raise()
        return str(list(token_ids))

    async def embed(self, request: EmbedRequest, timeout_s: float | None) -> EmbedResponse:
        """The length of each input, as its vector."""
        self._maybe_raise()
        self.requests.append(request)
        results = [EmbedResult([float(len(one.prompt or ""))], request.task.value) for one in request.inputs]
        return EmbedResponse(request.request_id, results, len(results))

    def list_models(self) -> Sequence[ModelCard]:
        self._maybe_raise()
        return [ModelCard("m", 64, 300)]

    def status(self) -> ClusterStatus:
        """The status of the cluster, so that this class can also serve as the `OperatorHandler`."""
        self._maybe_raise()
        return ClusterStatus("c", "ok", "", ())
