"""The call Embed of the public service: tasks, bounds and refusals, over a scripted core."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from baton.errors import InvalidRequest
from baton.messages.generation import Finished, ModelCard
from baton.messages.ids import REQUEST_ID_PATTERN
from baton.messages.pooling import (
    EmbedInput,
    EmbedRequest,
    EmbedResponse,
    EmbedResult,
    EmbedTask,
    ModelPooling,
    Pooling,
    PoolingRequest,
)
from router.admission.checks import check_generates
from router.front import embed
from router.pooling import part_ids
from tests.doubles.fake_handler import FakeHandler
from tests.doubles.fake_tokenizer import FakeTokenizer
from tests.support.http_rig import CARD, vector

LABELS = replace(CARD, pooling=ModelPooling(labels=("spam", "ham")))
PLAIN = EmbedRequest([EmbedInput("ab"), EmbedInput([7])], request_id="mine")


async def answered(request: EmbedRequest, card: ModelCard, *vectors: Finished) -> tuple[EmbedResponse, FakeHandler]:
    handler = FakeHandler()
    answering = asyncio.create_task(embed(request, handler, FakeTokenizer(), card, 5.0))
    for one in vectors:
        (await handler.calls.get()).tell(one)
    return await answering, handler


async def test_inputs_are_embedded_in_order() -> None:
    handler = FakeHandler()
    request = replace(PLAIN, pooling=Pooling.MEAN, normalize=False, priority=3, cache_salt="s", traceparent="t")
    answering = asyncio.create_task(embed(request, handler, FakeTokenizer(), CARD, None))
    calls = [await handler.calls.get() for _ in range(2)]
    asked = [call.request for call in calls]
    assert [one.prompt for one in asked] == [[97, 98], [7]]
    assert {(one.priority, one.cache_salt, one.traceparent) for one in asked} == {(3, "s", "t")}
    assert {one.pooling for one in asked} == {PoolingRequest(Pooling.MEAN, normalize=False)}
    for number, call in reversed(list(enumerate(calls))):
        call.tell(vector(number, 0.5))
    assert await answering == EmbedResponse("mine", [EmbedResult((0.0, 0.5)), EmbedResult((1.0, 0.5))], 6)


async def test_texts_are_labelled_and_pairs_are_scored() -> None:
    labelled, _ = await answered(replace(PLAIN, task=EmbedTask.CLASSIFY), LABELS, vector(0.25, 0.75), vector(1, 0))
    assert [(one.label, list(one.values)) for one in labelled.results] == [("ham", [0.25, 0.75]), ("spam", [1, 0])]
    pairs = EmbedRequest([EmbedInput("a", "b"), EmbedInput("a", "a")], EmbedTask.SCORE, request_id="mine")
    scored, _ = await answered(pairs, CARD, vector(1, 0), vector(0.6, 0.8))
    assert [list(one.values) for one in scored.results] == [[pytest.approx(0.6)], [1.0]]


async def test_results_of_many_numbers_are_made_in_a_thread() -> None:
    for size, num_threads in ((2, 0), (4097, 1)):
        answer, handler = await answered(replace(PLAIN, inputs=PLAIN.inputs[:1]), CARD, vector(*range(size)))
        assert list(answer.results[0].values) == list(range(size))
        assert handler.num_in_threads == num_threads


async def test_a_call_that_is_cancelled_ends_its_parts() -> None:
    handler = FakeHandler()
    answering = asyncio.create_task(embed(PLAIN, handler, FakeTokenizer(), CARD, None))
    calls = [await handler.calls.get() for _ in range(2)]
    answering.cancel()
    await asyncio.gather(*(call.is_closed.wait() for call in calls))


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (replace(PLAIN, inputs=()), "inputs"),
        (replace(PLAIN, inputs=[EmbedInput("a")] * 2049), "inputs[0]"),
        (replace(PLAIN, inputs=[EmbedInput("a"), EmbedInput(None)]), "inputs[1]"),
        (replace(PLAIN, inputs=[EmbedInput("a"), EmbedInput("")]), "inputs[1]"),
        (replace(PLAIN, inputs=[EmbedInput("a", "b")]), "inputs[0].second_text"),
        (replace(PLAIN, inputs=[EmbedInput("a" * 65)]), "inputs[0]"),
        (replace(PLAIN, request_id="a b"), "request_id"),
        (replace(PLAIN, pooling=Pooling.CLASSIFY), "pooling"),
        (replace(PLAIN, dimensions=1), "dimensions"),
        (replace(PLAIN, dimensions=0), "dimensions"),
        (replace(PLAIN, truncate_prompt_tokens=0), "truncate_prompt_tokens"),
        (replace(PLAIN, model="another"), "model"),
        (replace(PLAIN, task=EmbedTask.CLASSIFY), "model"),
        (replace(PLAIN, task=EmbedTask.SCORE), "inputs[0]"),
        (EmbedRequest([EmbedInput("a", "b")], EmbedTask.SCORE, request_id="mine", activate=False), "activate"),
        (EmbedRequest([EmbedInput("a", "b")], EmbedTask.SCORE, request_id="mine", normalize=False), "normalize"),
        (replace(PLAIN, inputs=[EmbedInput([1], "b")], task=EmbedTask.SCORE), "inputs[0]"),
    ],
)
async def test_what_can_not_be_made_is_refused_by_name(request_: EmbedRequest, field: str) -> None:
    handler = FakeHandler()
    with pytest.raises(InvalidRequest) as refusal:
        await embed(request_, handler, FakeTokenizer(), CARD, None)
    assert refusal.value.field == field
    assert handler.calls.empty()


async def test_lengths_that_a_model_was_trained_for_are_taken() -> None:
    for dimensions, sizes, is_taken in ((1, (), True), (1, (1,), True), (3, (), False), (1, (2,), False)):
        pooling = ModelPooling(is_matryoshka=True, matryoshka_dimensions=sizes)
        card = replace(CARD, pooling=pooling)
        request = replace(PLAIN, inputs=PLAIN.inputs[:1], dimensions=dimensions)
        if is_taken:
            answer, _ = await answered(request, card, vector(1))
            assert list(answer.results[0].values) == [1]
        else:
            with pytest.raises(InvalidRequest, match="dimensions: must be"):
                await answered(request, card)


async def test_an_answer_of_another_length_than_asked_for_is_noticed() -> None:
    unknown = replace(CARD, embedding_size=0)
    with pytest.raises(InvalidRequest, match="dimensions: must be 2"):
        await answered(replace(PLAIN, inputs=PLAIN.inputs[:1], dimensions=1), unknown, vector(0.6, 0.8))


async def test_a_cut_vector_is_compared_with_the_size_that_nodes_have_reported_meanwhile() -> None:
    handler = FakeHandler()
    request = replace(PLAIN, inputs=PLAIN.inputs[:1], dimensions=1)
    answering = asyncio.create_task(embed(request, handler, FakeTokenizer(), replace(CARD, embedding_size=0), None))
    call = await handler.calls.get()
    handler.reported_size = 2
    call.tell(vector(1))
    with pytest.raises(InvalidRequest, match="dimensions: must be 2"):
        await answering


def test_parts_of_calls_with_long_ids_have_ids_of_their_own() -> None:
    assert part_ids("mine", 1) == ["mine"]
    assert part_ids("m" * 60, 2) == ["m" * 60 + "-0", "m" * 60 + "-1"]
    found = {one for end in "ab" for one in part_ids("m" * 63 + end, 512)}
    assert len(found) == 1024
    assert all(REQUEST_ID_PATTERN.match(one) for one in found)


def test_a_model_that_generates_nothing_names_what_it_can_do() -> None:
    for pooling, paths in (
        (ModelPooling(is_encoder=True, generates=False), "/v1/embeddings or /v1/score or /v1/rerank"),
        (ModelPooling(labels=("a",), generates=False), "/v1/embeddings or /v1/score or /v1/rerank or /classify"),
        (ModelPooling(labels=("a", "b"), generates=False), "/v1/embeddings or /classify"),
    ):
        with pytest.raises(InvalidRequest) as refusal:
            check_generates(replace(CARD, pooling=pooling))
        assert refusal.value.reason.endswith(f": use {paths}")
