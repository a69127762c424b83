"""The ASGI application: its routes, and the one place where exceptions become error objects of the path's API."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from random import Random

from starlette.exceptions import HTTPException
from starlette.routing import Match, Route, Router
from starlette.types import Message, Receive, Scope, Send

from baton.clock import Clock
from baton.errors import BatonError
from baton.messages.ids import new_request_id
from baton.security.matrix import current_caller, is_page
from baton.security.pages import PageAuthenticator
from router.http.audio.endpoint import AudioBodies, SpeechEndpoint, SpeechRules
from router.http.bodies.ignored import HEADER, collect_ignored
from router.http.embeddings import Embeddings
from router.http.endpoints import ChatCompletions, Completions, Handler, request_id_of
from router.http.errors import Headers, HttpError, Kind, error_body, error_headers, kind_of
from router.http.html_pages import html_pages
from router.http.json_body import CLOSE, ClientGone, check_headers, is_unread
from router.http.messages.endpoint import CountTokens, MessagesEndpoint, id_headers
from router.http.messages.errors import error_object, status_of
from router.http.model import ServedModel
from router.http.responses.endpoint import InputTokens, ResponsesEndpoint
from router.http.responses.store import ResponseStore
from router.http.responses.stored import stored_routes
from router.http.scores import Classify, Rerank, Score
from router.http.status_routes import status_routes
from router.http.tokens import Detokenize, Tokenize
from router.http.unserved_paths import INSTEAD, use_instead

_log = logging.getLogger(__name__)

KEEP_ALIVE_S = 15.0
"""A stream on which nothing was sent for so long gets a comment, or a ping."""
_MESSAGES = "/v1/messages"


class HttpFront:
    """The ASGI application of one router."""

    def __init__(
        self,
        handler: Handler,
        model: ServedModel,
        why_not_ready: Callable[[], str],
        figures: Callable[[], bytes],
        clock: Clock,
        rng: Random,
        store: ResponseStore,
        keep_alive_s: float = KEEP_ALIVE_S,
        authenticator: PageAuthenticator | None = None,
        more_routes: Sequence[Route] = (),
        prompt_embeds_bytes: int = 0,
        speech: SpeechRules | None = None,
    ) -> None:
        """`store`: of /v1/responses. `more_routes`: of further pages. `prompt_embeds_bytes`: the most bytes of rows in
        place of tokens; 0: none are taken. `speech`: None: no audio is taken. Without an authenticator all are
        permitted.
        """
        self._authenticator = authenticator or PageAuthenticator()
        self._rng = rng
        completions = Completions(handler, model, clock, keep_alive_s, prompt_embeds_bytes)
        chats = ChatCompletions(handler, model, clock, keep_alive_s)
        responses = ResponsesEndpoint(handler, model, clock, keep_alive_s, rng, store)
        input_tokens = InputTokens(handler, model, clock, keep_alive_s, rng, store)
        audio = AudioBodies(speech)

        def speech_endpoint(*, translates: bool) -> SpeechEndpoint:
            return SpeechEndpoint(handler, model, keep_alive_s, speech, audio, translates=translates)

        score, rerank = Score(handler, model, clock), Rerank(handler, model, clock)
        self._routes = Router(
            [
                Route("/v1/completions", completions, methods=["POST"]),
                Route("/v1/chat/completions", chats, methods=["POST"]),
                Route(_MESSAGES, MessagesEndpoint(handler, model, clock, keep_alive_s), methods=["POST"]),
                Route(f"{_MESSAGES}/count_tokens", CountTokens(handler, model), methods=["POST"]),
                Route("/v1/responses", responses, methods=["POST"]),
                Route("/v1/responses/input_tokens", input_tokens, methods=["POST"]),
                *stored_routes(store),
                Route("/v1/audio/transcriptions", speech_endpoint(translates=False), methods=["POST"]),
                Route("/v1/audio/translations", speech_endpoint(translates=True), methods=["POST"]),
                Route("/v1/embeddings", Embeddings(handler, model), methods=["POST"]),
                *(Route(path, score, methods=["POST"]) for path in ("/v1/score", "/score")),
                *(Route(path, rerank, methods=["POST"]) for path in ("/v1/rerank", "/rerank", "/v2/rerank")),
                Route("/classify", Classify(handler, model, clock), methods=["POST"]),
                Route("/tokenize", Tokenize(handler, model), methods=["POST"]),
                Route("/detokenize", Detokenize(handler, model), methods=["POST"]),
                *html_pages(),
                *status_routes(model, clock.wall(), why_not_ready, figures),
                *more_routes,
            ],
            redirect_slashes=False,
            default=_no_such_path,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one exchange. Never raises."""
        request_id = ""
        scope["state"] = {}
        send = _naming(collect_ignored(), send)
        try:
            check_headers(scope)
            current_caller.set(self._authenticator.check(scope["path"], scope["headers"]))
            request_id = request_id_of(scope, self._rng)
            scope["state"]["request_id"] = request_id
            # With this, starlette raises for a wrong method instead of answering by itself.
            scope["app"] = self
            await (self._routes if is_page(scope["path"]) else _no_such_path)(scope, receive, send)
        except (ClientGone, asyncio.CancelledError):
            # The client is gone, or the server stops and cuts its connections: this task ends either way.
            return
        except BatonError as error:
            await self._refuse(scope, send, error, request_id)
        except HTTPException as error:
            await self._refuse(scope, send, self._translated(scope, error), request_id)
        except Exception:
            _log.exception("%s %s failed", scope["method"], scope["path"])
            await self._refuse(scope, send, BatonError("internal error; the log of the server has it"), request_id)

    def _translated(self, scope: Scope, error: HTTPException) -> HttpError:
        if error.status_code != 405:
            return HttpError(Kind(error.status_code, "invalid_request_error"), error.detail)
        if scope["path"] in INSTEAD:
            # This path only looks like one that is served: like the name of a response.
            return _unknown(scope["path"])
        message = f"{scope['method'][:20]} is not for {scope['path'][:200]!r}"
        # Starlette names the methods of one route alone, and a path may have several (RFC 9110, section 15.5.6).
        routes = [route for route in self._routes.routes if route.matches(scope)[0] is not Match.NONE]
        methods = sorted({method for route in routes if isinstance(route, Route) for method in route.methods or ()})
        kind = Kind(405, "invalid_request_error", "method_not_allowed")
        return HttpError(kind, message, [(b"allow", ", ".join(methods).encode())])

    async def _refuse(self, scope: Scope, send: Send, error: BatonError, request_id: str) -> None:
        status, body, named = _refusal(scope["path"], error, request_id or new_request_id(self._rng))
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            *named,
            *error_headers(error),
        ]
        if is_unread(scope) and CLOSE not in headers:
            headers.append(CLOSE)
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def _refusal(path: str, error: BatonError, request_id: str) -> tuple[int, bytes, Headers]:
    """The status and the body of a refusal, and headers that name the request, in the format of the path's API."""
    if path == _MESSAGES or path.startswith(f"{_MESSAGES}/"):
        return status_of(error), error_object(error, request_id), id_headers(request_id)
    return kind_of(error).status, error_body(error), [(b"x-request-id", request_id.encode())]


def _naming(ignored: Collection[str], send: Send) -> Send:
    """Sends an answer with a header that names the request's fields without effect, as far as they are read then."""

    async def send_named(message: Message) -> None:
        if ignored and message["type"] == "http.response.start":
            header = HEADER, ", ".join(sorted(ignored)).encode()
            message = {**message, "headers": [*message["headers"], header]}
        await send(message)

    return send_named


async def _no_such_path(scope: Scope, _receive: Receive, _send: Send) -> None:
    raise _unknown(scope["path"])


def _unknown(path: str) -> HttpError:
    instead = use_instead(path)
    message = f"{path[:200]!r} is not served here: {instead}" if instead else f"there is no {path[:200]!r}"
    return HttpError(Kind(404, "invalid_request_error", "unknown_url"), message)
