"""The public gRPC service. It translates between Protocol Buffers and the calls of a `GenerationHandler`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence, Sized
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import Any, Protocol

import grpc
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from baton.errors import BatonError, InvalidRequest
from baton.messages.generation import (
    Accepted,
    Chunk,
    Finished,
    GenerateEvent,
    GenerateRequest,
    ModelCard,
    PromptLogprobs,
    TakeChunk,
)
from baton.messages.pooling import EmbedRequest, EmbedResponse
from baton.messages.request_limits import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_AUDIO_BYTES,
    MAX_BAD_WORDS,
    MAX_CHOICES,
    MAX_IMAGES,
    MAX_INPUTS,
    MAX_LOGIT_BIAS,
    MAX_REQUEST_BYTES,
    MAX_SEQUENCES,
    MAX_SPANS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOKEN_IDS,
)
from baton.v1 import generation_pb2 as pb
from baton.v1 import generation_pb2_grpc
from baton.wire.codec.generation import (
    EMBED_RESPONSE,
    call_number_from_metadata,
    chunk_to_pb,
    embed_request_from_pb,
    event_to_pb,
    model_to_pb,
    path_to_metadata,
    request_from_pb,
)
from baton.wire.http2.call import Call

SERVICE_NAME = "baton.v1.Generation"
_MAX_UNKNOWN_BYTES = 16 << 10
"""The most bytes of unknown fields of which the first one is looked for, to name it."""
_FEW_NUMBERS = 4096
"""The most numbers of vectors that are put into a message on the event loop."""

_Context = grpc.aio.ServicerContext[Any, Any]


class GenerationHandler(Protocol):
    """The operations of a router that clients call. Errors are BatonErrors."""

    def generate(
        self, request: GenerateRequest, timeout_s: float | None, take: TakeChunk | None
    ) -> AsyncGenerator[GenerateEvent, None]:
        """Yield Accepted, Chunks and Finished. Closing the generator cancels the request.

        While the consumer waits for the next event, chunks may be passed to `take` instead, in order.
        """
        ...

    def resume(
        self,
        request_id: str,
        next_token_index: Sequence[int],
        timeout_s: float | None,
        take: TakeChunk | None,
        call: int,
    ) -> AsyncGenerator[GenerateEvent, None]:
        """Yield Accepted, the Chunks behind these positions, and Finished. Closing the generator cancels the request.

        `call`: the client's number for this call, from 1 for its first call for the request; 0: none was sent.
        """
        ...

    async def cancel(self, request_id: str) -> None:
        """End a running request. Raises RequestNotFound."""
        ...

    async def tokenize(self, model: str, text: str) -> Sequence[int]: ...

    async def detokenize(self, model: str, token_ids: Sequence[int]) -> str: ...

    async def embed(self, request: EmbedRequest, timeout_s: float | None) -> EmbedResponse:
        """The vectors, labels or scores of all inputs. Cancelling it ends all of them."""
        ...

    def list_models(self) -> Sequence[ModelCard]: ...


class GenerationServicer(generation_pb2_grpc.GenerationServicer):
    """Calls the handler for each RPC. `FaultBarrier` handles the exceptions."""

    def __init__(
        self,
        handler: GenerationHandler,
        *,
        takes_traces: bool = False,
        prompt_embeds_bytes: int = 0,
        images_bytes: int = 0,
    ) -> None:
        """`takes_traces`: pass on the clients' W3C trace contexts. `prompt_embeds_bytes`: the most bytes of a request's
        `prompt_embeds`, and `images_bytes` of its images, beside its others; 0: none are taken.
        """
        self._images_bytes = images_bytes
        self._handler = handler
        self._prompt_embeds_bytes = prompt_embeds_bytes
        self._takes_traces = takes_traces

    def add_to_server(self, server: grpc.aio.Server) -> None:
        generation_pb2_grpc.add_GenerationServicer_to_server(self, server)

    async def Generate(self, request: pb.GenerateRequest, context: _Context) -> AsyncIterator[pb.GenerateResponse]:
        _check_counts(request)
        _check_message(request, self._checked_rows_bytes(request))
        stream = _ResponseStream(request.request_id, context)
        with stream.counts_in_errors():
            # This generator may be closed at its `yield`. With `aclosing` the request ends then, and not only when the
            # inner generator is garbage-collected.
            call = call_number_from_metadata(context.invocation_metadata())
            decoded = request_from_pb(request, call, _traceparent(context) if self._takes_traces else "")
            async with aclosing(self._handler.generate(decoded, context.time_remaining(), stream.take)) as events:
                async for event in events:
                    yield await stream.response(event)

    def _checked_rows_bytes(self, request: pb.GenerateRequest) -> int:
        """The size of a request's rows, images or audio, which have bounds of their own. Raises InvalidRequest."""
        if request.audio:
            if len(request.audio) > MAX_AUDIO_BYTES:
                raise InvalidRequest("audio", f"has {len(request.audio)} bytes; at most {MAX_AUDIO_BYTES} are taken")
            return len(request.audio)
        if request.images:
            check_count("images", request.images, MAX_IMAGES)
            num_image_bytes, most = sum(map(len, request.images)), self._images_bytes
            if num_image_bytes > most > 0:
                raise InvalidRequest("images", f"have {num_image_bytes} bytes; at most {most} are taken here")
            return num_image_bytes if most else 0
        if not request.prompt_embeds:
            return 0
        check_count("prompt_embeds", request.prompt_embeds, MAX_SPANS)
        num_bytes, most = sum(len(rows.safetensors) for rows in request.prompt_embeds), self._prompt_embeds_bytes
        if num_bytes > most > 0:
            raise InvalidRequest("prompt_embeds", f"has {num_bytes} bytes; at most {most} are taken here")
        return num_bytes if most else 0

    async def Resume(self, request: pb.ResumeRequest, context: _Context) -> AsyncIterator[pb.GenerateResponse]:
        check_count("next_token_index", request.next_token_index, MAX_SEQUENCES)
        _check_message(request)
        stream, positions = _ResponseStream(request.request_id, context), list(request.next_token_index)
        call, left_s = call_number_from_metadata(context.invocation_metadata()), context.time_remaining()
        with stream.counts_in_errors():
            async with aclosing(
                self._handler.resume(request.request_id, positions, left_s, stream.take, call)
            ) as events:
                async for event in events:
                    yield await stream.response(event)

    async def Cancel(self, request: pb.CancelRequest, context: _Context) -> pb.CancelResponse:
        _check_message(request)
        await self._handler.cancel(request.request_id)
        return pb.CancelResponse()

    async def Tokenize(self, request: pb.TokenizeRequest, context: _Context) -> pb.TokenizeResponse:
        _check_message(request)
        token_ids = await self._handler.tokenize(request.model, request.text)
        check_count("text", token_ids, MAX_TOKEN_IDS, "tokens")
        return pb.TokenizeResponse(token_ids=token_ids)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: _Context) -> pb.DetokenizeResponse:
        check_count("token_ids", request.token_ids, MAX_TOKEN_IDS)
        _check_message(request)
        text = await self._handler.detokenize(request.model, list(request.token_ids))
        return pb.DetokenizeResponse(text=text)

    async def Embed(self, request: pb.EmbedRequest, context: _Context) -> pb.EmbedResponse:
        check_count("inputs", request.inputs, MAX_INPUTS)
        for index, item in enumerate(request.inputs):
            check_count(f"inputs[{index}]", item.token_ids.ids, MAX_TOKEN_IDS)
        _check_message(request)
        decoded = embed_request_from_pb(request)
        if self._takes_traces:
            decoded = replace(decoded, traceparent=_traceparent(context))
        response = await self._handler.embed(decoded, context.time_remaining())
        if sum(len(item.values) for item in response.results) <= _FEW_NUMBERS:
            return EMBED_RESPONSE.to_pb(response)
        # A million numbers would hold the event loop for as long as a hundred tokens take.
        return await asyncio.to_thread(EMBED_RESPONSE.to_pb, response)

    async def ListModels(self, request: pb.ListModelsRequest, context: _Context) -> pb.ListModelsResponse:
        _check_message(request)
        cards = self._handler.list_models()
        return pb.ListModelsResponse(models=[model_to_pb(card) for card in cards])


class _ResponseStream:
    """Turns the events of one stream into messages, and counts the tokens that were sent."""

    def __init__(self, request_id: str, context: _Context) -> None:
        self._request_id = request_id
        self._context = context
        self._tokens_sent = 0

    @property
    def take(self) -> TakeChunk | None:
        """The function that writes a chunk at once; None if the server can't (grpc.aio's)."""
        return self._take if isinstance(self._context, Call) else None

    def _take(self, chunk: Chunk) -> bool:
        context = self._context
        assert isinstance(context, Call)
        if not context.has_room:
            return False
        context.write_now(chunk_to_pb(chunk, self._request_id))
        self._tokens_sent += len(chunk.token_ids)
        return True

    async def response(self, event: GenerateEvent) -> pb.GenerateResponse:
        """The message of an event."""
        if isinstance(event, PromptLogprobs):
            # They are up to 2^18 numbers, which would hold the event loop for 0.3 s.
            return await asyncio.to_thread(event_to_pb, event, self._request_id)
        if isinstance(event, Chunk):
            self._tokens_sent += len(event.token_ids)
        elif isinstance(event, Accepted):
            self._request_id = event.request_id
        elif isinstance(event, Finished):
            self._context.set_trailing_metadata(path_to_metadata(event))
        return event_to_pb(event, self._request_id)

    @contextmanager
    def counts_in_errors(self) -> Iterator[None]:
        """Note the number of tokens sent in an error that is raised in this context."""
        try:
            yield
        except BatonError as error:
            if self._tokens_sent:
                error.tokens_sent = self._tokens_sent
            raise


def _traceparent(context: _Context) -> str:
    """The W3C trace context that the client sent; empty: none."""
    header = next((value for key, value in context.invocation_metadata() or () if key == "traceparent"), "")
    return header if isinstance(header, str) else ""


def _check_message(request: Message, num_row_bytes: int = 0) -> None:
    """Check the size of a request, and refuse fields that this version does not know, as for JSON.

    `num_row_bytes`: how many of its bytes are rows or images, which don't count.

    Raises InvalidRequest. An unknown field must not be ignored silently: the client relies on it.
    """
    num_bytes = request.ByteSize()
    if num_bytes - num_row_bytes > MAX_REQUEST_BYTES:
        raise InvalidRequest("request", f"has {num_bytes} bytes; at most {MAX_REQUEST_BYTES} are taken")
    if _may_have_unknown_fields(request, num_bytes):
        _refuse_unknown_fields(request, "")


def _check_counts(request: pb.GenerateRequest) -> None:
    """Check the counts before anything is copied: a message of 1 MiB may hold half a million of some fields."""
    params = request.sampling_params
    check_count("prompt", request.token_ids.ids, MAX_TOKEN_IDS)
    check_count("stop", params.stop, MAX_STOP_STRINGS)
    check_count("stop_token_ids", params.stop_token_ids, MAX_STOP_TOKEN_IDS)
    check_count("choice", params.choice, MAX_CHOICES)
    check_count("logit_bias", params.logit_bias, MAX_LOGIT_BIAS)
    check_count("allowed_token_ids", params.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS)
    check_count("bad_words", params.bad_words, MAX_BAD_WORDS)
    if params.bad_words_token_ids:
        raise InvalidRequest("bad_words_token_ids", "is set by routers; send bad_words")


def check_count(field: str, values: Sized, most: int, what: str = "entries") -> None:
    """Raise InvalidRequest for a field with too many values."""
    if len(values) > most:
        raise InvalidRequest(field, f"has {len(values)} {what}; at most {most} are taken")


def _may_have_unknown_fields(request: Message, num_bytes: int) -> bool:
    """Whether a message may have unknown fields.

    Raises InvalidRequest when there are so many that listing them would take a second.
    """
    known = type(request)()
    known.CopyFrom(request)
    known.DiscardUnknownFields()
    num_unknown_bytes = num_bytes - known.ByteSize()
    if num_unknown_bytes > _MAX_UNKNOWN_BYTES:
        raise InvalidRequest("request", f"has {num_unknown_bytes} bytes in fields that this version does not know")
    return num_unknown_bytes > 0


def _refuse_unknown_fields(message: Message, path: str) -> None:
    unknown = UnknownFieldSet(message)
    if len(unknown):
        raise InvalidRequest(f"{path}{unknown[0].field_number}", "is a field number that this version does not know")
    for field, value in message.ListFields():
        if isinstance(value, Message):
            _refuse_unknown_fields(value, f"{path}{field.name}.")
        elif field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for index, item in enumerate(value):
                _refuse_unknown_fields(item, f"{path}{field.name}[{index}].")
