"""The handler behind the router's public ports, of gRPC and HTTP: it makes clients' calls calls of the dispatcher."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from baton.errors import InvalidRequest
from baton.messages.generation import Finished, GenerateEvent, GenerateRequest, ModelCard, TakeChunk
from baton.messages.ids import REQUEST_ID_PATTERN, scoped
from baton.messages.pooling import (
    EmbedInput,
    EmbedRequest,
    EmbedResponse,
    EmbedResult,
    EmbedTask,
    Pooling,
    PoolingRequest,
)
from baton.messages.request_limits import MAX_PROMPT_BYTES
from baton.security.matrix import current_caller
from baton.text.detokenizer import TextCodec
from router.admission.checks import check_model, check_text, check_token_ids
from router.admission.quotas import RateLimit
from router.admission.tenants import Tenants
from router.dispatcher import Dispatcher
from router.handler import Handler
from router.pooling import (
    SMALL_VECTORS,
    PoolingCall,
    PoolingInput,
    TextPair,
    numbers_of,
    pool_all,
    score_pairs,
)

T = TypeVar("T")


class GenerationHandler:
    """Serves clients; see `baton.wire.services.generation_service.GenerationHandler`."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        codec: TextCodec | None,
        card: Callable[[], ModelCard],
        tenants: Tenants | None = None,
    ) -> None:
        self._tenants = tenants or Tenants()
        self._dispatcher = dispatcher
        self._codec = codec
        self._card = card

    def generate(
        self, request: GenerateRequest, timeout_s: float | None, take: TakeChunk | None = None
    ) -> AsyncGenerator[GenerateEvent, None]:
        """Yields Accepted, Chunks, Finished. Closing the generator cancels the request."""
        caller = current_caller.get()
        if not caller.tenant:
            return self._dispatcher.generate(request, timeout_s, take)
        owned = replace(
            request,
            tenant=caller.tenant,
            min_priority=caller.min_priority,
            service_class=caller.service_class,
            weight=caller.weight,
        )
        return self._tenants.counted(
            caller, lambda on_finished, quota: self._dispatcher.generate(owned, timeout_s, take, on_finished, quota)
        )

    def most_at_once(self) -> int | None:
        """How many requests the caller may have running at once; None: any number."""
        caller = current_caller.get()
        limits = (caller.max_concurrent, caller.key_quotas.max_concurrent)
        return min((limit for limit in limits if limit is not None), default=None)

    def rate_limits(self) -> Sequence[RateLimit]:
        """What the caller has left of its quotas; see `RateLimiter.rate_limits`."""
        return self._tenants.rate_limits(current_caller.get())

    def resume(
        self,
        request_id: str,
        next_token_index: Sequence[int],
        timeout_s: float | None,
        take: TakeChunk | None = None,
        call: int = 0,
        repeat: GenerateRequest | None = None,
    ) -> AsyncGenerator[GenerateEvent, None]:
        """Yields Accepted, the events after these positions, Finished. Closing the generator cancels the request."""
        caller = current_caller.get()
        if not caller.tenant:
            return self._dispatcher.resume(request_id, next_token_index, timeout_s, take, call, repeat)
        name = scoped(caller.tenant, request_id)
        owned = replace(repeat, tenant=caller.tenant) if repeat is not None else None
        return self._tenants.counted(
            caller,
            lambda on_finished, quota: self._dispatcher.resume(
                name, next_token_index, timeout_s, take, call, owned, on_finished, quota, caller
            ),
        )

    async def cancel(self, request_id: str) -> None:
        """End a live request; raises RequestNotFound."""
        self._dispatcher.cancel(scoped(current_caller.get().tenant, request_id))

    async def tokenize(self, model: str, text: str) -> Sequence[int]:
        """The token ids that `generate` would see; raises InvalidRequest."""
        check_model(model, self._card())
        check_text("text", text, MAX_PROMPT_BYTES)
        # In a thread, since a long text takes a second.
        return await self.in_thread(self._text_codec().encode, text)

    async def detokenize(self, model: str, token_ids: Sequence[int]) -> str:
        """The text of token ids; raises InvalidRequest."""
        card, codec = self._card(), self._text_codec()
        check_model(model, card)
        if len(token_ids) > card.max_model_len:
            message = (
                f"has {len(token_ids)} entries; at most {card.max_model_len} are taken, as many as {card.name} reads"
            )
            raise InvalidRequest("token_ids", message)

        def decode() -> str:
            check_token_ids("token_ids", token_ids, card.vocab_size)
            return codec.decode(token_ids)

        return await self.in_thread(decode)

    async def in_thread(self, work: Callable[..., T], *args: object) -> T:
        """Do long work in a thread, beside the event loop; raises Overloaded if too much of it waits."""
        return await self._dispatcher.in_thread(current_caller.get().tenant, work, *args)

    async def in_waiting_thread(self, work: Callable[..., T], *args: object) -> T:
        """Do work that waits for a child process, in a thread; raises Overloaded if too much of it waits."""
        return await self._dispatcher.in_waiting_thread(current_caller.get().tenant, work, *args)

    async def in_chat_thread(self, work: Callable[..., T], *args: object, is_long: bool) -> T:
        """Do work that renders a chat with the model's template; raises Overloaded if too much of it waits."""
        return await self._dispatcher.in_chat_thread(current_caller.get().tenant, work, *args, is_long=is_long)

    async def embed(self, request: EmbedRequest, timeout_s: float | None) -> EmbedResponse:
        """The vectors, labels or scores of all inputs; raises BatonErrors. Cancelling it ends all of them."""
        named = replace(request, request_id=request.request_id or self._dispatcher.new_request_id())
        return await embed(named, self, self._codec, self._card(), timeout_s)

    def embedding_size(self) -> int:
        """Numbers in an embedding of the model, as nodes have reported it; 0: none has."""
        return self._card().embedding_size

    def list_models(self) -> Sequence[ModelCard]:
        return self._card().with_adapters()

    def _text_codec(self) -> TextCodec:
        if self._codec is None:
            raise InvalidRequest("model", "is served without a tokenizer")
        return self._codec


async def embed(
    request: EmbedRequest,
    handler: Handler,
    vocabulary: TextCodec | None,
    card: ModelCard,
    timeout_s: float | None,
) -> EmbedResponse:
    """The results of all inputs of a call with an id. Raises InvalidRequest, and what the core raises."""
    if not request.inputs:
        raise InvalidRequest("inputs", "is empty")
    if not REQUEST_ID_PATTERN.match(request.request_id):
        raise InvalidRequest("request_id", "must be 1 to 64 letters, digits or _ . : -")
    if request.pooling is Pooling.CLASSIFY:
        raise InvalidRequest("pooling", "can't be classify: that is a task")
    if request.pooling is Pooling.ALIGN:
        raise InvalidRequest("pooling", "can't be align: the times of words come with their transcript over HTTP")
    most = request.truncate_prompt_tokens
    if most is not None and not (most == -1 or most >= 1):
        raise InvalidRequest("truncate_prompt_tokens", f"must be -1 or at least 1, not {most}")
    is_classified = request.task is EmbedTask.CLASSIFY
    call = PoolingCall(
        inputs=(),
        pooling=PoolingRequest(
            Pooling.CLASSIFY if is_classified else request.pooling,
            request.normalize,
            request.dimensions,
            activate=request.activate is not False,
        ),
        request_id=request.request_id,
        model=request.model,
        priority=request.priority,
        cache_salt=request.cache_salt,
        traceparent=request.traceparent,
        truncate=most,
    )
    if request.task is EmbedTask.SCORE:
        pairs = [_pair(item, index) for index, item in enumerate(request.inputs)]
        scored = await score_pairs(pairs, call, handler, vocabulary, card, timeout_s)
        results: Sequence[EmbedResult] = [EmbedResult((score,)) for score in scored.scores]
        return EmbedResponse(call.request_id, results, _num_tokens(scored.results))
    inputs = [_input(item, index, is_pair=is_classified) for index, item in enumerate(request.inputs)]
    ends = await pool_all(replace(call, inputs=inputs), handler, vocabulary, card, timeout_s)
    labels = card.pooling.labels if is_classified else ()
    if sum(len(item.embedding) for item in ends) <= SMALL_VECTORS:
        results = _results(ends, labels)
    else:
        results = await handler.in_thread(_results, ends, labels)
    return EmbedResponse(call.request_id, results, _num_tokens(ends))


def _results(ends: Sequence[Finished], labels: Sequence[str]) -> Sequence[EmbedResult]:
    vectors = [numbers_of(end.embedding) for end in ends]
    return [EmbedResult(vector, labels[vector.index(max(vector))] if labels else "") for vector in vectors]


def _input(item: EmbedInput, index: int, *, is_pair: bool) -> PoolingInput:
    field = f"inputs[{index}]"
    if not item.prompt:
        raise InvalidRequest(field, "is empty")
    if item.second_text is not None and not (is_pair and isinstance(item.prompt, str)):
        raise InvalidRequest(f"{field}.second_text", "needs a text, and a task that takes pairs")
    return PoolingInput(item.prompt, item.second_text, field)


def _pair(item: EmbedInput, index: int) -> TextPair:
    field = f"inputs[{index}]"
    if not isinstance(item.prompt, str) or item.second_text is None:
        raise InvalidRequest(field, "must have text and second_text: a score is of a pair of texts")
    return TextPair(item.prompt, item.second_text, f"{field}.text", f"{field}.second_text")


def _num_tokens(ends: Sequence[Finished]) -> int:
    return sum(end.prompt_tokens for end in ends)
