"""The endpoints /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from starlette.types import Receive, Scope, Send

from baton.errors import InvalidRequest
from baton.messages.generation import Accepted, ModelCard
from router.admission.validation import check_model, longest_answer
from router.http.answers import Collected, in_turns
from router.http.bodies.fields import read_as
from router.http.bodies.tools import ToolBody
from router.http.chat_plan import ChatPlan, plan_offer
from router.http.client import Client
from router.http.endpoint import (
    Endpoint,
    EndpointRequest,
    Handler,
    has_images,
    in_thread_if_large,
    render_chat,
    with_client_names,
)
from router.http.errors import Headers
from router.http.json_body import MAX_BODY_BYTES, LargeBodies, LargeBody, base64_bytes, parse_json, read_body
from router.http.messages.bodies import CountBody, MessagesBody
from router.http.messages.events import PING, MessageLabel, MessageWriter, WholeContent, usage_of
from router.http.model import ServedModel
from router.http.parsed_text import TextParsing

VERSIONS = (b"2023-06-01", b"2026-10-21")
"""The versions of Anthropic's API that clients may name in `anthropic-version`.

Answers are the same in both. The later one has no temperature, top_p and top_k; here they are taken in both, since the
models that are served need them.
"""
_NAMES: Mapping[str, Sequence[str]] = {
    "request_id": ("request_id", "x-request-id"),
    "prompt": ("prompt", "messages"),
    "images": ("images", "messages"),
    "stop": ("stop", "stop_sequences"),
}


@dataclass(frozen=True, slots=True)
class MessagesRequest(EndpointRequest):
    """The parsed request of a client for a message."""

    label: MessageLabel
    parsing: TextParsing
    """How the text of the answer is parsed."""
    shows_thinking: bool
    """Whether the answer has the text of its reasoning."""


class MessagesEndpoint(Endpoint[MessagesRequest]):
    """POST /v1/messages"""

    names = _NAMES
    takes_images = True
    keep_alive = PING

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        _check_version(scope)
        await super().__call__(scope, receive, send)

    def _parse(
        self, found: Mapping[str, Any], request_id: str, timeout_s: float | None, card: ModelCard
    ) -> MessagesRequest:
        body = read_as(MessagesBody, found)
        plan = _planned(self._model, body, card)
        # A client that has to send max_tokens can't know what its prompt leaves, so more is no error.
        left = longest_answer(card, len(plan.prompt))
        request = body.request(plan.prompt, request_id, min(body.max_tokens, left))
        request = plan.applied(replace(request, images=body.images))
        label = MessageLabel(request_id, body.model or card.name, body.max_tokens > left)
        is_stream, shows_thinking = bool(body.stream), body.shows_thinking
        return MessagesRequest(request_id, [request], is_stream, 1, timeout_s, label, plan.parsing, shows_thinking)

    def _writer(self, parsed: MessagesRequest, accepted: Accepted, positions: Sequence[int]) -> MessageWriter:
        sequence = parsed.parsing.sequence(parsed.request_id, 0)
        return MessageWriter(parsed.label, accepted.prompt_tokens, sequence, shows_thinking=parsed.shows_thinking)

    async def _whole_answer(self, parsed: MessagesRequest, answers: Sequence[Collected]) -> AsyncGenerator[bytes, None]:
        (answer,) = answers
        sequence, content = parsed.parsing.sequence(parsed.request_id, 0), WholeContent()
        async for chunk in in_turns(answer.chunks[0]):
            content.add(sequence.parts(chunk.text))
        finish_reason, stop_reason = answer.ends[0]
        content.finish(sequence.last_parts(), is_complete=finish_reason != "length")
        stop = parsed.label.stop(sequence.finish_reason(finish_reason), stop_reason)
        blocks = content.blocks(shows_thinking=parsed.shows_thinking)
        yield parsed.label.message(blocks, usage_of(answer.finished), stop)

    def _id_headers(self, request_id: str) -> Headers:
        return id_headers(request_id)


class CountTokens:
    """POST /v1/messages/count_tokens: an ASGI application, whose exceptions the front turns into answers."""

    def __init__(self, handler: Handler, model: ServedModel) -> None:
        self._handler = handler
        self._model = model
        self._large_bodies = LargeBodies()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._large_bodies.place() as place:
            await self._answer(scope, receive, send, place)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, place: LargeBody) -> None:
        _check_version(scope)
        content = await read_body(scope, receive, MAX_BODY_BYTES + base64_bytes(self._model.most_image_bytes), place)
        found = await in_thread_if_large(self._handler, content, parse_json, content)
        async with Client(receive, send) as client:
            with with_client_names(_NAMES, found):
                if self._model.image_fetcher is not None:
                    await self._model.image_fetcher.put_images_in(found, place)
                more_bytes = MAX_BODY_BYTES if has_images(found) else 0
                count = await render_chat(self._handler, content, found, self._count, found, more_bytes=more_bytes)
            headers = [(b"content-type", b"application/json"), *id_headers(scope["state"]["request_id"])]
            await client.answer(200, headers, json.dumps({"input_tokens": count}).encode())

    def _count(self, found: Mapping[str, Any]) -> int:
        return len(_planned(self._model, read_as(CountBody, found), self._model.card).prompt)


def id_headers(request_id: str) -> Headers:
    """The headers of an answer that name its request: Anthropic's and the one of all APIs."""
    return [(b"request-id", request_id.encode()), (b"x-request-id", request_id.encode())]


def _check_version(scope: Scope) -> None:
    version = dict(scope["headers"]).get(b"anthropic-version", VERSIONS[0])
    if version not in VERSIONS:
        known = " or ".join(known.decode() for known in VERSIONS)
        raise InvalidRequest("anthropic-version", f"must be {known}, not {version[:32].decode('latin-1')!r}")


def _planned(model: ServedModel, body: CountBody, card: ModelCard) -> ChatPlan:
    """The plan of a conversation; raises InvalidRequest or UnknownModel."""
    check_model(body.model, card)
    body.check_thinking(reasons=model.answer_parsers.reasons)
    messages, is_prefilled = body.conversation(), body.is_prefilled

    def text_with(tools: Sequence[ToolBody]) -> str:
        return model.text_of(
            messages,
            tools,
            body.variables(),
            add_generation_prompt=not is_prefilled,
            continue_final_message=is_prefilled,
            images=body.images,
        )

    return plan_offer(body.offer(), text_with, model, card)
