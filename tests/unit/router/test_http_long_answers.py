"""Long answers with log-probabilities: written in pieces, as fast as the client reads them."""

from __future__ import annotations

import asyncio
import json

import pytest

from baton.messages.generation import Chunk
from baton.messages.logprob_rows import LogprobRows
from baton.messages.sampling import TokenLogprobs
from tests.doubles.fake_handler import FakeCall
from tests.support.http_client import Exchange
from tests.support.http_rig import HttpRig, finished

NUM_TOKENS = 2400
TOP = [(97 + place, -0.5 * place) for place in range(20)]
LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


async def asked(rig: HttpRig, num_tokens: int = NUM_TOKENS, n: int = 2) -> tuple[Exchange, FakeCall]:
    """A call whose sequences have these tokens, and whose client reads nothing yet."""
    exchange = rig.post("/v1/completions", {"prompt": "ab", "logprobs": 20, "n": n, "max_tokens": num_tokens})
    call = await rig.next_call()
    assert call.request.delivery == "whole"
    exchange.stop_reading()
    position = TokenLogprobs(97, -0.5, 1, TOP)
    for index in range(n):
        for first in range(0, num_tokens, 50):
            rows = LogprobRows.of([position] * min(50, num_tokens - first))
            call.tell(Chunk(first, (97,) * len(rows), "a" * len(rows), rows, index))
    call.tell(finished())
    await exchange.is_stuck.wait()
    return exchange, call


async def test_a_long_answer_comes_in_pieces_while_its_request_stays_open() -> None:
    exchange, call = await asked(HttpRig())
    assert not call.is_closed.is_set()
    exchange.resume_reading()
    answer = await exchange.end()
    assert call.is_closed.is_set()
    assert "content-length" not in answer.headers
    assert answer.headers["content-type"] == "application/json"
    for choice in answer.json["choices"]:
        found = choice["logprobs"]
        assert tuple(found) == LISTS
        assert [len(found[name]) for name in LISTS] == [NUM_TOKENS] * 4
        assert found["text_offset"] == list(range(NUM_TOKENS))
        assert found["top_logprobs"] == [{chr(token): logprob for token, logprob in TOP}] * NUM_TOKENS
    assert answer.body == json.dumps(answer.json, ensure_ascii=False).encode()


async def test_a_short_answer_is_sent_when_its_request_is_over() -> None:
    exchange, call = await asked(HttpRig(), num_tokens=100, n=1)
    assert call.is_closed.is_set()
    exchange.resume_reading()
    answer = await exchange.end()
    assert int(answer.headers["content-length"]) == len(answer.body)


async def test_a_client_that_leaves_in_the_middle_ends_its_request() -> None:
    exchange, call = await asked(HttpRig())
    exchange.disconnect()
    await asyncio.wait_for(call.is_closed.wait(), 10)
    await exchange.task


async def test_a_fault_in_the_middle_cuts_the_answer(caplog: pytest.LogCaptureFixture) -> None:
    rig = HttpRig()
    exchange = rig.post("/v1/completions", {"prompt": "ab", "logprobs": 20, "max_tokens": NUM_TOKENS})
    call = await rig.next_call()
    rows = LogprobRows.of([TokenLogprobs(97, -0.5, 1, TOP)] * 2 * NUM_TOKENS)
    broken = [TokenLogprobs(97, -0.5, 1, [("no id", -0.5)])]  # type: ignore[list-item]
    call.tell(Chunk(0, (97,), "a", rows), Chunk(1, (97,), "a", broken), finished())
    await exchange.task
    assert (exchange.status, exchange.is_complete) == (200, False)
    assert call.is_closed.is_set()
    assert "its connection is cut" in caplog.text
