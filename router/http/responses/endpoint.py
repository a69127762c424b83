"""The endpoints below /v1/responses: one makes a response and stores it, the others read or delete stored ones."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from baton.clock import Clock
from baton.errors import BatonError, InvalidRequest
from baton.messages.generation import Accepted
from baton.messages.request_limits import MAX_MESSAGES, MAX_REQUEST_BYTES
from baton.security.matrix import current_caller
from router.admission.checks import check_model
from router.admission.sampling import longest_answer
from router.handler import Handler
from router.http.answers import Collected, in_turns, runs_of
from router.http.bodies.fields import read_as
from router.http.chat_plan import plan_offer, reasoning_variables
from router.http.client import Client
from router.http.completions.logprobs import ChatLogprobs
from router.http.endpoint import JSON, HttpCall
from router.http.errors import HttpError, Kind
from router.http.generating import EndpointRequest, GeneratingEndpoint
from router.http.json_body import MAX_BODY_BYTES
from router.http.model import ServedModel
from router.http.parsed_text import TextParsing
from router.http.responses.bodies import IMAGE_URLS, ResponsesBody
from router.http.responses.events import ResponseWriter
from router.http.responses.items import Item, template_messages
from router.http.responses.output import EndedResponse, ResponseDraft, ResponseInProgress, as_text
from router.http.responses.store import ResponseStore, StoredResponse


@dataclass(frozen=True, slots=True)
class ResponsesRequest(EndpointRequest):
    """The parsed request of a client for a response."""

    draft: ResponseDraft
    name: str
    """What is unique in the ids of the response."""
    items: Sequence[Item]
    """The conversation so far."""
    num_added: int
    """How many items of the conversation came with the request."""
    parsing: TextParsing
    """How the text of the answer is parsed."""
    is_stored: bool

    def begun(self) -> ResponseInProgress:
        """The response, which has no items yet."""
        return ResponseInProgress(self.draft, self.parsing.sequence(self.name, 0), self.name, self.num_added)


class ResponsesEndpoint(GeneratingEndpoint[ResponsesRequest]):
    """POST /v1/responses"""

    body = ResponsesBody
    takes_images = True
    delivery = "json"

    def __init__(
        self, handler: Handler, model: ServedModel, clock: Clock, keep_alive_s: float, rng: Random, store: ResponseStore
    ) -> None:
        super().__init__(handler, model, clock, keep_alive_s)
        self._rng = rng
        self._store = store

    async def _parsed(self, call: HttpCall, timeout_s: float | None) -> ResponsesRequest:
        previous_id, previous, more_bytes = call.found.get("previous_response_id"), None, call.image_bytes
        if isinstance(previous_id, str):
            # The store belongs to the event loop, and the body may be parsed in a thread.
            previous = self._store.find(current_caller.get().tenant, previous_id)
        if previous is not None:
            more_bytes += MAX_BODY_BYTES if any(item.images for item in previous.items) else previous.num_bytes
        parse = partial(self._parse_after, previous, f"{self._rng.getrandbits(128):032x}")
        return await call.rendered(parse, call, timeout_s, more_bytes=more_bytes)

    def _parse_after(
        self, previous: StoredResponse | None, name: str, call: HttpCall, timeout_s: float | None
    ) -> ResponsesRequest:
        """`previous`: the stored response that this one continues. `name`: what is unique in the ids of this one."""
        request_id, card = call.request_id, call.card
        body = read_as(ResponsesBody, call.found)
        _check_combination(body, self._store)
        if body.previous_response_id is not None and previous is None:
            raise _no_previous(body.previous_response_id)
        check_model(body.model or "", card)
        earlier = previous.items if previous is not None else ()
        added = [replace(item, id=f"{item.prefix}_{name}_{index}") for index, item in enumerate(body.input)]
        items = (*earlier, *added)
        _check_size(items)
        messages = template_messages(body.instructions, items)
        images = [image.data for item in items for image in item.images]
        text_with = partial(self._model.text_of, messages, variables=reasoning_variables(body.effort), images=images)
        plan = plan_offer(body.offer(), text_with, self._model, card)
        max_tokens = body.max_output_tokens
        if max_tokens is None:
            max_tokens = longest_answer(card, len(plan.prompt), 1, body.num_logprobs)
        request = plan.applied(replace(body.request(plan.prompt, request_id, max_tokens), images=images))
        is_stored = self._store.is_on and body.store is not False
        draft = ResponseDraft(
            id=f"resp_{name}",
            created_at=int(self._clock.wall()),
            model=body.model or card.name,
            echoed=body.echoed(card.defaults) | {"store": is_stored},
            has_logprobs=request.logprobs is not None,
        )
        head = request_id, [request], bool(body.stream), 1, timeout_s
        return ResponsesRequest(*head, draft, name, items, len(added), plan.parsing, is_stored)

    def _writer(self, parsed: ResponsesRequest, accepted: Accepted, positions: Sequence[int]) -> ResponseWriter:
        return ResponseWriter(parsed.begun(), self._model.spelling, self._clock.wall, partial(self._keep, parsed))

    async def _whole_answer(
        self, parsed: ResponsesRequest, answers: Sequence[Collected]
    ) -> AsyncGenerator[bytes, None]:
        (answer,) = answers
        response = parsed.begun()
        if parsed.draft.has_logprobs:
            writer = ChatLogprobs(self._model.spelling)
            for run in runs_of(answer.chunks[0]):
                await asyncio.sleep(0)
                response.take_logprobs(json.dumps(writer.take(run)["content"], ensure_ascii=False)[1:-1])
        async for chunk in in_turns(answer.chunks[0]):
            response.take(chunk)
        response.finish(answer.ends[0][0])
        yield self._keep(parsed, response.ended(answer.finished, self._clock.wall()))

    def _keep(self, parsed: ResponsesRequest, ended: EndedResponse) -> bytes:
        """The response in JSON as bytes, which are stored if the client wants that."""
        content = encoded(ended.json)
        if parsed.is_stored:
            own = [item.as_item() for item in ended.items]
            stored = StoredResponse.of(parsed.draft.id, content, parsed.items, own)
            self._store.put(current_caller.get().tenant, stored)
        return content


class InputTokens(ResponsesEndpoint):
    """POST /v1/responses/input_tokens: counts the tokens of the prompt that a response would have; makes none."""

    async def _whole(self, client: Client, parsed: ResponsesRequest) -> None:
        count = len(parsed.requests[0].prompt or ())
        headers = [JSON, *self.error_form.id_headers(parsed.request_id)]
        answer = {"object": "response.input_tokens", "input_tokens": count}
        await client.answer(200, headers, json.dumps(answer).encode())

    async def _stream(self, client: Client, parsed: ResponsesRequest) -> None:
        await self._whole(client, parsed)


def encoded(json_text: str) -> bytes:
    """JSON as bytes; what is not valid Unicode in it is escaped."""
    return json_text.encode(errors="backslashreplace")


def _check_combination(body: ResponsesBody, store: ResponseStore) -> None:
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options", "needs stream")
    if body.store and not store.is_on:
        raise InvalidRequest("store", "is not possible here: this router keeps no responses (--stored-responses)")


def _check_size(items: Sequence[Item]) -> None:
    """Raises InvalidRequest for a conversation that is larger than one that comes in a single body may be."""
    if len(items) > MAX_MESSAGES:
        raise InvalidRequest("input", f"makes a conversation of {len(items)} items; at most {MAX_MESSAGES} are taken")
    num_bytes = sum(item.num_text_bytes for item in items)
    if num_bytes > MAX_REQUEST_BYTES:
        reason = f"makes a conversation with {num_bytes} bytes of text; at most {MAX_REQUEST_BYTES} are taken"
        raise InvalidRequest("input", reason)


def _no_previous(response_id: str) -> HttpError:
    kind = Kind(404, "invalid_request_error", "previous_response_not_found")
    message = f"previous_response_id: this router does not have {response_id[:80]!r} (any more); send the whole input"
    return HttpError(kind, message, param="previous_response_id")


_MAX_LISTED, _DEFAULT_LISTED = 100, 20
_PATH = "/v1/responses/{id}"
_INCLUDE = ("include", "include[]")


def stored_routes(store: ResponseStore) -> Sequence[Route]:
    """The routes of one router's stored responses."""

    async def retrieve(request: Request) -> Response:
        _check_query(request, {"include": None, "include_obfuscation": "false", "stream": "false"})
        return Response(_found(store, request).json, media_type="application/json")

    async def delete(request: Request) -> Response:
        _check_query(request, {})
        response_id = request.path_params["id"]
        if not store.remove(current_caller.get().tenant, response_id):
            raise _not_found(store, response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    async def cancel(request: Request) -> Response:
        response = _found(store, request)
        message = f"{response.id} can't be cancelled: it is no response in the background, and has ended"
        raise HttpError(Kind(400, "invalid_request_error"), message)

    async def input_items(request: Request) -> Response:
        _check_query(request, {"include": None, "after": None, "limit": None, "order": None})
        items = _listed(_found(store, request).input_items, request.query_params)
        limit = _limit(request.query_params.get("limit", str(_DEFAULT_LISTED)))
        page = items[:limit]
        included = [value for name, value in request.query_params.multi_items() if name in _INCLUDE]
        # Images are large: their page is made in a thread.
        with_images = any(item.images for item in page) and IMAGE_URLS in included
        make = partial(_page, page, with_images=with_images, has_more=len(items) > limit)
        content = await asyncio.to_thread(make) if with_images else make()
        return Response(content, media_type="application/json")

    return [
        Route(_PATH, retrieve, methods=["GET"]),
        Route(_PATH, delete, methods=["DELETE"]),
        Route(f"{_PATH}/cancel", cancel, methods=["POST"]),
        Route(f"{_PATH}/input_items", input_items, methods=["GET"]),
    ]


def _page(page: Sequence[Item], *, with_images: bool, has_more: bool) -> bytes:
    answer = {
        "object": "list",
        "data": [item.as_object(with_images=with_images) for item in page],
        "first_id": page[0].id if page else "",
        "last_id": page[-1].id if page else "",
        "has_more": has_more,
    }
    return encoded(as_text(answer))


def _found(store: ResponseStore, request: Request) -> StoredResponse:
    response_id = request.path_params["id"]
    response = store.find(current_caller.get().tenant, response_id)
    if response is None:
        raise _not_found(store, response_id)
    return response


def _not_found(store: ResponseStore, response_id: str) -> BatonError:
    kept_s = store.bounds.stored_response_s
    message = (
        f"this router has no response {response_id[:80]!r}: one is kept for {kept_s:g} s, by the router that made it"
    )
    return HttpError(Kind(404, "invalid_request_error", "not_found"), message)


def _check_query(request: Request, served: Mapping[str, str | None]) -> None:
    """Raises InvalidRequest for a parameter of the URL that is not in `served`, or has another value than there."""
    for name, value in request.query_params.multi_items():
        # Only `include` is a list, which clients write with brackets.
        plain = "include" if name in _INCLUDE else name
        if plain not in served:
            raise InvalidRequest(name[:80], "is unknown, or not served here")
        if served[plain] not in (None, value):
            raise InvalidRequest(plain, f"must be {served[plain]}")


def _listed(items: Sequence[Item], query: Mapping[str, str]) -> Sequence[Item]:
    """The items from `after` on, in the wanted order: the latest first, unless the client wants another one."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order", "must be asc or desc")
    ordered = list(items) if order == "asc" else list(reversed(items))
    if (after := query.get("after")) is None:
        return ordered
    places = [index for index, item in enumerate(ordered) if item.id == after]
    if not places:
        raise InvalidRequest("after", "is no item of this response")
    return ordered[places[0] + 1 :]


def _limit(text: str) -> int:
    if not (len(text) <= 3 and text.isascii() and text.isdigit() and 1 <= int(text) <= _MAX_LISTED):
        raise InvalidRequest("limit", f"must be 1 to {_MAX_LISTED}")
    return int(text)
