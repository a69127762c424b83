"""The routes of stored responses: to read one, its input, and to delete it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from baton.errors import BatonError, InvalidRequest
from baton.security.matrix import current_caller
from router.http.errors import HttpError, Kind
from router.http.responses.bodies import IMAGE_URLS
from router.http.responses.endpoint import encoded
from router.http.responses.items import Item
from router.http.responses.objects import as_text
from router.http.responses.store import ResponseStore, StoredResponse

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
    places = [place for place, item in enumerate(ordered) if item.id == after]
    if not places:
        raise InvalidRequest("after", "is no item of this response")
    return ordered[places[0] + 1 :]


def _limit(text: str) -> int:
    if not (len(text) <= 3 and text.isascii() and text.isdigit() and 1 <= int(text) <= _MAX_LISTED):
        raise InvalidRequest("limit", f"must be 1 to {_MAX_LISTED}")
    return int(text)
