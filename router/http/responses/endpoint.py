"""The endpoint /v1/responses: makes a response, and stores it for later ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

from baton.clock import Clock
from baton.errors import InvalidRequest
from baton.messages.generation import Accepted, ModelCard
from baton.messages.request_limits import MAX_MESSAGES
from baton.security.callers import current_caller
from router.admission.validation import check_model, longest_answer
from router.http.answers import Collected, logprob_lists
from router.http.bodies.strict import read_as
from router.http.endpoints import Endpoint, EndpointRequest, Handler
from router.http.errors import HttpError, Kind
from router.http.logprobs import ChatLogprobs
from router.http.model import ServedModel
from router.http.responses.bodies import ResponsesBody
from router.http.responses.events import ResponseWriter
from router.http.responses.objects import ResponseDraft
from router.http.responses.store import Item, ResponseStore, StoredResponse


@dataclass(frozen=True, slots=True)
class ResponsesRequest(EndpointRequest):
    """The parsed request of a client for a response."""

    draft: ResponseDraft
    items: Sequence[Item]
    """The conversation so far."""
    is_stored: bool


class ResponsesEndpoint(Endpoint[ResponsesRequest]):
    """POST /v1/responses"""

    names = {  # noqa: RUF012
        "request_id": ("request_id", "x-request-id"),
        "prompt": ("prompt", "input"),
        "messages": ("messages", "input"),
        "logprobs": ("logprobs", "top_logprobs"),
        "max_tokens": ("max_tokens", "max_output_tokens"),
        "json_schema": ("json_schema", "text"),
    }

    def __init__(
        self, handler: Handler, model: ServedModel, clock: Clock, keep_alive_s: float, rng: Random, store: ResponseStore
    ) -> None:
        super().__init__(handler, model, clock, keep_alive_s)
        self._rng = rng
        self._store = store

    def _parser(self, found: Mapping[str, Any]) -> Callable[..., ResponsesRequest]:
        previous_id = found.get("previous_response_id")
        is_name = isinstance(previous_id, str)
        previous = self._store.find(current_caller.get().tenant, previous_id) if is_name else None  # type: ignore[arg-type]
        return partial(self._parse_after, previous, f"{self._rng.getrandbits(128):032x}")

    def _parse_after(
        self,
        previous: StoredResponse | None,
        name: str,
        found: Mapping[str, Any],
        request_id: str,
        timeout_s: float | None,
        card: ModelCard,
    ) -> ResponsesRequest:
        """`previous`: the stored response that this one continues. `name`: what is unique in the ids of this one."""
        body = read_as(ResponsesBody, found)
        _check_combination(body, self._store)
        if body.previous_response_id is not None and previous is None:
            raise _no_previous(body.previous_response_id)
        check_model(body.model or "", card)
        earlier = previous.items if previous is not None else ()
        added = [Item(f"msg_{name}_{place}", role, texts) for place, (role, texts) in enumerate(body.input)]
        items = (*earlier, *added)
        if len(items) > MAX_MESSAGES:
            raise InvalidRequest(
                "input", f"makes a conversation of {len(items)} items; at most {MAX_MESSAGES} are taken"
            )
        prompt = self._model.prompt(_messages(body.instructions, items))
        max_tokens = body.max_output_tokens
        if max_tokens is None:
            max_tokens = longest_answer(card, len(prompt))
        request = body.request(prompt, request_id, max_tokens)
        is_stored = self._store.is_on and body.store is not False
        draft = ResponseDraft(
            id=f"resp_{name}",
            item_id=f"msg_{name}",
            created_at=int(self._clock.wall()),
            model=card.name,
            echoed=body.echoed(card.defaults) | {"store": is_stored},
            has_logprobs=request.logprobs is not None,
        )
        return ResponsesRequest(request_id, [request], bool(body.stream), 1, timeout_s, draft, items, is_stored)

    def _writer(self, parsed: ResponsesRequest, accepted: Accepted, positions: Sequence[int]) -> ResponseWriter:
        return ResponseWriter(parsed.draft, self._model.spelling, self._clock.wall, partial(self._keep, parsed))

    async def _whole_answer(self, parsed: ResponsesRequest, answers: Sequence[Collected]) -> bytes:
        (answer,) = answers
        text = "".join(chunk.text for chunk in answer.chunks[0])
        logprobs = "[]"
        if parsed.draft.has_logprobs:
            logprobs = (await logprob_lists(ChatLogprobs(self._model.spelling), answer.chunks[0]))["content"]
        response = parsed.draft.ended(text, logprobs, answer.ends[0][0], answer.finished, self._clock.wall())
        return self._keep(parsed, response, text)

    def _keep(self, parsed: ResponsesRequest, response: str, text: str) -> bytes:
        """The response in JSON as bytes, which are stored if the client wants that."""
        content = encoded(response)
        if parsed.is_stored:
            items = (*parsed.items, Item(parsed.draft.item_id, "assistant", (text,)))
            self._store.put(current_caller.get().tenant, StoredResponse.of(parsed.draft.id, content, items))
        return content


def encoded(json_text: str) -> bytes:
    """JSON as bytes; what is not valid Unicode in it is escaped."""
    return json_text.encode(errors="backslashreplace")


def _messages(instructions: str | None, items: Sequence[Item]) -> Sequence[Mapping[str, str]]:
    """The messages for the model's template."""
    begin = [{"role": "system", "content": instructions}] if instructions else []
    return [*begin, *({"role": item.role, "content": item.text} for item in items)]


def _check_combination(body: ResponsesBody, store: ResponseStore) -> None:
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options", "needs stream")
    if body.store and not store.is_on:
        raise InvalidRequest("store", "is not possible here: this router keeps no responses (--stored-responses)")


def _no_previous(response_id: str) -> HttpError:
    kind = Kind(404, "invalid_request_error", "previous_response_not_found")
    message = f"previous_response_id: this router does not have {response_id[:80]!r} (any more); send the whole input"
    return HttpError(kind, message, param="previous_response_id")
