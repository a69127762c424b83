"""The synchronous client of the public service."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from types import TracebackType

from baton.rpc.generation_client import GenerationStub
from baton.rpc.messages import GenerateEvent, GenerateRequest, ModelCard


class GenerationClient:
    """Speaks to a router at HOST:PORT. Every call raises BatonErrors: Unreachable, InvalidRequest, Overloaded, ..."""

    def __init__(self, address: str) -> None:
        self._stub = GenerationStub(address)

    def generate(
        self, request: GenerateRequest, timeout_s: float | None = None
    ) -> Generator[GenerateEvent, None, None]:
        """Stream one request: Accepted, Chunks, Finished; with several sequences a SequenceFinished for each, too.

        Closing the generator early cancels the request.
        """
        return self._stub.generate(request, timeout_s)

    def cancel(self, request_id: str) -> None:
        """End a live request; raises RequestNotFound."""
        self._stub.cancel(request_id)

    def tokenize(self, text: str, model: str = "") -> Sequence[int]:
        """The token ids that `generate` would see."""
        return self._stub.tokenize(model, text)

    def detokenize(self, token_ids: Sequence[int], model: str = "") -> str:
        """Text of token ids."""
        return self._stub.detokenize(model, token_ids)

    def list_models(self) -> Sequence[ModelCard]:
        """What can be asked for."""
        return self._stub.list_models()

    def close(self) -> None:
        self._stub.close()

    def __enter__(self) -> GenerationClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
