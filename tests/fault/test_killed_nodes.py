"""SIGKILL of nodes at critical moments. Every request still gets exactly the tokens of an undisturbed run."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import replace

from baton.engine.sequences.sequence_group import sequence_seed
from baton.messages.generation import Accepted, Chunk
from tests.support.caller import TokenCount
from tests.support.process_cluster import ClusterSession
from tests.support.slow_model import assert_undisturbed, slow_request


async def test_an_undisturbed_cluster_gives_the_expected_tokens(session: ClusterSession) -> None:
    """The other tests compare with a closed form; the cluster's tokens equal it, greedy and sampled."""
    for request in (slow_request("plain"), slow_request("plain-sampled", sampled=True)):
        answer = await session.generate(request)
        assert_undisturbed(answer, request)
        assert answer.end.path.attempts == 1
        assert answer.end.kv_bytes > 0


async def test_killing_the_prefill_node_while_it_computes(session: ClusterSession) -> None:
    request = slow_request("prefill-dies", chunks=6, sampled=True)
    answering = asyncio.create_task(session.generate(request))
    decode = await session.wait_for_event("decode", "read_done", "prefill-dies")
    prefill = await session.wait_for_event("prefill", "chunk_computed", "prefill-dies")
    before = session.cluster.signal(prefill, signal.SIGKILL)
    answer = await answering
    assert_undisturbed(answer, request)
    assert answer.end.path.attempts >= 2
    first = [e.name for e in await session.trace(decode, "prefill-dies") if e.attempt.attempt == 1]
    assert "read_done" in first, "blocks had moved before it died"
    assert "kv_arrived" not in first, "not all of them"
    now = await session.wait_until_replaced(before)
    assert now.last_exit == "was ended by SIGKILL"


async def test_killing_the_decode_node_before_the_first_token(session: ClusterSession) -> None:
    request = slow_request("decode-dies-early", chunks=6)
    events: list[Accepted | Chunk] = []
    answering = asyncio.create_task(session.generate(request, on_event=events.append))
    decode = await session.wait_for_event("decode", "read_done", "decode-dies-early")
    prefill = await session.wait_for_event("prefill", "read_progress", "decode-dies-early")
    before = session.cluster.signal(decode, signal.SIGKILL)
    assert not [event for event in events if isinstance(event, Chunk)], "no token was out when it died"
    answer = await answering
    assert_undisturbed(answer, request)
    assert answer.end.path.attempts >= 2
    assert answer.end.path.decode_node != decode
    first = [e for e in await session.trace(prefill, "decode-dies-early") if e.attempt.attempt == 1]
    assert [e.detail for e in first if e.name == "lease_released"] == ["reader gone"], "nobody waited for a grace"
    await session.wait_until_replaced(before)


async def test_killing_the_decode_node_of_several_sequences(session: ClusterSession) -> None:
    """All sequences are replayed, wherever each was; a sequence that had ended is not sent again."""
    request = replace(slow_request("many-die", chunks=2, max_tokens=12, sampled=True), n=3)
    count = TokenCount()
    answering = asyncio.create_task(session.generate(request, on_event=count))
    await count.wait_for_tokens(2, num_sequences=3)
    decode = await session.wait_for_event("decode", "kv_arrived", "many-die")
    before = session.cluster.signal(decode, signal.SIGKILL)
    assert max(count.by_sequence.values()) < 12
    answer = await answering
    for index in range(3):
        assert_undisturbed(answer.sequence(index), replace(request, seed=sequence_seed(7, index)))
    assert sorted(answer.ends) == [0, 1, 2]
    assert answer.end.path.attempts == 2
    assert answer.end.completion_tokens == 36
    await session.wait_until_replaced(before)


async def test_killing_both_prefill_nodes_at_once(session: ClusterSession) -> None:
    requests = [slow_request(f"both-{i}", chunks=4, sampled=bool(i % 2)) for i in range(6)]
    answering = [asyncio.create_task(session.generate(request)) for request in requests]
    await asyncio.gather(*(session.wait_for_event("decode", "expected", f"both-{i}") for i in range(6)))
    killed = [session.cluster.signal(name, signal.SIGKILL) for name in session.cluster.nodes("prefill")]
    answers = await asyncio.gather(*answering)
    for answer, request in zip(answers, requests, strict=True):
        assert_undisturbed(answer, request)
    again = [answer for answer in answers if answer.end.path.attempts > 1]
    assert len(again) >= 3
    assert {answer.end.path.prefill_node for answer in again} == {""}, "the decode nodes computed alone"
    for before in killed:
        await session.wait_until_replaced(before)


async def test_killing_every_node_at_once(session: ClusterSession) -> None:
    """The stream waits for the nodes' successors and continues where it was."""
    request = slow_request("all-die", chunks=2, max_tokens=48, sampled=True)
    answering = asyncio.create_task(session.generate(request))
    await session.wait_for_event("decode", "remote_kv_arrived", request.request_id)
    names = (*session.cluster.nodes("prefill"), *session.cluster.nodes("decode"))
    killed = [session.cluster.signal(name, signal.SIGKILL) for name in names]
    answer = await answering
    assert_undisturbed(answer, request)
    assert answer.end.path.attempts >= 2
    for before in killed:
        await session.wait_until_replaced(before)


async def test_a_request_id_that_is_used_again_is_a_new_request(session: ClusterSession) -> None:
    """A client leaves and sends a request with the same id again at once."""
    request = slow_request("again", chunks=2)
    call = session.call(request)
    await call.read()
    await session.wait_for_event("prefill", "chunk_computed", "again")
    call.cancel()
    await session.wait_until_idle()
    for _ in range(2):
        answer = await session.generate(request)
        assert_undisturbed(answer, request)
        assert (answer.end.path.attempts, answer.end.kv_bytes > 0) == (1, True)
