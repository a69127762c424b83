"""Adapters over HTTP: operators' routes, the list of models, and the name of an adapter as a request's model."""

from __future__ import annotations

from dataclasses import replace

from baton.messages.adapters import AdapterSource
from tests.support.http_rig import CARD, HttpRig, chunk, finished
from tests.support.router_parts import MODEL

ONE = AdapterSource("one", "/srv/one", "a" * 64)
WITH_ONE = replace(CARD, adapters={"one": ONE})


async def test_operators_load_and_unload_adapters_as_with_vllm() -> None:
    rig = HttpRig()
    loaded = await rig.post("/v1/load_lora_adapter", {"lora_name": "one", "lora_path": "/srv/one"}).end()
    assert (loaded.status, loaded.body) == (200, b"Success: one was given the adapter aaaaaaaaaaaa.\n")
    again = {"lora_name": "one", "lora_path": "/srv/one", "load_inplace": True}
    loaded = await rig.post("/v1/load_lora_adapter", again).end()
    assert loaded.body == b"Success: one has the adapter aaaaaaaaaaaa.\nWarning: d1: /x is not there\n"
    refused = await rig.post("/v1/load_lora_adapter", {"lora_name": "two", "lora_path": "/bad"}).end()
    assert (refused.status, refused.json["error"]["message"]) == (400, "p1: /bad is unsound")
    unloaded = await rig.post("/v1/unload_lora_adapter", {"lora_name": "one"}).end()
    assert (unloaded.status, rig.adapters.names) == (200, {})
    unknown = await rig.post("/v1/unload_lora_adapter", {"lora_name": "one"}).end()
    assert (unknown.status, unknown.json["error"]["code"]) == (404, "model_not_found")
    for body in ({}, {"lora_name": 1, "lora_path": "/x"}, {"lora_name": "a", "lora_path": "/x", "more": 1}):
        assert (await rig.post("/v1/load_lora_adapter", body).end()).status == 400


async def test_adapters_are_listed_with_the_model_that_they_change() -> None:
    rig = HttpRig(card=WITH_ONE)
    listed = (await rig.get("/v1/models").end()).json["data"]
    found = [(model["id"], model["root"], model["parent"]) for model in listed]
    assert found == [(MODEL, MODEL, None), ("one", "/srv/one", MODEL)]
    assert (await rig.get("/v1/models/one").end()).json["parent"] == MODEL
    assert (await rig.get("/v1/models/two").end()).status == 404


async def test_an_adapter_is_a_requests_model_in_every_api_and_in_its_answer() -> None:
    rig = HttpRig(card=WITH_ONE)
    message = [{"role": "user", "content": "hi"}]
    for path, body in (
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/chat/completions", {"messages": message}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"messages": message, "max_tokens": 3}),
    ):
        asking = rig.post(path, {"model": "one", **body})
        call = await rig.next_call()
        assert call.request.model == "one"
        call.tell(chunk(0, "a"), finished())
        answer = await asking.end()
        assert (answer.status, answer.json["model"]) == (200, "one"), path


async def test_a_chat_is_continued_although_its_adapter_has_lost_its_name() -> None:
    rig = HttpRig()
    body = {"model": "gone", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    refused = await rig.post("/v1/chat/completions", body, {"x-request-id": "r"}).end()
    assert refused.status == 404
    resumed = rig.post("/v1/chat/completions", body, {"x-request-id": "r", "last-event-id": "1"})
    call = await rig.next_call()
    call.tell(chunk(1, "b"), finished())
    assert (await resumed.end()).status == 200
