"""/v1/embeddings over a scripted request handler: requests, answers and errors."""

from __future__ import annotations

import base64
import struct
from dataclasses import replace

import pytest

from baton.messages.pooling import PoolingRequest
from router.http.pooling.endpoints import as_json
from tests.doubles.fake_handler import FakeCall
from tests.support.http_rig import CARD, EMBEDDINGS, HttpRig, finished, vector
from tests.support.router_parts import MODEL


async def test_one_text_becomes_one_vector() -> None:
    rig = HttpRig()
    asked = {"input": "ab", "model": MODEL, "priority": 4, "cache_salt": "s", "user": "me", "dimensions": 2}
    exchange = rig.post(EMBEDDINGS, asked, {"x-request-id": "mine", "traceparent": "t", "x-request-timeout-ms": "2000"})
    call = await rig.next_call()
    request = call.request
    assert (request.prompt, request.priority, request.cache_salt) == ([97, 98], 4, "s")
    assert request.pooling == PoolingRequest(None, None, 2)
    assert (request.request_id, request.traceparent) == ("mine", "t")
    assert call.timeout_s == pytest.approx(2.0, abs=1.0)
    call.tell(vector(0.6, -0.8))
    await exchange.end()
    assert (exchange.status, exchange.headers["x-request-id"]) == (200, "mine")
    assert exchange.headers["baton-decode-node"] == "d1"
    numbers = exchange.json["data"][0]["embedding"]
    assert struct.pack("<2f", *numbers) == struct.pack("<2f", 0.6, -0.8)
    assert exchange.json == {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": numbers}],
        "model": MODEL,
        "usage": {"prompt_tokens": 3, "total_tokens": 3},
    }


async def test_several_inputs_are_answered_in_order_as_base64() -> None:
    rig = HttpRig()
    exchange = rig.post(EMBEDDINGS, {"input": [[1], [2, 3]], "encoding_format": "base64"}, {"x-request-id": "mine"})
    calls = [await rig.next_call(), await rig.next_call()]
    assert [call.request.prompt for call in calls] == [[1], [2, 3]]
    assert [call.request_id for call in calls] == ["mine-0", "mine-1"]
    for number, call in reversed(list(enumerate(calls))):
        call.tell(vector(number, 0.5))
    data = (await exchange.end()).json["data"]
    assert [one["index"] for one in data] == [0, 1]
    assert [base64.b64decode(one["embedding"]) for one in data] == [struct.pack("<2f", n, 0.5) for n in (0, 1)]
    assert exchange.json["usage"] == {"prompt_tokens": 6, "total_tokens": 6}


@pytest.mark.parametrize(
    ("length", "most", "at_once"), [(1000, None, 32), (1, 3, 3), (1000, 100, 32), (64, None, 64), (1, None, 128)]
)
async def test_a_bounded_number_of_inputs_runs_at_once(length: int, most: int | None, at_once: int) -> None:
    rig = HttpRig(card=replace(CARD, max_model_len=1000))
    rig.handler.most = most
    exchange = rig.post(EMBEDDINGS, {"input": [[number] * length for number in range(1, 131)]})
    calls: list[FakeCall] = await rig.next_calls(at_once)
    for number in range(130):
        assert rig.handler.calls.empty(), f"{number} are done"
        calls[number].tell(vector(number, 0))
        if len(calls) < 130:
            calls.append(await rig.next_call())
    data = (await exchange.end()).json["data"]
    assert [one["embedding"][0] for one in data] == list(range(130))


@pytest.mark.parametrize(("count", "size", "num_threads"), [(40, 2, 0), (1, 4096, 0), (1, 4097, 1), (3, 2048, 1)])
async def test_an_answer_of_many_numbers_is_written_in_a_thread(count: int, size: int, num_threads: int) -> None:
    rig = HttpRig()
    exchange = rig.post(EMBEDDINGS, {"input": ["a"] * count})
    calls = [await rig.next_call() for _ in range(min(count, 32))]
    for number in range(count):
        if number >= len(calls):
            calls.append(await rig.next_call())
        calls[number].tell(vector(*range(number, number + size)))
    data = (await exchange.end()).json["data"]
    assert [one["embedding"] for one in data] == [list(range(place, place + size)) for place in range(count)]
    assert rig.handler.num_in_threads == num_threads


async def test_as_many_inputs_as_clients_send_at_once_may_come_in_a_larger_body() -> None:
    rig = HttpRig(card=replace(CARD, max_model_len=600))
    exchange = rig.post(EMBEDDINGS, {"input": ["é" * 300] * 2048})
    for number in range(2048):
        (await rig.next_call()).tell(vector(number, 0))
    data = (await exchange.end()).json["data"]
    assert [one["embedding"][0] for one in data] == list(range(2048))


async def test_long_texts_are_tokenized_in_several_turns() -> None:
    rig = HttpRig(card=replace(CARD, max_model_len=8))
    texts = [letter * (700 << 10) for letter in "abc"]
    exchange = rig.post(EMBEDDINGS, {"input": texts, "truncate_prompt_tokens": 2})
    calls = [await rig.next_call() for _ in texts]
    assert [call.request.prompt for call in calls] == [[97] * 2, [98] * 2, [99] * 2]
    for call in calls:
        call.tell(vector(1, 0))
    assert (await exchange.end()).status == 200
    assert rig.handler.num_in_threads == 6, "parsed, read, listed, tokenized twice, cut"


@pytest.mark.parametrize(("count", "size", "status"), [(513, 8192, 400), (512, 8193, 200), (513, 8160, 200)])
@pytest.mark.parametrize("is_known", [False, True])
async def test_many_vectors_have_a_bounded_number_of_numbers(
    count: int, size: int, status: int, is_known: bool
) -> None:
    rig = HttpRig(card=replace(CARD, embedding_size=size if is_known else 0))
    rig.handler.reported_size = size if is_known else 0
    exchange = rig.post(EMBEDDINGS, {"input": ["a"] * count, "encoding_format": "base64"})
    if status == 200 or not is_known:
        end = vector(*[0.5] * size)
        for _ in range(count if status == 200 else 1):
            (await rig.next_call()).tell(end)
    await exchange.end()
    assert exchange.status == status
    if status == 400:
        assert "at most 512 such inputs" in exchange.error["message"]


def test_the_items_of_an_answer_are_written_one_at_a_time() -> None:
    written = as_json({"object": "list", "data": ({"index": n, "text": "ä"} for n in range(2)), "none": iter(())})
    assert written == (
        '{"object": "list", "data": [{"index": 0, "text": "ä"}, {"index": 1, "text": "ä"}], "none": []}'.encode()
    )


async def test_dimensions_are_compared_with_the_vector_if_no_node_has_reported_them() -> None:
    for dimensions, status in ((2, 200), (1, 400)):
        rig = HttpRig(card=replace(CARD, embedding_size=0))
        exchange = await rig.answered(EMBEDDINGS, {"input": "a", "dimensions": dimensions}, vector(0.6, -0.8))
        assert exchange.status == status
    assert (exchange.error["param"], "must be 2" in exchange.error["message"]) == ("dimensions", True)


@pytest.mark.parametrize(
    ("body", "param", "story"),
    [
        ({}, "input", "required"),
        ({"input": ""}, "input", "is empty"),
        ({"input": []}, "input", "is empty"),
        ({"input": None}, "input", "must be"),
        ({"input": ["a", ""]}, "input", "number 1"),
        ({"input": [[1], []]}, "input", "number 1"),
        ({"input": ["a", [1]]}, "input", "must be"),
        ({"input": [1, "a"]}, "input", "must be"),
        ({"input": [1, True]}, "input", "must be"),
        ({"input": [[1.0]]}, "input", "must be"),
        ({"input": {"a": 1}}, "input", "must be"),
        ({"input": ["a"] * 2049}, "input", "at most 2048"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "float"),
        ({"input": "a", "dimensions": 1}, "dimensions", "must be 2"),
        ({"input": "a", "dimension": 2}, "dimension", "did you mean dimensions"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "must be 1 to"),
        ({"input": "a", "normalize": "yes"}, "normalize", "boolean"),
        ({"input": "a", "pooling": "max"}, "pooling", "'last', 'cls' or 'mean'"),
        ({"input": "a", "dimensions": 0}, "dimensions", "at least 1"),
        ({"input": ["a", "a" * 65]}, "input[1]", "at most 64"),
        ({"input": "a", "priority": "x"}, "priority", "integer"),
        ({"input": "a", "request_id": "another"}, "request_id", "x-request-id"),
    ],
)
async def test_an_invalid_body_is_refused_by_name(body: dict[str, object], param: str, story: str) -> None:
    await HttpRig().refused(EMBEDDINGS, body, param, story)


async def test_an_answer_without_a_vector_is_an_internal_error() -> None:
    rig = HttpRig()
    exchange = await rig.answered(EMBEDDINGS, {"input": "a"}, finished())
    assert exchange.status == 500
