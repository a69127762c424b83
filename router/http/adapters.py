"""The routes with which operators name adapters: those of vLLM, with its fields."""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from baton.wire.services.operator_service import AdapterHandler
from router.http.bodies.strict import Strict, read_as
from router.http.json_body import parse_json, read_body


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
