"""Requests that bring a chat template of their own: refused by name unless the operator allows it."""

from __future__ import annotations

from functools import partial

import pytest

from baton.messages.request_limits import MAX_TEMPLATE_BYTES, MAX_TEMPLATE_VARIABLE_BYTES
from baton.text.chat_template import ChatTemplate
from tests.support.http_rig import HttpRig, finished, text_of

CHATS, TOKENIZE = "/v1/chat/completions", "/tokenize"
CHAT: dict[str, object] = {"messages": [{"role": "user", "content": "hi"}]}
OWN = CHAT | {"chat_template": "<{{ messages[0].content }}|{{ style }}>", "chat_template_kwargs": {"style": "x"}}


def trusting_rig() -> HttpRig:
    return HttpRig(request_template=partial(ChatTemplate.of_request, {}))


async def test_the_template_of_a_request_makes_its_prompt() -> None:
    rig = trusting_rig()
    tokenized = await rig.post(TOKENIZE, OWN).end()
    assert text_of(tokenized.json["tokens"]) == "<hi|x>"
    exchange = rig.post(CHATS, OWN)
    call = await rig.next_call()
    assert call.request.prompt == tokenized.json["tokens"]
    call.tell(finished())
    assert (await exchange.end()).status == 200


async def test_it_is_rendered_in_a_thread_that_may_wait_and_other_requests_are_not() -> None:
    rig = trusting_rig()
    await rig.post(TOKENIZE, CHAT).end()
    await rig.post(TOKENIZE, CHAT | {"chat_template": None}).end()
    assert rig.handler.num_in_waiting_threads == 0
    await rig.post(TOKENIZE, OWN).end()
    # The name may be escaped in JSON.
    escaped = b'{"messages": [{"role": "user", "content": "hi"}], "chat_\\u0074emplate": "x"}'
    await rig.request("POST", TOKENIZE, escaped, {"content-type": "application/json"}).end()
    assert rig.handler.num_in_waiting_threads == 2
    assert rig.handler.num_in_threads == 0


@pytest.mark.parametrize("path", [CHATS, TOKENIZE])
async def test_it_is_refused_by_the_name_of_the_setting_unless_the_operator_allows_it(path: str) -> None:
    exchange = await HttpRig().post(path, OWN).end()
    assert (exchange.status, exchange.error["type"]) == (400, "invalid_request_error")
    assert exchange.error["param"] == "chat_template"
    assert "--trust-request-chat-template" in exchange.error["message"]


async def test_a_request_may_name_a_template_of_the_model_without_being_trusted() -> None:
    rig = HttpRig(template="<{{ messages[0].content }}>")
    named = await rig.post(TOKENIZE, CHAT | {"chat_template": "default"}).end()
    assert text_of(named.json["tokens"]) == "<hi>"


@pytest.mark.parametrize(
    ("param", "more"),
    [
        ("chat_template", {"chat_template": "x" * (MAX_TEMPLATE_BYTES + 1)}),
        ("chat_template", {"chat_template": 1}),
        ("chat_template", {"chat_template": "{% for %}"}),
        ("chat_template", {"chat_template": "{{ raise_exception('no') }}"}),
        ("chat_template_kwargs", {"chat_template_kwargs": {"tools": "x"}}),
        ("chat_template_kwargs.style", {"chat_template_kwargs": {"style": "x" * (MAX_TEMPLATE_VARIABLE_BYTES + 1)}}),
    ],
)
async def test_a_bad_template_and_bad_variables_are_refused_by_name(param: str, more: dict[str, object]) -> None:
    await trusting_rig().refused(TOKENIZE, CHAT | more, param)


async def test_what_a_models_template_makes_of_long_variables_is_bounded() -> None:
    """A variable that is written for each message would come to 32 MiB."""
    rig = HttpRig(template="{% for message in messages %}{{ style }}{% endfor %}")
    body = {
        "messages": [{"role": "user", "content": "a"}] * 4096,
        "chat_template_kwargs": {"style": "x" * MAX_TEMPLATE_VARIABLE_BYTES},
    }
    await rig.refused(TOKENIZE, body, "messages", "2097152 bytes")
