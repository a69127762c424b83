"""The routes that tell about this router: its models, its health, its version and its metrics."""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

import baton
from baton.messages.capabilities import Capability, in_order
from baton.messages.generation import ModelCard
from baton.observe.metrics import CONTENT_TYPE
from router.admission.checks import check_model
from router.http.model import ServedModel


def status_routes(
    model: ServedModel, started_at: float, why_not_ready: Callable[[], str], figures: Callable[[], bytes]
) -> list[Route]:
    """The routes. `why_not_ready` returns an empty text if requests can be served, `figures` the metrics page."""

    def card(served: ModelCard) -> dict[str, object]:
        return {
            "id": served.name,
            "object": "model",
            "created": int(started_at),
            "owned_by": "baton",
            "root": served.root or served.name,
            "parent": served.parent or None,
            "max_model_len": served.max_model_len,
            "capabilities": in_order(served.capabilities),
            "has_chat_template": model.has_chat_template,
            "image_limits": model.image_limits if Capability.IMAGE in served.capabilities else None,
            "tool_call_parser": model.answer_parsers.tool_call_parser,
            "default_sampling_params": served.defaults.given(),
        }

    async def models(_request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [card(served) for served in model.card.with_adapters()]})

    async def one_model(request: Request) -> Response:
        name = request.path_params["name"]
        check_model(name, model.card)
        return JSONResponse(next(card(served) for served in model.card.with_adapters() if served.name == name))

    async def alive(_request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def ready(_request: Request) -> Response:
        reason = why_not_ready()
        return PlainTextResponse(f"{reason or 'ok'}\n", status_code=503 if reason else 200)

    async def version(_request: Request) -> Response:
        return JSONResponse({"version": baton.__version__})

    async def metrics(_request: Request) -> Response:
        return Response(figures(), media_type=CONTENT_TYPE)

    return [
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", one_model),
        Route("/livez", alive),
        Route("/readyz", ready),
        Route("/health", ready),
        Route("/version", version),
        Route("/metrics", metrics),
    ]
