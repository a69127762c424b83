"""The endpoints /tokenize and /detokenize, and the paths of other servers that are refused with advice."""

from __future__ import annotations

import json
import re

import pytest

import baton
from router.http.app import INSTEAD, use_instead
from tests.support.http_rig import HttpRig, text_of

CHAT: dict[str, object] = {"messages": [{"role": "user", "content": "hi"}]}


async def tokens_of(body: dict[str, object]) -> list[int]:
    exchange = await HttpRig().post("/tokenize", body).end()
    assert exchange.status == 200, exchange.body
    assert exchange.json["count"] == len(exchange.json["tokens"])
    assert exchange.json["max_model_len"] == 64
    found: list[int] = exchange.json["tokens"]
    return found


async def test_a_text_has_tokens_and_tokens_have_their_text() -> None:
    assert await tokens_of({"prompt": "ab"}) == [97, 98]
    assert await tokens_of({"prompt": ""}) == []
    exchange = await HttpRig().post("/detokenize", {"tokens": [97, 98], "model": ""}).end()
    assert (exchange.status, exchange.json) == (200, {"prompt": "ab"})


async def test_the_spelling_of_each_token_is_returned_if_it_is_wanted() -> None:
    exchange = await HttpRig().post("/tokenize", {"prompt": "é", "return_token_strs": True}).end()
    assert exchange.json["token_strs"] == ["é"]
    assert (await HttpRig().post("/tokenize", {"prompt": "é"}).end()).json["token_strs"] is None


async def test_a_chat_has_the_tokens_with_which_it_would_be_generated() -> None:
    rig = HttpRig()
    whole = await tokens_of(CHAT)
    assert text_of(whole) == "user: hi\nassistant:"
    generating = rig.post("/v1/chat/completions", CHAT)
    call = await rig.next_call()
    assert call.request.prompt == whole
    generating.disconnect()
    await generating.task
    assert "".join(map(chr, await tokens_of({**CHAT, "add_generation_prompt": False}))) == "user: hi\n"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", **CHAT}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {**CHAT, "tools": [{}]}, "tools[0].type"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [300]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
        ("/detokenize", {"tokens": [97] * 65}, "tokens"),
        ("/detokenize", {"tokens": [97], "x": 1}, "x"),
    ],
)
async def test_a_wrong_field_is_named(path: str, body: dict[str, object], param: str) -> None:
    await HttpRig().refused(path, body, param)


async def test_a_large_body_is_tokenized_in_a_thread() -> None:
    rig = HttpRig()
    assert (await rig.post("/tokenize", {"prompt": "a" * 20_000}).end()).json["count"] == 20_000
    assert rig.handler.num_in_threads == 2, "parsed, and tokenized"
    await rig.post("/tokenize", {"prompt": "a"}).end()
    assert rig.handler.num_in_threads == 2


async def test_more_tokens_than_any_prompt_may_have_are_not_returned() -> None:
    await HttpRig().refused("/tokenize", {"prompt": "a" * 300_000}, "prompt")


async def test_the_version_is_that_of_the_package() -> None:
    assert (await HttpRig().get("/version").end()).json == {"version": baton.__version__}


@pytest.mark.parametrize("path", sorted(INSTEAD))
async def test_a_path_of_another_server_is_refused_with_what_to_use_instead(path: str) -> None:
    for asked in (path, f"{path}/x/y", f"{path}/"):
        exchange = await HttpRig().post(asked, {}).end()
        error = exchange.json["error"]
        if path.startswith("/v1/messages/"):
            assert error["type"] == "not_found_error", "Anthropic's errors have no code"
        else:
            assert error["code"] == "unknown_url"
        assert exchange.status == 404
        assert error["message"] == f"{asked!r} is not served here: {use_instead(asked)}"


async def test_advice_names_paths_that_are_served() -> None:
    texts = [text for text in INSTEAD.values() if "{path}" not in text]
    named = {path for text in texts for path in re.findall(r"(?<![\w])/[a-z0-9_/]+[a-z]", text)} - {"/v1"}
    assert "/v1/completions" in named
    rig = HttpRig()
    assert {path for path in named if (await rig.get(path).end()).status == 404} == set()


async def test_a_path_of_no_server_is_refused_without_advice() -> None:
    for path in ("/nothing", "/v1", "/v1/filesx", "/" * 1000, "/V1/files"):
        assert use_instead(path) == ""
        assert (await HttpRig().post(path, {}).end()).status == 404
    assert len(use_instead("/models/" + "x" * 5000)) < 400


def test_batches_of_messages_and_experts_that_scale_have_advice_of_their_own() -> None:
    assert "send each message to /v1/messages" in use_instead("/v1/messages/batches/msgbatch_1/results")
    assert "baton node" in use_instead("/scale_elastic_ep")
    assert use_instead("/v1/messages/none") == ""


@pytest.mark.parametrize("size", [0, 20_000])
async def test_the_input_of_a_response_is_counted(size: int) -> None:
    rig = HttpRig()
    sent = json.dumps({"input": "hi", "instructions": "be brief", "stream": True}).encode() + b" " * size
    exchange = rig.request("POST", "/v1/responses/input_tokens", sent, {"content-type": "application/json"})
    await exchange.end()
    rendered = "system: be brief\nuser: hi\nassistant:"
    assert exchange.json == {"object": "response.input_tokens", "input_tokens": len(rendered)}
    assert rig.handler.calls.empty()
    await rig.refused("/v1/responses/input_tokens", {"inputs": "hi"}, "inputs")


async def test_conversations_are_not_compacted() -> None:
    exchange = await HttpRig().post("/v1/responses/compact", {"input": "hi"}).end()
    assert (exchange.status, exchange.error["code"]) == (404, "unknown_url")
    assert "summary" in exchange.error["message"]
