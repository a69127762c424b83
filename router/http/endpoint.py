"""The common part of the endpoints that generate: from a client's request to the core, and from its events back."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, contextmanager
from contextvars import copy_context
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Generic, Protocol, TypeVar

from starlette.types import Receive, Scope, Send

from baton.background import gather_all
from baton.clock import Clock
from baton.errors import InvalidRequest, VersionGone
from baton.messages.adapters import AdapterSource
from baton.messages.generation import Accepted, Delivery, GenerateEvent, GenerateRequest, ModelCard
from baton.messages.ids import REQUEST_ID_PATTERN, new_request_id
from baton.messages.request_limits import MAX_SEQUENCES
from baton.text.chat_template import FIELD as TEMPLATE_FIELD
from router.http.answers import (
    Collected,
    Events,
    StreamWriter,
    accepted_of,
    collect,
    merged,
    path_headers,
    seed_headers,
    send_whole,
    stream,
)
from router.http.bodies.content_parts import message_parts
from router.http.client import COMMENT, Client
from router.http.errors import Headers
from router.http.json_body import (
    MAX_BODY_BYTES,
    LargeBodies,
    LargeBody,
    base64_bytes,
    is_small,
    parse_json,
    read_body,
)
from router.http.model import ServedModel

T = TypeVar("T")


P = TypeVar("P", bound="EndpointRequest")


_MAX_TIMEOUT_MS = 24 * 3600 * 1000


class Handler(Protocol):
    """The router's core as the HTTP front uses it; `router.front.GenerationHandler` is the real one."""

    def generate(self, request: GenerateRequest, timeout_s: float | None) -> AsyncGenerator[GenerateEvent, None]:
        """Accepted, Chunks, Finished. Closing the generator cancels the request."""
        ...

    def most_at_once(self) -> int | None:
        """How many requests the caller may have running at once; None: any number."""
        ...

    def resume(
        self,
        request_id: str,
        next_token_index: Sequence[int],
        timeout_s: float | None,
        *,
        repeat: GenerateRequest | None = None,
    ) -> AsyncGenerator[GenerateEvent, None]:
        """Accepted, the events after these positions, Finished; raises RequestNotFound.

        `repeat`: the request itself, which a client of HTTP sends again with each call.
        """
        ...

    def embedding_size(self) -> int:
        """Numbers in an embedding of the model, as nodes have reported it; 0: none has."""
        ...

    async def in_thread(self, work: Callable[..., T], *args: object) -> T:
        """Do long work in a thread, so that the event loop is free; raises Overloaded if too much of it waits."""
        ...

    async def in_waiting_thread(self, work: Callable[..., T], *args: object) -> T:
        """Do work that waits for a child process, in a thread; raises Overloaded if too much of it waits."""
        ...

    async def in_chat_thread(self, work: Callable[..., T], *args: object, is_long: bool) -> T:
        """Do work that renders a chat with the model's template, in a thread; raises Overloaded if too much waits."""
        ...


@dataclass(frozen=True, slots=True)
class EndpointRequest:
    """The parsed request of a client."""

    request_id: str
    requests: Sequence[GenerateRequest]
    """One request to the core for each prompt."""
    is_stream: bool
    num_sequences: int
    """Number of sequences for each prompt, once the core has accepted it."""
    timeout_s: float | None


@dataclass(frozen=True, slots=True)
class BodyParser(Generic[P]):
    """How the JSON of one client's request is parsed."""

    parse: Callable[..., P]
    """Has the arguments of `Endpoint._parse`. May be called in a thread."""
    more_bytes: int = 0
    """How many bytes it reads beside the body."""


class Endpoint(Generic[P]):
    """The common part of the endpoints for text: an ASGI application, whose exceptions the front turns into answers."""

    names: Mapping[str, Sequence[str]] = {}
    """For fields of the core with other names in this API: these names, for refusals.

    A refusal names the first one of them that the client sent, or else the last one. If the API has no field with the
    core's name, but a client may have sent one, that name is in the list, too, and comes first.
    """
    keep_alive = COMMENT
    """Sent in a stream while there is nothing else to send."""
    max_body_bytes = MAX_BODY_BYTES
    """The most bytes of a body."""
    renders_chats = True
    """Whether parsing a body renders a chat."""
    takes_images = False
    """Whether a body may have images, by which it may be larger."""
    can_resume = False
    """Whether a client may continue a stream with `Last-Event-ID`."""
    delivery: Delivery = "whole"
    """How clients get what they can't continue."""

    def __init__(self, handler: Handler, model: ServedModel, clock: Clock, keep_alive_s: float) -> None:
        self._handler = handler
        self._model = model
        self._clock = clock
        self._keep_alive_s = keep_alive_s
        self._large_bodies = LargeBodies()
        if self.takes_images:
            self.max_body_bytes = MAX_BODY_BYTES + base64_bytes(model.most_image_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._large_bodies.place() as place:
            await self._answer(scope, receive, send, place)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, place: LargeBody) -> None:
        """Answer one request, whose body may take `place`."""
        headers = dict(scope["headers"])
        content = await read_body(scope, receive, self.max_body_bytes, place)
        found = await in_thread_if_large(self._handler, content, parse_json, content)
        timeout_s = timeout_of(headers.get(b"x-request-timeout-ms"))
        last_event_id = headers.get(b"last-event-id")
        # Images in the body are as large as the answer is long to come.
        sent = {name: True for name, value in found.items() if value is not None}
        with with_client_names(self.names, sent):
            async with Client(receive, send, self._keep_alive_s, self.keep_alive) as client:
                card = self._model.card if last_event_id is None else _card_for_resuming(self._model.card, found)
                if self.takes_images and self._model.image_fetcher is not None:
                    await self._model.image_fetcher.put_images_in(found, place)
                arguments = found, scope["state"]["request_id"], timeout_s, card
                parser = self._parser(found)
                work, more_bytes = parser.parse, parser.more_bytes
                if self.renders_chats:
                    parsed = await render_chat(self._handler, content, found, work, *arguments, more_bytes=more_bytes)
                else:
                    parsed = await in_thread_if_large(self._handler, content, work, *arguments, more_bytes=more_bytes)
                del content, found, arguments, parser, work
                place.release()
                if (traceparent := headers.get(b"traceparent")) is not None:
                    parsed = _traced(parsed, traceparent.decode("latin-1"))
                if last_event_id is not None:
                    if not self.can_resume:
                        raise InvalidRequest("last-event-id", "is not for this API: its streams can't be continued")
                    positions = _positions(last_event_id, b"x-request-id" in headers, parsed)
                    await self._resume(client, parsed, positions)
                elif parsed.is_stream:
                    await self._stream(client, parsed)
                else:
                    await self._whole(client, parsed)

    def _parser(self, found: Mapping[str, Any]) -> BodyParser[P]:
        """The parser of this JSON. It is made on the event loop, where an endpoint can look into its own state."""
        return BodyParser(self._parse, MAX_BODY_BYTES if self.takes_images and has_images(found) else 0)

    def _parse(self, found: Mapping[str, Any], request_id: str, timeout_s: float | None, card: ModelCard) -> P:
        """Make the request from the parsed JSON; raises InvalidRequest. May be called in a thread."""
        raise NotImplementedError

    def _writer(self, parsed: P, accepted: Accepted, positions: Sequence[int]) -> StreamWriter:
        """The writer of a stream. `positions`: where each sequence begins."""
        raise NotImplementedError

    def _whole_answer(self, parsed: P, answers: Sequence[Collected]) -> AsyncGenerator[bytes, None]:
        """The answer as one JSON object in pieces, from the answers of all prompts."""
        raise NotImplementedError

    def _id_headers(self, request_id: str) -> Headers:
        """The headers of an answer that name its request."""
        return [(b"x-request-id", request_id.encode())]

    async def _stream(self, client: Client, parsed: P) -> None:
        delivery: Delivery = "stream" if self.can_resume else self.delivery
        requests = [replace(request, delivery=delivery) for request in parsed.requests]
        streams = [self._handler.generate(request, parsed.timeout_s) for request in requests]
        events = streams[0] if len(streams) == 1 else merged(parsed.request_id, streams, parsed.num_sequences)
        await self._send_events(client, parsed, events, None)

    async def _resume(self, client: Client, parsed: P, positions: Sequence[int]) -> None:
        if len(parsed.requests) > 1:
            raise InvalidRequest("last-event-id", "is of a stream of several prompts, which can't be continued")
        events = self._handler.resume(parsed.request_id, positions, parsed.timeout_s, repeat=parsed.requests[0])
        await self._send_events(client, parsed, events, positions)

    async def _send_events(self, client: Client, parsed: P, events: Events, positions: Sequence[int] | None) -> None:
        """Send a stream. `positions`: where a stream that was begun before continues; None: at its beginning."""
        async with aclosing(events):
            accepted = await accepted_of(events)
            client.will_stream([*self._id_headers(accepted.request_id), *seed_headers(accepted)])
            num_sequences = parsed.num_sequences * len(parsed.requests)
            writer = self._writer(parsed, accepted, [0] * num_sequences if positions is None else positions)
            await stream(client, events, writer, writer.opening() if positions is None else b"")

    async def _whole(self, client: Client, parsed: P) -> None:
        # Requests with log-probabilities, which are large, count as live until the client has read them.
        async with AsyncExitStack() as unread:
            answers = await gather_all([self._collect(request, parsed, unread) for request in parsed.requests])
            headers = [
                (b"content-type", b"application/json"),
                *self._id_headers(parsed.request_id),
                *seed_headers(answers[0].accepted),
                *path_headers(answers[0].finished),
            ]
            await send_whole(client, headers, self._whole_answer(parsed, answers), unread.aclose)

    async def _collect(self, request: GenerateRequest, parsed: P, unread: AsyncExitStack) -> Collected:
        """Collect the answer to one prompt. With log-probabilities its stream is left open, to be closed by `unread`.

        If the nodes of the version that began it are gone, it begins anew, once, at any version: its client has none of
        the tokens.
        """
        started, timeout_s, is_anew = self._clock.monotonic(), parsed.timeout_s, False
        request = replace(request, delivery=self.delivery)
        while True:
            try:
                async with AsyncExitStack() as stack:
                    events = await stack.enter_async_context(aclosing(self._handler.generate(request, timeout_s)))
                    fingerprint, accepted = self._model.card.fingerprint, await accepted_of(events)
                    request = replace(request, seed=accepted.seed)
                    answer = await collect(accepted, events, parsed.num_sequences)
                    if request.logprobs is not None or request.prompt_logprobs is not None:
                        unread.push_async_exit(stack.pop_all())
                return replace(answer, fingerprint=fingerprint if fingerprint == self._model.card.fingerprint else "")
            except VersionGone:
                if is_anew:
                    raise
                is_anew = True
                if parsed.timeout_s is not None:
                    timeout_s = max(0.001, parsed.timeout_s - (self._clock.monotonic() - started))


def _card_for_resuming(card: ModelCard, found: Mapping[str, Any]) -> ModelCard:
    """The card with whichever name the request has: it may have been an adapter's when the request began."""
    name = found.get("model")
    if not isinstance(name, str) or name in ("", card.name) or name in card.adapters:
        return card
    return replace(card, adapters={**card.adapters, name: AdapterSource(name, "", "")})


_IMAGE_TYPES = ("image", "image_url", "input_image")
"""The parts that are images, in all APIs."""


def has_images(found: Mapping[str, Any]) -> bool:
    """Whether messages of a body, or of its input, have images, whose headers and tokens take long for their bytes."""
    return any(part.get("type") in _IMAGE_TYPES for part in message_parts(found))


async def in_thread_if_large(
    handler: Handler, content: bytes, work: Callable[..., T], *args: object, more_bytes: int = 0
) -> T:
    """The result of `work` on a body, in a thread if body and `more_bytes` are so large that it may take long."""
    if is_small(content, more_bytes):
        return work(*args)
    return await handler.in_thread(copy_context().run, work, *args)


async def render_chat(
    handler: Handler,
    content: bytes,
    found: Mapping[str, Any],
    work: Callable[..., T],
    *args: object,
    more_bytes: int = 0,
) -> T:
    """The result of work that renders a chat in a child process, for which a thread waits.

    `found`: the JSON in `content`. `more_bytes`: what the work reads beside it.
    """
    if found.get(TEMPLATE_FIELD):
        return await handler.in_waiting_thread(copy_context().run, work, *args)
    is_long = not is_small(content, more_bytes)
    return await handler.in_chat_thread(copy_context().run, work, *args, is_long=is_long)


def request_id_of(scope: Scope, rng: Random) -> str:
    """The client's x-request-id, or a new id; raises InvalidRequest for an id that is not valid."""
    found = dict(scope["headers"]).get(b"x-request-id")
    if found is None:
        return new_request_id(rng)
    text = found.decode("latin-1")
    if not REQUEST_ID_PATTERN.match(text):
        raise InvalidRequest("x-request-id", "must be 1 to 64 letters, digits or _ . : -")
    return str(text)


def check_request_id(in_body: str | None, request_id: str) -> None:
    """Raises InvalidRequest if the body has another request id than the header."""
    if in_body not in (None, request_id):
        raise InvalidRequest("request_id", "differs from x-request-id: send only the header")


def _traced(parsed: P, traceparent: str) -> P:
    """The same request from a caller whose span has this W3C traceparent."""
    return replace(parsed, requests=[replace(request, traceparent=traceparent) for request in parsed.requests])


def timeout_of(header: bytes | None) -> float | None:
    """The seconds of an x-request-timeout-ms header; raises InvalidRequest."""
    if header is None:
        return None
    # The length is checked first: Python reads no number of thousands of digits.
    if not (len(header) <= 12 and header.isdigit() and 0 < int(header) <= _MAX_TIMEOUT_MS):
        raise InvalidRequest("x-request-timeout-ms", f"must be 1 to {_MAX_TIMEOUT_MS}")
    return int(header) / 1e3


def _positions(last_event_id: bytes, has_request_id: bool, parsed: EndpointRequest) -> Sequence[int]:
    if not has_request_id:
        raise InvalidRequest("x-request-id", "is required with last-event-id: it names the stream that goes on")
    if not parsed.is_stream:
        raise InvalidRequest("stream", "must be true with last-event-id")
    positions = parse_event_id(last_event_id.decode("latin-1"))
    if len(positions) != parsed.num_sequences:
        raise InvalidRequest("last-event-id", f"is of {len(positions)} sequences, but n is {parsed.num_sequences}")
    return positions


@contextmanager
def with_client_names(names: Mapping[str, Sequence[str]], found: Mapping[str, Any]) -> Iterator[None]:
    """Within this context, errors of the type InvalidRequest name the client's field in place of the core's.

    `names`: as `Endpoint.names`; `found`: what the client sent.
    """
    try:
        yield
    except InvalidRequest as error:
        clients_names = names.get(error.field, (error.field,))
        name = next((name for name in clients_names if found.get(name) is not None), clients_names[-1])
        raise error.renamed(name) from error


_EVENT_ID_PATTERN = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})*\Z")


def event_id(positions: Sequence[int]) -> str:
    """The id of the event after which a client has these positions (`Chunk.next_position`), joined by dots.

    A position is how many of its tokens the client has, plus one if it has text that came without tokens. So any router
    can continue a stream from an id alone (`Last-Event-ID`).
    """
    return ".".join(map(str, positions))


def parse_event_id(text: str) -> list[int]:
    """The positions in a Last-Event-ID; raises InvalidRequest for an id that no event of ours has."""
    if not _EVENT_ID_PATTERN.match(text) or text.count(".") >= MAX_SEQUENCES:
        raise InvalidRequest("last-event-id", "is not the id of an event of a stream")
    return [int(number) for number in text.split(".")]
