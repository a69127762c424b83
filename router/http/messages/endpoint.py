"""The endpoints /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from starlette.types import Scope

from baton.errors import InvalidRequest
from baton.messages.generation import Accepted
from router.admission.checks import check_model
from router.admission.sampling import longest_answer
from router.http.answers import Collected, in_turns
from router.http.bodies.fields import read_as
from router.http.bodies.tools import ToolBody
from router.http.chat_plan import ChatPlan, plan_offer
from router.http.client import Client
from router.http.endpoint import JSON, BodyEndpoint, HttpCall
from router.http.errors import ANTHROPIC
from router.http.generating import EndpointRequest, GeneratingEndpoint
from router.http.messages.bodies import CountBody, MessagesBody
from router.http.messages.events import PING, MessageInProgress, MessageLabel, MessageWriter
from router.http.model import ServedModel
from router.http.parsed_text import TextParsing

VERSIONS = (b"2023-06-01", b"2026-10-21")
"""The versions of Anthropic's API that clients may name in `anthropic-version`.

Answers are the same in both. The later one has no temperature, top_p and top_k; here they are taken in both, since the
models that are served need them.
"""


@dataclass(frozen=True, slots=True)
class MessagesRequest(EndpointRequest):
    """The parsed request of a client for a message."""

    label: MessageLabel
    parsing: TextParsing
    """How the text of the answer is parsed."""
    shows_thinking: bool
    """Whether the answer has the text of its reasoning."""

    def begun(self) -> MessageInProgress:
        """The message, which has no blocks yet."""
        sequence = self.parsing.sequence(self.request_id, 0)
        return MessageInProgress(self.label, sequence, shows_thinking=self.shows_thinking)


class _AnthropicEndpoint(BodyEndpoint):
    """The common part of both endpoints."""

    error_form = ANTHROPIC
    takes_images = True

    def _parser_for(self, scope: Scope) -> Callable[[bytes], dict[str, Any]]:
        version = dict(scope["headers"]).get(b"anthropic-version", VERSIONS[0])
        if version not in VERSIONS:
            known = " or ".join(known.decode() for known in VERSIONS)
            raise InvalidRequest("anthropic-version", f"must be {known}, not {version[:32].decode('latin-1')!r}")
        return super()._parser_for(scope)


class MessagesEndpoint(_AnthropicEndpoint, GeneratingEndpoint[MessagesRequest]):
    """POST /v1/messages"""

    body = MessagesBody
    keep_alive = PING

    def _parse(self, call: HttpCall, timeout_s: float | None) -> MessagesRequest:
        request_id, card = call.request_id, call.card
        body = read_as(MessagesBody, call.found)
        plan = _planned(self._model, body, call)
        # A client that has to send max_tokens can't know what its prompt leaves, so more is no error.
        left = longest_answer(card, len(plan.prompt))
        request = body.request(plan.prompt, request_id, min(body.max_tokens, left))
        request = plan.applied(replace(request, images=body.images))
        label = MessageLabel(request_id, body.model or card.name, body.max_tokens > left)
        is_stream, shows_thinking = bool(body.stream), body.shows_thinking
        return MessagesRequest(request_id, [request], is_stream, 1, timeout_s, label, plan.parsing, shows_thinking)

    def _writer(self, parsed: MessagesRequest, accepted: Accepted, positions: Sequence[int]) -> MessageWriter:
        return MessageWriter(parsed.begun(), accepted.prompt_tokens)

    async def _whole_answer(self, parsed: MessagesRequest, answers: Sequence[Collected]) -> AsyncGenerator[bytes, None]:
        (answer,) = answers
        message = parsed.begun()
        async for chunk in in_turns(answer.chunks[0]):
            message.keep(message.take(chunk))
        message.keep(message.finish(*answer.ends[0]))
        yield message.whole(answer.finished)


class CountTokens(_AnthropicEndpoint):
    """POST /v1/messages/count_tokens"""

    body = CountBody

    async def _answer(self, client: Client, call: HttpCall) -> None:
        await call.fetch_images(self._model)
        count = await call.rendered(self._count, call, more_bytes=call.image_bytes)
        headers = [JSON, *self.error_form.id_headers(call.request_id)]
        await client.answer(200, headers, json.dumps({"input_tokens": count}).encode())

    def _count(self, call: HttpCall) -> int:
        return len(_planned(self._model, read_as(CountBody, call.found), call).prompt)


def _planned(model: ServedModel, body: CountBody, call: HttpCall) -> ChatPlan:
    """The plan of a conversation; raises InvalidRequest or UnknownModel."""
    check_model(body.model, call.card)
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

    return plan_offer(body.offer(), text_with, model, call.card)
