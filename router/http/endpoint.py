"""What all endpoints with a body have in common: reading it, doing long work on it, naming its fields in refusals."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import copy_context
from random import Random
from typing import Any, TypeVar

from starlette.types import Receive, Scope, Send

from baton.errors import InvalidRequest
from baton.messages.generation import ModelCard
from baton.messages.ids import REQUEST_ID_PATTERN, new_request_id
from baton.text.chat_template import FIELD as TEMPLATE_FIELD
from router.handler import Handler
from router.http.bodies.content_parts import message_parts
from router.http.bodies.fields import Strict
from router.http.client import COMMENT, Client
from router.http.errors import OPENAI
from router.http.json_body import MAX_BODY_BYTES, LargeBodies, LargeBody, base64_bytes, is_small, parse_json, read_body
from router.http.model import ServedModel

T = TypeVar("T")
JSON: tuple[bytes, bytes] = (b"content-type", b"application/json")
"""The header of answers in JSON."""
_MAX_TIMEOUT_MS = 24 * 3600 * 1000
_IMAGE_TYPES = ("image", "image_url", "input_image")
"""The parts that are images, in all APIs."""


class HttpCall:
    """One request of a client: its headers, its parsed body, and the way to do long work on that in a thread.

    `more_bytes` is how much such work reads beside the body.
    """

    def __init__(
        self,
        handler: Handler,
        card: ModelCard,
        scope: Scope,
        place: LargeBody,
        content: bytes,
        found: dict[str, Any],
    ) -> None:
        """`place`: what the body takes among the large ones. `content`: the body, of which `found` was made."""
        self._handler = handler
        self._place = place
        self._content = content
        self.found = found
        """The body's fields."""
        # Images in the body are as large as the answer is long to come, so only the names are kept.
        self.sent = frozenset(name for name, value in found.items() if value is not None)
        """The names of the fields that the client sent."""
        self.headers: Mapping[bytes, bytes] = dict(scope["headers"])
        self.request_id: str = scope["state"]["request_id"]
        self.card = card
        """The model's card when the request came."""

    @property
    def traceparent(self) -> str:
        """The W3C traceparent of the caller's span; empty: it has none."""
        return self.headers.get(b"traceparent", b"").decode("latin-1")

    @property
    def last_event_id(self) -> bytes | None:
        """The last event that the client has of a stream that is to go on; None: it begins one."""
        return self.headers.get(b"last-event-id")

    @property
    def timeout_s(self) -> float | None:
        """The seconds of the header x-request-timeout-ms; raises InvalidRequest."""
        header = self.headers.get(b"x-request-timeout-ms")
        if header is None:
            return None
        # The length is checked first: Python reads no number of thousands of digits.
        if not (len(header) <= 12 and header.isdigit() and 0 < int(header) <= _MAX_TIMEOUT_MS):
            raise InvalidRequest("x-request-timeout-ms", f"must be 1 to {_MAX_TIMEOUT_MS}")
        return int(header) / 1e3

    def check_request_id(self, in_body: str | None) -> None:
        """Raises InvalidRequest if the body has another request id than the header."""
        if in_body not in (None, self.request_id):
            raise InvalidRequest("request_id", "differs from x-request-id: send only the header")

    @property
    def image_bytes(self) -> int:
        """What images count beside the body, if its messages have any: headers and tokens take long for their bytes."""
        has_images = any(part.get("type") in _IMAGE_TYPES for part in message_parts(self.found))
        return MAX_BODY_BYTES if has_images else 0

    async def fetch_images(self, model: ServedModel) -> None:
        """Replace the URLs of images by the images, where the operator lets the router fetch them."""
        if model.image_fetcher is not None:
            self.found = await model.image_fetcher.with_images(self.found, self._place)

    async def in_thread(self, work: Callable[..., T], *args: object, more_bytes: int = 0) -> T:
        """The result of work on the body, in a thread if it may take long."""
        if is_small(self._content, more_bytes):
            return work(*args)
        return await self._handler.in_thread(copy_context().run, work, *args)

    async def rendered(self, work: Callable[..., T], *args: object, more_bytes: int = 0) -> T:
        """The result of work that renders a chat in a child process, for which a thread waits."""
        if self.found.get(TEMPLATE_FIELD):
            return await self._handler.in_waiting_thread(copy_context().run, work, *args)
        is_long = not is_small(self._content, more_bytes)
        return await self._handler.in_chat_thread(copy_context().run, work, *args, is_long=is_long)

    def drop_body(self) -> None:
        """Drop the body, of which nothing is needed any more, while the request keeps its place."""
        self._content, self.found = b"", {}

    def release(self) -> None:
        """The body and its fields are needed no more. Idempotent."""
        self.drop_body()
        self._place.release()


class BodyEndpoint:
    """An ASGI application that answers requests with a body, and whose exceptions the front turns into answers."""

    error_form = OPENAI
    body: type[Strict] = Strict
    """The body, whose names of fields refusals have."""
    max_body_bytes = MAX_BODY_BYTES
    """The most bytes of a body."""
    takes_json = True
    """Whether a body must be declared as JSON."""
    takes_images = False
    """Whether a body may have images, by which it may be larger."""
    keep_alive = COMMENT
    """Sent in a stream while there is nothing else to send."""

    def __init__(self, handler: Handler, model: ServedModel, keep_alive_s: float | None = None) -> None:
        """`keep_alive_s`: as in `Client`."""
        self._handler = handler
        self._model = model
        self._keep_alive_s = keep_alive_s
        self._large_bodies = LargeBodies()
        if self.takes_images:
            self.max_body_bytes = MAX_BODY_BYTES + base64_bytes(model.most_image_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        parse = self._parser_for(scope)
        with self._large_bodies.place() as place:
            call = await self._read(scope, receive, place, parse)
            try:
                async with Client(receive, send, self._keep_alive_s, self.keep_alive) as client:
                    await self._answer(client, call)
            except InvalidRequest as error:
                # The core, and what makes prompts, know a field by one name, whatever API it came in.
                raise error.renamed(self.body.own_name(error.field, call.sent)) from error

    def _parser_for(self, scope: Scope) -> Callable[[bytes], dict[str, Any]]:
        """What makes fields of the body; raises BatonErrors for what is refused before the body is read."""
        return parse_json

    async def _read(
        self, scope: Scope, receive: Receive, place: LargeBody, parse: Callable[[bytes], dict[str, Any]]
    ) -> HttpCall:
        content = await read_body(scope, receive, self.max_body_bytes, place, is_json=self.takes_json)
        if is_small(content):
            body = parse(content)
        else:
            body = await self._handler.in_thread(copy_context().run, parse, content)
        return HttpCall(self._handler, self._model.card, scope, place, content, body)

    async def _answer(self, client: Client, call: HttpCall) -> None:
        """Answer one request; raises BatonErrors."""
        raise NotImplementedError


def request_id_of(scope: Scope, rng: Random) -> str:
    """The client's x-request-id, or a new id; raises InvalidRequest for an id that is not valid."""
    header = dict(scope["headers"]).get(b"x-request-id")
    if header is None:
        return new_request_id(rng)
    text = header.decode("latin-1")
    if not REQUEST_ID_PATTERN.match(text):
        raise InvalidRequest("x-request-id", "must be 1 to 64 letters, digits or _ . : -")
    return str(text)
