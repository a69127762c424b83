"""/classify, /score and /rerank over a scripted request handler: requests, answers and errors."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import replace
from typing import Any

import pytest

from baton.messages.adapters import AdapterSource
from baton.messages.generation import Finished, ModelCard
from baton.messages.pooling import ModelPooling, Pooling, PoolingRequest
from baton.messages.request_limits import MAX_POOLED_TOKENS
from tests.doubles.fake_tokenizer import FakeTokenizer
from tests.support.http_rig import CARD, CROSS, HttpRig, text_of, vector
from tests.support.router_parts import MODEL

LABELS = replace(CARD, pooling=ModelPooling(labels=("spam", "ham"), generates=False))


class Framed(FakeTokenizer):
    """Puts three special tokens around a pair, as BERT's tokenizer does."""

    def num_special_tokens(self, *, pair: bool) -> int:
        return 3


async def answered(rig: HttpRig, path: str, body: dict[str, Any], *vectors: Finished) -> Any:
    """The answer to a body whose requests get these vectors."""
    exchange = rig.post(path, body, {"x-request-id": "mine"})
    for one in vectors:
        (await rig.next_call()).tell(one)
    await exchange.end()
    assert exchange.status == 200, exchange.error
    return exchange.json


async def test_texts_are_labelled() -> None:
    answer = await answered(HttpRig(card=LABELS), "/classify", {"input": ["a", "b"]}, vector(0.25, 0.75), vector(1, 0))
    assert answer == {
        "id": "classify-mine",
        "object": "list",
        "created": 5,
        "model": MODEL,
        "data": [
            {"index": 0, "label": "ham", "probs": [0.25, 0.75], "num_classes": 2},
            {"index": 1, "label": "spam", "probs": [1, 0], "num_classes": 2},
        ],
        "usage": {"prompt_tokens": 6, "total_tokens": 6},
    }


async def test_a_classifier_is_asked_for_raw_outputs() -> None:
    for body, activate in (({}, True), ({"use_activation": False}, False), ({"activation": False}, False)):
        rig = HttpRig(card=LABELS)
        exchange = rig.post("/classify", {"input": [7, 8], **body})
        call = await rig.next_call()
        assert (call.request.prompt, call.request.pooling) == (
            [7, 8],
            PoolingRequest(Pooling.CLASSIFY, activate=activate),
        )
        call.tell(vector(1, 2))
        await exchange.end()


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
async def test_a_cross_encoder_reads_pairs(path: str) -> None:
    rig = HttpRig(card=CROSS)
    exchange = rig.post(path, {"text_1": "a", "text_2": ["xy", "z"]}, {"x-request-id": "mine"})
    calls = await rig.next_calls(2)
    requests = [call.request for call in calls]
    assert [(one.prompt, one.pooling and one.pooling.second_start) for one in requests] == [
        ([97, 0, 120, 121], 2),
        ([97, 0, 122], 2),
    ]
    for call, score in zip(calls, (0.5, 0.25), strict=True):
        call.tell(vector(score))
    data = (await exchange.end()).json["data"]
    assert data == [{"index": 0, "object": "score", "score": 0.5}, {"index": 1, "object": "score", "score": 0.25}]


async def test_models_that_embed_score_by_cosine_and_each_text_is_embedded_once() -> None:
    body = {"text_1": ["a", "b"], "text_2": ["b", "a"]}
    answer = await answered(HttpRig(), "/v1/score", body, vector(1, 0), vector(0.6, 0.8))
    scores = [one["score"] for one in answer["data"]]
    assert scores == [pytest.approx(0.6), pytest.approx(0.6)]
    assert answer["usage"] == {"prompt_tokens": 6, "total_tokens": 6}


async def test_cosines_of_long_vectors_are_made_in_a_thread_and_rounded_once() -> None:
    long = [vector(*(math.sin(n * place) for n in range(5000))) for place in (1, 2)]
    rig = HttpRig()
    answer = await answered(rig, "/score", {"text_1": "a", "text_2": "b"}, *long)
    first, second = (struct.unpack("<5000f", one.embedding) for one in long)
    assert answer["data"][0]["score"] == math.fsum(x * y for x, y in zip(first, second, strict=True))
    assert rig.handler.num_in_threads == 1


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_documents_are_sorted_by_score_and_equal_ones_by_place(path: str) -> None:
    body = {"query": "q", "documents": ["a", {"text": "b"}, "c", "d"], "top_n": 3}
    ends = [vector(0.5), vector(0.75), vector(0.5), vector(0.25)]
    answer = await answered(HttpRig(card=CROSS), path, body, *ends)
    assert answer == {
        "id": "rerank-mine",
        "model": MODEL,
        "results": [
            {"index": 1, "relevance_score": 0.75, "document": {"text": "b"}},
            {"index": 0, "relevance_score": 0.5, "document": {"text": "a"}},
            {"index": 2, "relevance_score": 0.5, "document": {"text": "c"}},
        ],
        "usage": {"prompt_tokens": 12, "total_tokens": 12},
    }
    bare = await answered(HttpRig(card=CROSS), path, {**body, "return_documents": False}, *ends)
    assert "document" not in json.dumps(bare)


@pytest.mark.parametrize(
    ("path", "body", "param", "story"),
    [
        ("/score", {"text_1": "a"}, "text_2", "required"),
        ("/score", {"text_1": [], "text_2": "a"}, "text_1", "is empty"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a"]}, "text_2", "needs as many"),
        ("/score", {"text_1": "a", "text_2": ["b"] * 2049}, "text_2", "at most 2048"),
        ("/score", {"text_1": "a", "text_2": ["b", ""]}, "text_2[1]", "has no tokens"),
        ("/score", {"text_1": "a" * 65, "text_2": ["b"]}, "text_1", "at most 64"),
        ("/score", {"text_1": 5, "text_2": "a"}, "text_1", "must be"),
        ("/rerank", {"query": "a"}, "documents", "required"),
        ("/rerank", {"query": "a", "documents": "b"}, "documents", "must be a list"),
        ("/rerank", {"query": "a", "documents": [{"title": "b"}]}, "documents", "has none of the fields text"),
        ("/rerank", {"query": "a", "documents": ["b"] * 2049}, "documents", "at most 2048"),
        ("/rerank", {"query": "a", "documents": ["b", {"text": "c", "id": "\ud800"}]}, "documents[1]", "UTF-8"),
        ("/rerank", {"query": "a", "documents": [{"text": "b", "\udc00": "c"}]}, "documents", "UTF-8"),
        ("/rerank", {"query": "a", "documents": [{"x": "b"}], "rank_fields": ["x", "x"]}, "rank_fields", "'x' twice"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n", "0"),
        ("/score", {"text_1": "a", "text_2": "b", "use_activation": False}, "use_activation", "is a cosine"),
        ("/rerank", {"query": "a", "documents": ["b"], "activation": False}, "activation", "is a cosine"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_k": 1}, "top_k", "did you mean top_n"),
        ("/classify", {"input": "a"}, "model", "has no classification head"),
    ],
)
async def test_an_invalid_body_is_refused_by_name(path: str, body: dict[str, Any], param: str, story: str) -> None:
    rig = HttpRig()
    exchange = await rig.post(path, body).end()
    assert (exchange.status, exchange.error["param"]) == (400, param), exchange.error
    assert story in exchange.error["message"]
    assert rig.handler.calls.empty()


async def test_pairs_are_bounded_before_any_is_sent() -> None:
    rig = HttpRig(card=replace(CROSS, max_model_len=10_000))
    await rig.refused(
        "/rerank",
        {"query": "q" * 9000, "documents": ["d" * 999] * 150},
        f"documents[{MAX_POOLED_TOKENS // 10_000}]",
        "divide it",
    )
    exchange = await rig.post("/rerank", {"query": "q" * 9000, "documents": ["d", "e" * 1000]}).end()
    assert (exchange.error["param"], "10001 tokens" in exchange.error["message"]) == ("documents[1]", True)
    assert rig.handler.calls.empty()


async def test_the_longer_text_of_a_pair_is_cut_first() -> None:
    # With an odd room the longer one keeps more, and of equal ones the second, as tokenizers' "longest_first" does.
    for first, second, room, kept in (
        ("aaaaaa", "bb", 6, (4, 2)),
        ("aa", "bbbbbb", 6, (2, 4)),
        ("aaaaaa", "bbbbb", 6, (3, 3)),
        ("a" * 10, "b" * 8, 7, (4, 3)),
        ("a" * 8, "b" * 10, 7, (3, 4)),
        ("a" * 10, "b" * 10, 7, (3, 4)),
        ("a" * 3, "b" * 10, 7, (3, 4)),
    ):
        rig = HttpRig(card=CROSS)
        body = {"text_1": first, "text_2": second, "truncate_prompt_tokens": room + 1}
        exchange = rig.post("/score", body)
        call = await rig.next_call()
        assert call.request.prompt == [97] * kept[0] + [0] + [98] * kept[1]
        call.tell(vector(1))
        assert (await exchange.end()).status == 200


@pytest.mark.parametrize(("path", "count"), [("/rerank", 2049), ("/score", 4096)])
async def test_as_many_pairs_are_scored_by_cosine_as_by_a_classifier(path: str, count: int) -> None:
    rig = HttpRig(card=replace(CARD, vocab_size=5000))
    texts = [chr(200 + number) for number in range(count)]
    body: dict[str, Any] = {"text_1": texts[:2048], "text_2": texts[2048:]}
    if path == "/rerank":
        body = {"query": texts[0], "documents": texts[1:]}
    answer = await answered(rig, path, body, *[vector(1, 0)] * count)
    assert len(answer["data" if path == "/score" else "results"]) == 2048


async def test_no_top_n_and_zero_are_all_documents() -> None:
    body = {"query": "q", "documents": ["a", "b"], "top_n": 0}
    answer = await answered(HttpRig(card=CROSS), "/rerank", body, vector(0.5), vector(0.75))
    assert [one["index"] for one in answer["results"]] == [1, 0]


async def test_the_query_is_blamed_for_its_own_faults() -> None:
    for body, param, story in (
        ({"query": "q" * 70, "documents": ["d"]}, "query", "at most 64"),
        ({"query": "q", "documents": ["d" * 70]}, "documents", "at most 64"),
        ({"query": "\ud800", "documents": ["d"]}, "query", "UTF-8"),
        ({"query": "q", "documents": ["\ud800"]}, "documents", "UTF-8"),
    ):
        await HttpRig(card=CROSS).refused("/rerank", body, param, story)


async def test_a_text_is_not_cut_to_less_than_its_special_tokens() -> None:
    body = {"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 3}
    rig = HttpRig(card=CROSS, vocabulary=Framed())
    await rig.refused("/score", body, "truncate_prompt_tokens", "3 tokens are put around the text")


async def test_answers_name_the_model_as_the_client_has_named_it() -> None:
    adapter = AdapterSource("mine", "/adapters/mine", "d" * 64)
    rig = HttpRig(card=replace(CROSS, adapters={"mine": adapter}))
    for path, body in (
        ("/rerank", {"query": "q", "documents": ["a"]}),
        ("/score", {"text_1": "a", "text_2": "b"}),
        ("/classify", {"input": "a"}),
    ):
        assert (await answered(rig, path, {**body, "model": "mine"}, vector(0.5)))["model"] == "mine"


async def test_a_classifier_with_several_labels_gives_no_score() -> None:
    await HttpRig(card=LABELS).refused("/score", {"text_1": "a", "text_2": "b"}, "model", "use /classify")


@pytest.mark.parametrize("card", [CROSS, CARD])
async def test_documents_are_cut_and_ranked_by_their_fields(card: ModelCard) -> None:
    rig = HttpRig(card=card)
    documents = [{"title": "abcd", "body": "x", "id": "7"}, "efgh"]
    asked = {"query": "abcdef", "documents": documents, "rank_fields": ["title", "body"], "max_tokens_per_doc": 3}
    exchange = rig.post("/rerank", asked)
    prompts = []
    for number in range(2 if card is CROSS else 3):
        call = await rig.next_call()
        prompts.append(text_of(call.request.prompt))
        call.tell(vector(0.75 - number / 4) if card is CROSS else vector(1, 0))
    expected = ["abcdef\0abc", "abcdef\0efg"] if card is CROSS else ["abcdef", "abc", "efg"]
    assert prompts == expected
    results = (await exchange.end()).json["results"]
    assert [result["document"] for result in results] == [documents[0], {"text": "efgh"}]
