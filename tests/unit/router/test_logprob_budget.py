"""The memory of log-probabilities: reserved before a request begins, and given back however it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from baton.errors import (
    Cancelled,
    DeadlineExceeded,
    DuplicateRequest,
    EngineFault,
    InvalidRequest,
    LogprobsFull,
    RequestNotFound,
    SlowReader,
)
from baton.messages.generation import Accepted, Chunk, Delivery, Finished, GenerateEvent, GenerateRequest
from baton.messages.logprob_rows import BLOCK_ROWS, row_bytes
from baton.messages.node import Outcome
from baton.messages.sampling import SamplingParams
from router.admission.limits import DispatchLimits
from router.admission.logprob_budget import KEPT_TOKENS, UNREAD_TOKENS, LogprobBudget, reservation_for
from router.admission.request import ValidRequest
from tests.support.router_parts import decode, prefill
from tests.support.router_rig import RouterRig, router_rig

EACH = row_bytes(2)
LIMITS = DispatchLimits(logprob_memory=10 * EACH)
LARGE = prefill(max_model_len=5000, num_blocks=5000), decode(max_model_len=5000, num_blocks=5000)
MOST_KEPT = KEPT_TOKENS + BLOCK_ROWS
FEW = MOST_KEPT + UNREAD_TOKENS


def request(**fields: int) -> ValidRequest:
    returned = fields.pop("num_returned", fields.get("n", 1))
    return ValidRequest((1,) * 5, SamplingParams(seed=1, **fields), request_id="r", model="m", num_returned=returned)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("asked", "delivery", "num_bytes", "num_covered"),
    [
        (request(max_tokens=9), "whole", 0, 0),
        (request(max_tokens=9, logprobs=2), "stream", 9 * EACH, 0),
        (request(max_tokens=100, logprobs=2), "stream", 2 * 100 * EACH, 100),
        (request(max_tokens=9000, logprobs=2), "whole", 9000 * EACH, 0),
        (request(max_tokens=9000, logprobs=2, n=3), "stream", 3 * FEW * EACH, 3 * UNREAD_TOKENS),
        (request(max_tokens=9000, logprobs=0, n=3, num_returned=1), "whole", 3 * 9000 * 16, 0),
        (request(max_tokens=9000, logprobs=0, n=3, num_returned=1), "stream", 3 * (9000 + MOST_KEPT) * 16, 0),
        (request(max_tokens=9, prompt_logprobs=2), "whole", 4 * EACH, 0),
        (request(max_tokens=9, prompt_logprobs=0, logprobs=2), "whole", 4 * 16 + 9 * EACH, 0),
        (request(max_tokens=9, logprobs=2), "json", 9 * (EACH + 3 * 110), 9),
        (request(max_tokens=90_000, logprobs=2), "json", UNREAD_TOKENS * (EACH + 3 * 110), UNREAD_TOKENS),
    ],
)
def test_a_request_reserves_what_may_have_to_be_kept(
    asked: ValidRequest, delivery: Delivery, num_bytes: int, num_covered: int
) -> None:
    found = reservation_for(asked, delivery)
    assert (found.num_bytes, found.num_covered) == (num_bytes, num_covered)


@pytest.mark.parametrize(
    ("asked", "delivery", "field", "advice"),
    [
        (request(max_tokens=9000, logprobs=2), "whole", "logprobs", "fewer alternatives, tokens or sequences, or for"),
        (request(max_tokens=9000, logprobs=2), "json", "logprobs", "fewer alternatives, tokens or sequences"),
        (request(max_tokens=1, logprobs=0, prompt_logprobs=2), "whole", "prompt_logprobs", "with a shorter prompt"),
    ],
)
def test_a_refusal_says_what_would_need_less(asked: ValidRequest, delivery: Delivery, field: str, advice: str) -> None:
    needed = reservation_for(asked, delivery).num_bytes
    with pytest.raises(InvalidRequest, match=advice) as caught:
        LogprobBudget(needed - 1, Random(1)).reserve(asked, delivery)
    assert caught.value.field == field
    budget = LogprobBudget(needed, Random(1))
    budget.reserve(asked, delivery)
    with pytest.raises(LogprobsFull, match=advice):
        budget.reserve(asked, delivery)


def test_a_stream_that_is_not_read_reserves_more_until_there_is_none() -> None:
    asked = request(max_tokens=90_000, logprobs=2)
    budget = LogprobBudget((FEW + 3 * UNREAD_TOKENS) * EACH, Random(1))
    reserved = budget.reserve(asked, "stream")
    assert budget.covers(reserved, UNREAD_TOKENS)
    assert budget.num_bytes == FEW * EACH
    assert budget.covers(reserved, UNREAD_TOKENS + 1)
    assert budget.num_bytes == (FEW + UNREAD_TOKENS) * EACH, "twice as many, to be asked seldom"
    assert not budget.covers(reserved, 4 * UNREAD_TOKENS + 1)
    budget.release(reserved)
    assert budget.num_bytes == 0
    assert budget.covers(reserved, 10**6)
    assert budget.num_bytes == 0, "what comes after its end is not kept"


async def test_what_is_kept_in_json_reserves_more_as_it_comes_until_there_is_none() -> None:
    each = 16 + 110
    async with router_rig(*LARGE, limits=DispatchLimits(logprob_memory=700 * each)) as rig:
        rig.card = replace(rig.card, max_model_len=LARGE[0].max_model_len)
        budget = rig.requests.logprob_budget
        reader = rig.ask(request_id="r", max_tokens=4000, logprobs=0, delivery="json")
        attempt = await rig.next_attempt("p1", "d1")
        assert budget.num_bytes == UNREAD_TOKENS * each
        rig.report("p1", attempt, 0, "a", Outcome.HANDED_OFF, logprob=-0.5)
        for first in range(1, 2 * UNREAD_TOKENS, 16):
            rig.report("d1", attempt, first, "b" * 16, logprob=-0.5)
            await reader.wait_for_tokens(first + 16)
        assert budget.num_bytes == (2 * UNREAD_TOKENS + 1) * each
        rig.report("d1", attempt, 2 * UNREAD_TOKENS + 1, "b" * 200, logprob=-0.5)
        caught = await reader.raises(LogprobsFull, r"513 tokens so far .* ask for fewer tokens or alternatives")
        assert caught.retry_after_s > 0
        assert budget.num_bytes == 0


async def test_what_is_too_much_is_refused_before_it_begins() -> None:
    async with router_rig(prefill(), decode(), limits=LIMITS) as rig:
        caught = await rig.ask(max_tokens=11, logprobs=2).raises(
            InvalidRequest, r"logprobs: .* 352 bytes, and those of all requests 320"
        )
        assert caught.field == "logprobs"
        first = await rig.accepted(request_id="r", max_tokens=6, logprobs=2)
        refused = await rig.ask(max_tokens=5, logprobs=2).raises(LogprobsFull, r"160 bytes, and 128 of 320 .* are free")
        assert refused.retry_after_s > 0
        assert rig.requests.counters.rejections == {"InvalidRequest": 1, "LogprobsFull": 1}
        plain = await rig.accepted(request_id="plain", max_tokens=50)
        for name in ("r", "plain"):
            rig.dispatcher.cancel(name)
        for reader in (first, plain):
            await reader.raises(Cancelled)


@pytest.mark.parametrize("how", ["ends", "cancelled", "failed", "left", "late", "duplicate"])
async def test_memory_is_given_back_however_a_request_ends(how: str) -> None:
    async with router_rig(prefill(), decode(), limits=LIMITS) as rig:
        budget = rig.requests.logprob_budget
        if how == "late":
            await rig.ask(max_tokens=9, logprobs=2, timeout_s=-1.0).raises(DeadlineExceeded)
            assert budget.num_bytes == 0
            return
        await _end(rig, how)
        assert budget.num_bytes == 0


async def _end(rig: RouterRig, how: str) -> None:
    budget = rig.requests.logprob_budget
    asked = GenerateRequest("hello", request_id="r", max_tokens=2, logprobs=2)
    events = rig.dispatcher.generate(asked)
    await anext(events)
    assert budget.num_bytes == 2 * EACH
    attempt = await rig.next_attempt("p1", "d1")
    rig.report("p1", attempt, 0, "a", Outcome.HANDED_OFF, logprob=-0.5)
    match how:
        case "ends":
            rig.report("d1", attempt, 1, "b", Outcome.LENGTH, logprob=-0.5)
            assert len([event async for event in events]) >= 2
        case "cancelled":
            rig.dispatcher.cancel("r")
            with pytest.raises(Cancelled):
                [event async for event in events]
        case "failed":
            rig.report("d1", attempt, 1, "", Outcome.ERROR)
            with pytest.raises(EngineFault):
                [event async for event in events]
        case "left":
            await events.aclose()
        case "duplicate":
            with pytest.raises(DuplicateRequest):
                await anext(rig.dispatcher.generate(asked))
            assert budget.num_bytes == 2 * EACH
            await events.aclose()


async def test_a_stream_that_is_not_read_ends_when_no_memory_is_left() -> None:
    limits = DispatchLimits(logprob_memory=(FEW + 10) * 16)
    async with router_rig(*LARGE, limits=limits) as rig:
        rig.card = replace(rig.card, max_model_len=LARGE[0].max_model_len)
        events = rig.dispatcher.generate(GenerateRequest("hello", request_id="r", max_tokens=4000, logprobs=0))
        await anext(events)
        attempt = await rig.next_attempt("p1", "d1")
        rig.report("p1", attempt, 0, "a", Outcome.HANDED_OFF, logprob=-0.5)
        rig.report("d1", attempt, 1, "b" * (UNREAD_TOKENS + 10), logprob=-0.5)
        with pytest.raises(SlowReader, match="no memory is left"):
            [event async for event in events]
        assert rig.requests.logprob_budget.num_bytes == 0


async def test_a_client_that_comes_back_gets_what_is_kept_although_no_memory_is_left() -> None:
    async with router_rig(*LARGE, limits=DispatchLimits(logprob_memory=(FEW + 10) * 16)) as rig:
        rig.card = replace(rig.card, max_model_len=LARGE[0].max_model_len)
        old = rig.ask(request_id="r", max_tokens=4000, logprobs=0)
        attempt = await rig.next_attempt("p1", "d1")
        rig.report("p1", attempt, 0, "a", Outcome.HANDED_OFF, logprob=-0.5)
        for first in range(1, 601, 100):
            rig.report("d1", attempt, first, "b" * 100, logprob=-0.5)
            await old.wait_for_tokens(first + 100)
        events = rig.dispatcher.resume("r", [0])
        await anext(events)
        rig.report("d1", attempt, 601, "b" * UNREAD_TOKENS, logprob=-0.5)
        for _ in range(8):
            await asyncio.sleep(0)
        taken = 0
        while taken < 601 + UNREAD_TOKENS:
            event = await anext(events)
            assert isinstance(event, Chunk)
            taken += len(event.token_ids)
        assert not rig.requests.counters.failed
        rig.report("d1", attempt, 601 + UNREAD_TOKENS, "b" * (UNREAD_TOKENS + 11), logprob=-0.5)
        for _ in range(8):
            await asyncio.sleep(0)
        with pytest.raises(SlowReader, match="read faster"):
            [event async for event in events]
        await old.raises(Cancelled)


async def test_an_old_stream_keeps_nothing_for_a_client_that_came_back() -> None:
    async with router_rig(prefill(), decode()) as rig:
        old = rig.dispatcher.generate(GenerateRequest("hello", request_id="r", max_tokens=9, logprobs=0))
        await anext(old)
        rig.report("p1", await rig.next_attempt("p1"), 0, "a", Outcome.HANDED_OFF, logprob=-0.5)
        await asyncio.sleep(0)
        new = rig.dispatcher.resume("r", [0])
        await anext(new)
        with pytest.raises(Cancelled):
            await anext(old)
        assert isinstance(await anext(new), Chunk)
        await new.aclose()


async def test_a_client_that_comes_back_for_what_is_forgotten_sends_its_request_again() -> None:
    async with router_rig(*LARGE) as rig:
        rig.card = replace(rig.card, max_model_len=LARGE[0].max_model_len)
        asked: dict[str, Any] = {"request_id": "r", "max_tokens": 4000, "logprobs": 0}
        old = rig.ask(**asked)
        attempt = await rig.next_attempt("p1", "d1")
        rig.report("p1", attempt, 0, "a", Outcome.HANDED_OFF, logprob=-0.5)
        for first in range(1, 2 * KEPT_TOKENS, 16):
            rig.report("d1", attempt, first, "b" * 16, logprob=-0.5)
        count = 2 * KEPT_TOKENS + 1
        await old.wait_for_tokens(count)
        kept = rig.resume("r", count - KEPT_TOKENS)
        await kept.wait_for_tokens(KEPT_TOKENS)
        assert sum(len(one.logprobs) for one in kept.chunks) == KEPT_TOKENS
        await rig.resume("r", 100).raises(RequestNotFound, "send it again")
        again = await rig.accepted(**asked)
        rig.dispatcher.cancel("r")
        for reader in (old, again, kept):
            await reader.raises(Cancelled)
        await asyncio.sleep(0)
        assert rig.requests.logprob_budget.num_bytes == 0


async def _taken(rig: RouterRig, events: AsyncGenerator[GenerateEvent, None]) -> None:
    """Let a request of two tokens end that was accepted, and take all its events without closing it."""
    attempt = await rig.next_attempt("p1", "d1")
    rig.report("p1", attempt, 0, "a", Outcome.HANDED_OFF, logprob=-0.5)
    rig.report("d1", attempt, 1, "b", Outcome.LENGTH, logprob=-0.5)
    while not isinstance(await anext(events), Finished):
        pass


async def test_an_unread_answer_keeps_its_memory_and_neither_its_place_nor_its_id() -> None:
    async with router_rig(prefill(), decode(), limits=DispatchLimits(max_running=1)) as rig:
        requests = rig.dispatcher.requests
        asked = GenerateRequest("hello", request_id="r", max_tokens=2, logprobs=0, delivery="whole")
        calls = [rig.dispatcher.generate(asked) for _ in range(2)]
        for count, events in enumerate(calls, 1):
            assert isinstance(await anext(events), Accepted)
            await _taken(rig, events)
            assert (requests.num_placed, requests.num_live) == (0, count)
            assert requests.logprob_budget.num_bytes == count * 2 * 16
        assert not requests.idle.is_set()
        for events in calls:
            await events.aclose()
        assert (requests.num_live, requests.logprob_budget.num_bytes) == (0, 0)
        assert requests.idle.is_set()


async def test_a_call_that_gets_its_answer_whole_goes_on_when_somebody_comes_back_for_it() -> None:
    async with router_rig(prefill(), decode()) as rig:
        events = rig.dispatcher.generate(
            GenerateRequest("hello", request_id="r", max_tokens=2, logprobs=0, delivery="whole")
        )
        assert isinstance(await anext(events), Accepted)
        await rig.resume("r", 0).raises(RequestNotFound, "wait for its answer")
        await _taken(rig, events)
        await events.aclose()
