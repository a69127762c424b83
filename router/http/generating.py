"""The common part of the endpoints that generate: from a parsed body to the core, and from its events to an answer."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from baton.background import gather_all
from baton.clock import Clock
from baton.errors import InvalidRequest, VersionGone
from baton.messages.generation import Accepted, Delivery, GenerateRequest
from baton.messages.request_limits import MAX_SEQUENCES
from router.handler import Handler
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
from router.http.client import Client
from router.http.endpoint import JSON, BodyEndpoint, HttpCall
from router.http.model import ServedModel

P = TypeVar("P", bound="EndpointRequest")


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


class GeneratingEndpoint(BodyEndpoint, Generic[P]):
    """The common part of the endpoints that generate."""

    can_resume = False
    """Whether a client may continue a stream with `Last-Event-ID`."""
    delivery: Delivery = "whole"
    """How clients get what they can't continue."""

    def __init__(self, handler: Handler, model: ServedModel, clock: Clock, keep_alive_s: float) -> None:
        super().__init__(handler, model, keep_alive_s)
        self._clock = clock

    async def _answer(self, client: Client, call: HttpCall) -> None:
        timeout_s = call.timeout_s
        if call.last_event_id is not None and not self.can_resume:
            raise InvalidRequest("last-event-id", "is not for this API: its streams can't be continued")
        if self.takes_images:
            await call.fetch_images(self._model)
        parsed = await self._parsed(call, timeout_s)
        call.release()
        if len(parsed.requests) > 1:
            further = [replace(request, is_further_part=True) for request in parsed.requests[1:]]
            parsed = replace(parsed, requests=[parsed.requests[0], *further])
        if call.traceparent:
            requests = [replace(request, traceparent=call.traceparent) for request in parsed.requests]
            parsed = replace(parsed, requests=requests)
        if call.last_event_id is not None:
            await self._resume(client, parsed, call.last_event_id, has_request_id=b"x-request-id" in call.headers)
        elif parsed.is_stream:
            await self._stream(client, parsed)
        else:
            await self._whole(client, parsed)

    async def _parsed(self, call: HttpCall, timeout_s: float | None) -> P:
        """The client's request; raises InvalidRequest."""
        return await call.rendered(self._parse, call, timeout_s, more_bytes=call.image_bytes)

    def _parse(self, call: HttpCall, timeout_s: float | None) -> P:
        """Make the request from the parsed JSON; raises InvalidRequest. May be called in a thread."""
        raise NotImplementedError

    def _writer(self, parsed: P, accepted: Accepted, positions: Sequence[int]) -> StreamWriter:
        """The writer of a stream. `positions`: where each sequence begins."""
        raise NotImplementedError

    def _whole_answer(self, parsed: P, answers: Sequence[Collected]) -> AsyncGenerator[bytes, None]:
        """The answer as one JSON object in pieces, from the answers of all prompts."""
        raise NotImplementedError

    async def _stream(self, client: Client, parsed: P) -> None:
        delivery: Delivery = "stream" if self.can_resume else self.delivery
        requests = [replace(request, delivery=delivery) for request in parsed.requests]
        streams = [self._handler.generate(request, parsed.timeout_s) for request in requests]
        events = streams[0] if len(streams) == 1 else merged(parsed.request_id, streams, parsed.num_sequences)
        await self._send_events(client, parsed, events, None)

    async def _resume(self, client: Client, parsed: P, last_event_id: bytes, *, has_request_id: bool) -> None:
        if not has_request_id:
            raise InvalidRequest("x-request-id", "is required with last-event-id: it names the stream that goes on")
        if not parsed.is_stream:
            raise InvalidRequest("stream", "must be true with last-event-id")
        positions = parse_event_id(last_event_id.decode("latin-1"))
        if len(positions) != parsed.num_sequences:
            raise InvalidRequest("last-event-id", f"is of {len(positions)} sequences, but n is {parsed.num_sequences}")
        if len(parsed.requests) > 1:
            raise InvalidRequest("last-event-id", "is of a stream of several prompts, which can't be continued")
        events = self._handler.resume(parsed.request_id, positions, parsed.timeout_s, repeat=parsed.requests[0])
        await self._send_events(client, parsed, events, positions)

    async def _send_events(self, client: Client, parsed: P, events: Events, positions: Sequence[int] | None) -> None:
        """Send a stream. `positions`: where a stream that was begun before continues; None: at its beginning."""
        async with aclosing(events):
            accepted = await accepted_of(events)
            client.will_stream([*self.error_form.id_headers(accepted.request_id), *seed_headers(accepted)])
            num_sequences = parsed.num_sequences * len(parsed.requests)
            writer = self._writer(parsed, accepted, [0] * num_sequences if positions is None else positions)
            await stream(client, events, writer, writer.opening() if positions is None else b"")

    async def _whole(self, client: Client, parsed: P) -> None:
        # Requests with log-probabilities, which are large, count as live until the client has read them.
        async with AsyncExitStack() as unread:
            answers = await gather_all([self._collect(request, parsed, unread) for request in parsed.requests])
            headers = [
                JSON,
                *self.error_form.id_headers(parsed.request_id),
                *seed_headers(answers[0].accepted),
                *path_headers(*(answer.finished for answer in answers)),
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
                is_of_one = fingerprint == self._model.card.fingerprint and answer.finished.bit_exact is not False
                return replace(answer, fingerprint=fingerprint if is_of_one else "")
            except VersionGone:
                if is_anew:
                    raise
                is_anew = True
                if parsed.timeout_s is not None:
                    timeout_s = max(0.001, parsed.timeout_s - (self._clock.monotonic() - started))


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
