"""`prompt_embeds` of /v1/completions over a scripted request handler. What is in it, the core checks."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import pytest

from baton.messages.generation import PromptEmbeds
from router.http.json_body import MAX_BODY_BYTES, MAX_LARGE_BODIES
from tests.support.http_rig import HttpRig, chunk, finished

PATH = "/v1/completions"
MOST = 3 << 20
CONTENT = bytes(range(256))
TEXT = base64.b64encode(CONTENT).decode()


@pytest.mark.parametrize("prompt", [None, "", "ab", [1, 2]])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_rows_come_before_the_prompt_or_alone(prompt: Any, is_stream: bool) -> None:
    rig = HttpRig(prompt_embeds_bytes=MOST)
    body = {"prompt_embeds": TEXT, "max_tokens": 2, "return_token_ids": True, "stream": is_stream}
    exchange = rig.post(PATH, body if prompt is None else {**body, "prompt": prompt})
    call = await rig.next_call()
    assert (call.request.prompt, call.request.prompt_embeds) == (prompt or None, (PromptEmbeds(CONTENT),))
    call.tell(chunk(0, "ab"), finished())
    await exchange.end()
    assert exchange.status == 200
    # The ids of a part of the prompt would not be its ids.
    assert b"prompt_token_ids" not in exchange.body
    assert b'"token_ids"' in exchange.body


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "no base64": ({"prompt_embeds": "?!"}, "prompt_embeds", "is not base64"),
    "a line break": ({"prompt_embeds": TEXT[:8] + "\n" + TEXT[8:]}, "prompt_embeds", "is not base64"),
    "no padding": ({"prompt_embeds": TEXT.rstrip("=")}, "prompt_embeds", "is not base64"),
    "not ASCII": ({"prompt_embeds": "é" * 4}, "prompt_embeds", "is not base64"),
    "a list": ({"prompt_embeds": [TEXT]}, "prompt_embeds", "valid string"),
    "two prompts": ({"prompt_embeds": TEXT, "prompt": ["a", "b"]}, "prompt", "has 2 prompts"),
    "echo": ({"prompt_embeds": TEXT, "echo": True}, "echo", "does not go with prompt_embeds"),
    "a cut": ({"prompt_embeds": TEXT, "truncate_prompt_tokens": 1}, "truncate_prompt_tokens", "does not go with"),
    "logprobs": ({"prompt_embeds": TEXT, "prompt_logprobs": 0}, "prompt_logprobs", "does not go with"),
    "nothing": ({}, "prompt", "is required"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_does_not_go_with_rows_is_refused_by_name(name: str) -> None:
    body, field, reason = REFUSED[name]
    rig = HttpRig(prompt_embeds_bytes=MOST)
    exchange = await rig.post(PATH, body).end()
    assert exchange.status == 400
    error = exchange.json["error"]
    assert error["param"] == field
    assert reason in error["message"]
    assert rig.handler.calls.empty()


async def test_rows_are_not_taken_unless_they_are_allowed() -> None:
    exchange = await HttpRig().post(PATH, {"prompt_embeds": TEXT}).end()
    assert (exchange.status, exchange.json["error"]["param"]) == (400, "prompt_embeds")
    assert "--allow-prompt-embeds" in exchange.json["error"]["message"]


async def test_only_bodies_that_may_have_rows_may_be_larger() -> None:
    rows = base64.b64encode(bytes(MOST)).decode()
    body = json.dumps({"prompt_embeds": rows}).encode()
    assert len(body) > 4 * MAX_BODY_BYTES
    rig = HttpRig(prompt_embeds_bytes=MOST)
    exchange = rig.post(PATH, {"prompt_embeds": rows})
    call = await rig.next_call()
    assert len(call.request.prompt_embeds[0].data) == MOST
    call.tell(chunk(0, "ab"), finished())
    assert (await exchange.end()).status == 200
    over = base64.b64encode(bytes(MOST + 3)).decode()
    for other, path, asked, status in (
        (rig, PATH, {"prompt_embeds": over}, 400),
        (rig, PATH, {"prompt_embeds": over, "prompt": "x" * MAX_BODY_BYTES}, 413),
        (rig, "/v1/chat/completions", {"messages": [], "prompt_embeds": rows}, 413),
        (HttpRig(), PATH, {"prompt_embeds": rows}, 413),
    ):
        assert (await other.post(path, asked).end()).status == status


async def test_few_large_bodies_are_read_at_once() -> None:
    rig = HttpRig(prompt_embeds_bytes=MOST)
    half = json.dumps({"prompt_embeds": base64.b64encode(bytes(MOST)).decode(), "max_tokens": 2}).encode()
    kind = {"content-type": "application/json"}
    arriving = [
        rig.request("POST", PATH, half[: 2 * MAX_BODY_BYTES], kind, is_whole=False) for _ in range(MAX_LARGE_BODIES)
    ]
    await asyncio.sleep(0)
    refused = await rig.post(PATH, {"prompt_embeds": base64.b64encode(bytes(MOST)).decode()}).end()
    assert (refused.status, refused.json["error"]["type"]) == (503, "overloaded_error")
    assert "retry-after" in refused.headers
    small = rig.post(PATH, {"prompt_embeds": TEXT})
    (await rig.next_call()).tell(chunk(0, "ab"), finished())
    assert (await small.end()).status == 200
    # One leaves, and one is parsed and runs: both make room.
    arriving[0].disconnect()
    await arriving[0].task
    arriving[1].send_rest(half[2 * MAX_BODY_BYTES :])
    running = await rig.next_call()
    more = [rig.post(PATH, {"prompt_embeds": base64.b64encode(bytes(MOST)).decode()}) for _ in range(2)]
    calls = [running, *[await rig.next_call() for _ in more]]
    for call in calls:
        call.tell(chunk(0, "ab"), finished())
    for exchange in (arriving[1], *more):
        assert (await exchange.end()).status == 200
    for exchange in arriving[2:]:
        exchange.disconnect()
        await exchange.task
