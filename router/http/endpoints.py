"""/v1/completions and /v1/chat/completions: from a client's request to its answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Protocol, TypeVar

from starlette.types import Receive, Scope, Send

from baton.clock import Clock
from baton.errors import InvalidRequest
from baton.messages.generation import GenerateEvent, GenerateRequest, ModelCard
from baton.messages.ids import REQUEST_ID_PATTERN, new_request_id
from router.admission.validation import check_model
from router.http.answers import (
    Collected,
    Events,
    accepted_of,
    collect,
    path_headers,
    seed_headers,
    stream,
    whole,
)
from router.http.bodies import Body, ChatBody, CompletionBody, read
from router.http.body import is_small, parse_json, read_body
from router.http.client import Client
from router.http.events import EventWriter, Label, Wishes
from router.http.model import ServedModel
from router.http.position import parse_event_id
from router.http.shapes import CHAT, COMPLETION, Shape

T = TypeVar("T")
_MAX_TIMEOUT_MS = 24 * 3600 * 1000


class Handler(Protocol):
    """What the router's core does for this front; `router.front.GenerationHandler` is one. Errors are BatonErrors."""

    def generate(self, request: GenerateRequest, timeout_s: float | None) -> AsyncGenerator[GenerateEvent, None]:
        """Accepted, Chunks, Finished. Closing the generator cancels the request."""
        ...

    def most_at_once(self) -> int | None:
        """How many requests whoever asks may have running; None: any number."""
        ...

    def resume(
        self,
        request_id: str,
        next_token_index: Sequence[int],
        timeout_s: float | None,
        *,
        repeat: GenerateRequest | None = None,
    ) -> AsyncGenerator[GenerateEvent, None]:
        """Accepted, what lies behind these positions, Finished; raises RequestNotFound. `repeat`: the request, which
        comes again with each call of a client of HTTP.
        """
        ...

    async def in_thread(self, work: Callable[..., T], *args: object) -> T:
        """Do what takes long without keeping the loop from others; raises Overloaded when too much of it waits."""
        ...


@dataclass(frozen=True, slots=True)
class Question:
    """What a client asks for."""

    request_id: str
    body: Body
    requests: Sequence[GenerateRequest]
    """One for each prompt."""
    wishes: Wishes
    timeout_s: float | None

    def traced(self, traceparent: str) -> Question:
        """The same, of a caller whose span has this W3C traceparent."""
        return replace(self, requests=[replace(request, traceparent=traceparent) for request in self.requests])

    @property
    def num_sequences(self) -> int:
        """Of each prompt, once the core has accepted it."""
        return 1 if self.body.n is None else self.body.n


class Endpoint:
    """What the two have in common. An ASGI application; what it raises is for the front."""

    shape: Shape
    names: Mapping[str, Sequence[str]] = {}
    """The core's names of fields, where this endpoint has others: the first of them that the client has sent counts."""

    def __init__(self, handler: Handler, model: ServedModel, clock: Clock, keep_alive_s: float) -> None:
        self._handler = handler
        self._model = model
        self._clock = clock
        self._keep_alive_s = keep_alive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        content = await read_body(scope, receive)
        found = await off_loop(self._handler, content, parse_json, content)
        timeout_s = timeout_of(headers.get(b"x-request-timeout-ms"))
        last_event_id = headers.get(b"last-event-id")
        with renamed(self.names, found):
            async with Client(receive, send, self._keep_alive_s) as client:
                about = found, scope["state"]["request_id"], timeout_s, self._model.card
                question = await off_loop(self._handler, content, self._question, *about)
                if (traceparent := headers.get(b"traceparent")) is not None:
                    question = question.traced(traceparent.decode("latin-1"))
                if last_event_id is not None:
                    positions = _positions(last_event_id, b"x-request-id" in headers, question)
                    await self._resume(client, question, positions)
                elif question.body.stream:
                    await self._stream(client, question)
                else:
                    await self._whole(client, question)

    def _question(
        self, found: Mapping[str, Any], request_id: str, timeout_s: float | None, card: ModelCard
    ) -> Question:
        """May be called in a thread. Raises InvalidRequest."""
        raise NotImplementedError

    async def _stream(self, client: Client, question: Question) -> None:
        if len(question.requests) > 1:
            raise InvalidRequest("prompt", f"has {len(question.requests)} prompts; a stream takes one")
        events = self._handler.generate(question.requests[0], question.timeout_s)
        await self._send_events(client, question, events, None)

    async def _resume(self, client: Client, question: Question, positions: Sequence[int]) -> None:
        events = self._handler.resume(question.request_id, positions, question.timeout_s, repeat=question.requests[0])
        await self._send_events(client, question, events, positions)

    async def _send_events(
        self, client: Client, question: Question, events: Events, positions: Sequence[int] | None
    ) -> None:
        """`positions` are where a stream that was begun before goes on."""
        async with aclosing(events):
            accepted = await accepted_of(events)
            client.will_stream([(b"x-request-id", accepted.request_id.encode()), *seed_headers(accepted)])
            writer = EventWriter(
                self.shape,
                self._label(accepted.request_id),
                question.wishes,
                [0] * question.num_sequences if positions is None else positions,
                accepted.prompt_tokens,
                self._model.spelling,
            )
            await stream(client, events, writer, writer.opening() if positions is None else b"")

    async def _whole(self, client: Client, question: Question) -> None:
        answers = await all_of([self._collect(request, question) for request in question.requests])
        choices = [
            choice
            for place, answer in enumerate(answers)
            for choice in answer.choices(
                self.shape, question.wishes, self._model.spelling, place * question.num_sequences
            )
        ]
        ends = [answer.finished for answer in answers]
        headers = [
            (b"content-type", b"application/json"),
            (b"x-request-id", question.request_id.encode()),
            *seed_headers(answers[0].accepted),
            *path_headers(ends[0]),
        ]
        await client.answer(200, headers, whole(self.shape, self._label(question.request_id), choices, ends))

    async def _collect(self, request: GenerateRequest, question: Question) -> Collected:
        async with aclosing(self._handler.generate(request, question.timeout_s)) as events:
            return await collect(await accepted_of(events), events, question.num_sequences)

    def _label(self, request_id: str) -> Label:
        return Label(self.shape.id_prefix + request_id, self._model.card.name, int(self._clock.wall()))


class Completions(Endpoint):
    """POST /v1/completions"""

    shape = COMPLETION
    names = {  # noqa: RUF012
        "request_id": ("request_id", "x-request-id"),
        "next_token_index": ("last-event-id",),
        "json_schema": ("response_format",),
        "beam_width": ("beam_width", "use_beam_search"),
    }

    def _question(
        self, found: Mapping[str, Any], request_id: str, timeout_s: float | None, card: ModelCard
    ) -> Question:
        body = read(CompletionBody, found)
        check_request_id(body.request_id, request_id)
        ids = ids_of_parts(request_id, len(body.prompts))
        requests = [body.request(prompt, one, body.logprobs) for prompt, one in zip(body.prompts, ids, strict=True)]
        return Question(request_id, body, requests, _wishes(body, body.logprobs is not None), timeout_s)


class ChatCompletions(Endpoint):
    """POST /v1/chat/completions"""

    shape = CHAT
    names = {  # noqa: RUF012
        **Completions.names,
        "prompt": ("messages",),
        "logprobs": ("top_logprobs", "logprobs"),
        "max_tokens": ("max_completion_tokens", "max_tokens"),
    }

    def _question(
        self, found: Mapping[str, Any], request_id: str, timeout_s: float | None, card: ModelCard
    ) -> Question:
        body = read(ChatBody, found)
        check_request_id(body.request_id, request_id)
        check_model(body.model or "", card)
        prompt = self._model.chat_prompt(body)
        max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        if max_tokens is None:
            # As far as the model goes; of completions 16 are the default.
            max_tokens = max(1, card.max_model_len - len(prompt))
        request = replace(body.request(prompt, request_id, body.num_logprobs), max_tokens=max_tokens)
        return Question(request_id, body, [request], _wishes(body, bool(body.logprobs)), timeout_s)


async def off_loop(handler: Handler, content: bytes, work: Callable[..., T], *args: object) -> T:
    """What `work` makes of a body, in a thread if that may take long."""
    return work(*args) if is_small(content) else await handler.in_thread(work, *args)


def request_id_of(scope: Scope, rng: Random) -> str:
    """The client's x-request-id, or a new one; raises InvalidRequest for one that can't be taken."""
    found = dict(scope["headers"]).get(b"x-request-id")
    if found is None:
        return new_request_id(rng)
    text = found.decode("latin-1")
    if not REQUEST_ID_PATTERN.match(text):
        raise InvalidRequest("x-request-id", "must be 1 to 64 letters, digits or _ . : -")
    return str(text)


def ids_of_parts(request_id: str, count: int) -> Sequence[str]:
    """What the requests are called that a call is made of."""
    return [request_id] if count == 1 else [f"{request_id[:60]}-{place}" for place in range(count)]


def check_request_id(in_body: str | None, request_id: str) -> None:
    """Raises InvalidRequest where the body has another one than the header."""
    if in_body not in (None, request_id):
        raise InvalidRequest("request_id", "is another one than x-request-id; send the header alone")


def _wishes(body: Body, logprobs: bool) -> Wishes:
    return Wishes(body.includes_usage, body.usage_in_all, logprobs, bool(body.return_token_ids))


def timeout_of(header: bytes | None) -> float | None:
    """Seconds, of an x-request-timeout-ms; raises InvalidRequest."""
    if header is None:
        return None
    # Bounded first: Python reads no number of thousands of digits.
    if not (len(header) <= 12 and header.isdigit() and 0 < int(header) <= _MAX_TIMEOUT_MS):
        raise InvalidRequest("x-request-timeout-ms", f"must be 1 to {_MAX_TIMEOUT_MS}")
    return int(header) / 1e3


def _positions(last_event_id: bytes, has_request_id: bool, question: Question) -> Sequence[int]:
    if not has_request_id:
        raise InvalidRequest("x-request-id", "is required with last-event-id: it names the stream that goes on")
    if not question.body.stream:
        raise InvalidRequest("stream", "must be true with last-event-id")
    positions = parse_event_id(last_event_id.decode("latin-1"))
    if len(positions) != question.num_sequences:
        raise InvalidRequest("last-event-id", f"is of {len(positions)} sequences, but n is {question.num_sequences}")
    return positions


async def all_of(parts: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All results; the first error ends the others."""
    if len(parts) == 1:
        return [await parts[0]]
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextmanager
def renamed(names: Mapping[str, Sequence[str]], found: Mapping[str, Any]) -> Iterator[None]:
    """What is raised in here names fields as the client does; see `Endpoint.names`."""
    try:
        yield
    except InvalidRequest as error:
        theirs = names.get(error.field, (error.field,))
        name = next((name for name in theirs if found.get(name) is not None), theirs[-1])
        raise type(error)(name, error.reason) from error
