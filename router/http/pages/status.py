"""The routes that tell about this router, its models and its health, and those with which operators name adapters."""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

import baton
from baton.messages.generation import ModelCard
from baton.messages.node_model import Capability, in_order
from baton.observe.metrics import CONTENT_TYPE
from baton.wire.services.operator_service import AdapterHandler
from router.admission.checks import check_model
from router.http.bodies.fields import Strict, read_as
from router.http.json_body import parse_json, read_body
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


class LoadAdapterBody(Strict):
    """POST /v1/load_lora_adapter"""

    lora_name: str
    lora_path: str
    load_inplace: bool | None = None


class UnloadAdapterBody(Strict):
    """POST /v1/unload_lora_adapter"""

    lora_name: str


def adapter_routes(handler: Callable[[], AdapterHandler]) -> list[Route]:
    """The routes. `handler` returns what carries out the commands; it is called for each of them."""

    async def load(request: Request) -> Response:
        body = read_as(LoadAdapterBody, parse_json(await read_body(request.scope, request.receive)))
        loaded = await handler().load_adapter(body.lora_name, body.lora_path, replaces=bool(body.load_inplace))
        done = "has" if loaded.unchanged else "was given"
        notes = "".join(f"\nWarning: {warning}" for warning in loaded.warnings)
        return PlainTextResponse(f"Success: {body.lora_name} {done} the adapter {loaded.digest:.12}.{notes}\n")

    async def unload(request: Request) -> Response:
        body = read_as(UnloadAdapterBody, parse_json(await read_body(request.scope, request.receive)))
        await handler().unload_adapter(body.lora_name)
        return PlainTextResponse(f"Success: {body.lora_name} has no adapter any more.\n")

    return [
        Route("/v1/load_lora_adapter", load, methods=["POST"]),
        Route("/v1/unload_lora_adapter", unload, methods=["POST"]),
    ]
