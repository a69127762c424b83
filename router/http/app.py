"""The ASGI application: its routes, and the one place where exceptions become error objects of the path's API.

Beside it stands what a path that is not served has instead, and which pages of other origins may call.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from random import Random

from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Match, Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.clock import Clock
from baton.errors import BatonError
from baton.messages.ids import new_request_id
from baton.security.http_access import PageAuthenticator
from baton.security.matrix import current_caller, is_page
from router.handler import Handler
from router.http.audio.endpoint import AudioBodies, SpeechEndpoint, SpeechRules
from router.http.bodies.fields import HEADER, collect_ignored
from router.http.completions.endpoints import ChatCompletions, Completions
from router.http.completions.tokens import Detokenize, Tokenize
from router.http.endpoint import request_id_of
from router.http.errors import HttpError, Kind, error_headers, form_of
from router.http.json_body import CLOSE, ClientGone, check_headers, is_unread
from router.http.messages.endpoint import CountTokens, MessagesEndpoint
from router.http.model import ServedModel
from router.http.pages.html import html_pages
from router.http.pages.status import status_routes
from router.http.pooling.endpoints import Classify, Embeddings, Rerank, Score
from router.http.rate_limits import NAMES, with_rate_limits
from router.http.responses.endpoint import InputTokens, ResponsesEndpoint, stored_routes
from router.http.responses.store import ResponseStore

_log = logging.getLogger(__name__)

KEEP_ALIVE_S = 15.0
"""A stream on which nothing was sent for so long gets a comment, or a ping."""


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
        self._handler = handler
        audio = AudioBodies(speech)

        def speech_endpoint(*, translates: bool) -> SpeechEndpoint:
            return SpeechEndpoint(handler, model, keep_alive_s, speech, audio, translates=translates)

        score, rerank = Score(handler, model, clock), Rerank(handler, model, clock)
        endpoints: Mapping[str, ASGIApp] = {
            "/v1/completions": Completions(handler, model, clock, keep_alive_s, prompt_embeds_bytes),
            "/v1/chat/completions": ChatCompletions(handler, model, clock, keep_alive_s),
            "/v1/messages": MessagesEndpoint(handler, model, clock, keep_alive_s),
            "/v1/messages/count_tokens": CountTokens(handler, model),
            "/v1/responses": ResponsesEndpoint(handler, model, clock, keep_alive_s, rng, store),
            "/v1/responses/input_tokens": InputTokens(handler, model, clock, keep_alive_s, rng, store),
            "/v1/audio/transcriptions": speech_endpoint(translates=False),
            "/v1/audio/translations": speech_endpoint(translates=True),
            "/v1/embeddings": Embeddings(handler, model, clock),
            **dict.fromkeys(("/v1/score", "/score"), score),
            **dict.fromkeys(("/v1/rerank", "/rerank", "/v2/rerank"), rerank),
            "/classify": Classify(handler, model, clock),
            "/tokenize": Tokenize(handler, model),
            "/detokenize": Detokenize(handler, model),
        }
        self._routes = Router(
            [
                *(Route(path, endpoint, methods=["POST"]) for path, endpoint in endpoints.items()),
                *stored_routes(store),
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
            caller = self._authenticator.check(scope["path"], scope["headers"])
            current_caller.set(caller)
            if caller.has_quotas:
                send = with_rate_limits(self._handler, send)
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
        form, request_id = form_of(scope["path"]), request_id or new_request_id(self._rng)
        body = form.body(error, request_id)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            *form.id_headers(request_id),
            *error_headers(error),
        ]
        if is_unread(scope) and CLOSE not in headers:
            headers.append(CLOSE)
        await send({"type": "http.response.start", "status": form.status(error), "headers": headers})
        await send({"type": "http.response.body", "body": body})


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


_ONLY_READ = "models here write text alone; images are read in messages, where the model takes them"
_SPEECH = "speech is written down by /v1/audio/transcriptions and /v1/audio/translations, not spoken"
_EMBEDDINGS = "get vectors from /v1/embeddings, scores from /score, rankings from /rerank and labels from /classify"
_NO_STORE = "files are not stored here: send the requests themselves, as many at once as you like, with a low priority"
_NO_MESSAGE_BATCHES = (
    "batches are not stored here: send each message to /v1/messages, as many at once as you like, with a low priority"
)
_NO_AGENTS = (
    "continue a conversation by /v1/responses with previous_response_id, or send all messages to /v1/chat/completions"
)
_NO_TRAINING = "models are not trained here: train one elsewhere, then serve it with baton up --model DIRECTORY"
_BASE_URL = "the base URL of a client of OpenAI's API ends in /v1, so that it asks for /v1{path}"
_PROFILE = "baton trace REQUEST has where the time of a request went, baton bench engine what a step costs"
_SLEEP = "baton drain NODE takes a node out of service, baton uncordon NODE puts it back"
_COMPLETION = "send the prompt to /v1/completions, with stream: true for a stream"
_CHAT = "send the messages to /v1/chat/completions, with stream: true for a stream"
_MODELS = "GET /v1/models lists the model"

INSTEAD: Mapping[str, str] = {
    # OpenAI
    "/v1/assistants": _NO_AGENTS,
    "/v1/audio": _SPEECH,
    "/v1/batches": _NO_STORE,
    "/v1/containers": _NO_AGENTS,
    "/v1/conversations": _NO_AGENTS,
    "/v1/edits": _CHAT,
    "/v1/engines": "name the model in the body's field model, and " + _COMPLETION,
    "/v1/evals": _NO_TRAINING,
    "/v1/files": _NO_STORE,
    "/v1/fine_tuning": _NO_TRAINING,
    "/v1/images": _ONLY_READ,
    "/v1/moderations": "no model for moderation is served here; ask the served one with a response_format",
    "/v1/realtime": _SPEECH,
    "/v1/responses/compact": "conversations are not compacted here: ask the model for a summary, and go on from that",
    "/v1/threads": _NO_AGENTS,
    "/v1/uploads": _NO_STORE,
    "/v1/vector_stores": _NO_STORE,
    "/v1/videos": _ONLY_READ,
    # OpenAI's paths under a wrong base URL
    "/chat/completions": _BASE_URL,
    "/completions": _BASE_URL,
    "/embeddings": _BASE_URL,
    "/models": _BASE_URL,
    "/v1/v1": "the base URL of the client has /v1, and its paths have it again: take it out of one of them",
    # Anthropic
    "/v1/complete": _COMPLETION,
    "/v1/messages/batches": _NO_MESSAGE_BATCHES,
    # vLLM
    "/is_sleeping": _SLEEP,
    "/load": "/metrics has the load of this router",
    "/ping": "/health says whether requests are served",
    "/pooling": _EMBEDDINGS,
    "/reset_mm_cache": "baton cache reset empties the prefix caches of the nodes",
    "/reset_prefix_cache": "baton cache reset empties the prefix caches of the nodes",
    "/scale_elastic_ep": "baton node starts one more node of a cluster, baton drain NODE takes one out of service",
    "/server_info": "baton config view has the settings, baton get nodes -o wide the nodes",
    "/sleep": _SLEEP,
    "/start_profile": _PROFILE,
    "/stop_profile": _PROFILE,
    "/tokenizer_info": "/tokenize has the tokens of a text, /v1/models the model",
    "/v1/tokenize": "send it to /tokenize",
    "/v1/detokenize": "send it to /detokenize",
    "/wake_up": _SLEEP,
    # SGLang
    "/encode": _EMBEDDINGS,
    "/flush_cache": "baton cache reset empties the prefix caches of the nodes",
    "/get_model_info": _MODELS,
    "/get_server_info": "baton config view has the settings, baton get nodes -o wide the nodes",
    # Text Generation Inference
    "/generate": _COMPLETION,
    "/generate_stream": _COMPLETION,
    "/info": _MODELS,
    # llama.cpp
    "/apply-template": "/tokenize with messages has the tokens that the chat template makes of them",
    "/completion": _COMPLETION,
    "/embedding": "send the text to /v1/embeddings",
    "/infill": "send the text before the gap as prompt, and the one behind it as suffix, to /v1/completions",
    "/props": _MODELS,
    "/slots": "baton get requests lists what runs",
    # Ollama
    "/api": "this is no Ollama; set its clients to OpenAI's API, with a base URL that ends in /v1",
    "/api/chat": _CHAT,
    "/api/embed": "send the text to /v1/embeddings",
    "/api/generate": _COMPLETION,
    "/api/tags": _MODELS,
    # Amazon SageMaker, KServe and Triton
    "/invocations": _CHAT,
    "/v2": "inference requests of the KServe protocol are not served; " + _COMPLETION,
}
"""What to use instead of a path, or of any path below it. `{path}` stands for the path that was asked for."""
_MAX_SEGMENTS = max(path.count("/") for path in INSTEAD)


def use_instead(path: str) -> str:
    """What to use instead of PATH; empty if neither it nor a path above it is in the table."""
    segments = path.split("/", _MAX_SEGMENTS + 1)[1 : _MAX_SEGMENTS + 1]
    for count in range(len(segments), 0, -1):
        if advice := INSTEAD.get("/" + "/".join(segments[:count])):
            return advice.format(path=path[:200])
    return ""


METHODS = ("DELETE", "GET", "HEAD", "POST")
EXPOSED = (
    "x-request-id",
    "request-id",
    "retry-after",
    "retry-after-ms",
    "x-should-retry",
    "baton-seed",
    "baton-prefill-node",
    "baton-decode-node",
    "baton-attempts",
    "baton-path-reason",
    "baton-kv-bytes",
    "baton-bit-exact",
    "x-baton-ignored-fields",
    *NAMES,
)
"""The headers of answers that pages may read."""
_PREFLIGHT_VALID_S = 600


def with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """The application, callable by pages of these origins, such as `https://chat.example.org`; `*`: of any origin.

    Browsers ask with a preflight request before they send JSON or a key to another origin
    (https://fetch.spec.whatwg.org/#http-cors-protocol). It shows no key, so it is answered before keys are checked; its
    answer tells nothing but these settings. Cookies and passwords that a browser keeps are never permitted: a page has
    to send a key by itself.
    """
    if not origins:
        return app
    # Any header may be sent: OpenAI's JavaScript client has a dozen of its own.
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=METHODS,
        allow_headers=("*",),
        expose_headers=EXPOSED,
        max_age=_PREFLIGHT_VALID_S,
    )
