"""The client's side of the public service, blocking."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import grpc

from baton.rpc import status
from baton.rpc.channel import CHANNEL_OPTIONS
from baton.rpc.codec_generation import event_from_pb, finished_from_pb, request_to_pb
from baton.rpc.messages import GenerateEvent, GenerateRequest, ModelCard
from baton.v1 import generation_pb2 as generation
from baton.v1 import generation_pb2_grpc

_CALL_TIMEOUT_S = 30.0


class GenerationStub:
    """Messages in and out, BatonErrors raised."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._stub = generation_pb2_grpc.GenerationStub(self._channel)

    def generate(self, request: GenerateRequest, timeout_s: float | None) -> Generator[GenerateEvent, None, None]:
        return self._events(self._stub.Generate(request_to_pb(request), timeout=timeout_s))

    def resume(
        self, request_id: str, positions: Sequence[int], timeout_s: float | None
    ) -> Generator[GenerateEvent, None, None]:
        pb = generation.ResumeRequest(request_id=request_id, next_token_index=positions)
        return self._events(self._stub.Resume(pb, timeout=timeout_s))

    def _events(self, call: Any) -> Generator[GenerateEvent, None, None]:
        try:
            with status.translated(self._address):
                for response in call:
                    event = event_from_pb(response)
                    if isinstance(event, generation.Finished):
                        metadata = [(key, value) for key, value in call.trailing_metadata() or ()]
                        yield finished_from_pb(event, metadata)
                    else:
                        yield event
        finally:
            call.cancel()

    def cancel(self, request_id: str) -> None:
        with status.translated(self._address):
            self._stub.Cancel(generation.CancelRequest(request_id=request_id), timeout=_CALL_TIMEOUT_S)

    def tokenize(self, model: str, text: str) -> list[int]:
        with status.translated(self._address):
            request = generation.TokenizeRequest(model=model, text=text)
            return list(self._stub.Tokenize(request, timeout=_CALL_TIMEOUT_S).token_ids)

    def detokenize(self, model: str, token_ids: Sequence[int]) -> str:
        with status.translated(self._address):
            request = generation.DetokenizeRequest(model=model, token_ids=token_ids)
            return str(self._stub.Detokenize(request, timeout=_CALL_TIMEOUT_S).text)

    def list_models(self) -> list[ModelCard]:
        with status.translated(self._address):
            response = self._stub.ListModels(generation.ListModelsRequest(), timeout=_CALL_TIMEOUT_S)
            return [ModelCard(model.name, model.max_model_len, model.vocab_size) for model in response.models]

    def close(self) -> None:
        self._channel.close()
