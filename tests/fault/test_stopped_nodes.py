"""SIGSTOP: a node that neither answers nor dies. Its silence is noticed, and its late messages change nothing."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

from tests.support.caller import TokenCount
from tests.support.process_cluster import ClusterSession
from tests.support.slow_model import assert_undisturbed, slow_request


async def test_a_decode_node_that_is_stopped_in_mid_stream(session: ClusterSession) -> None:
    request = slow_request("decode-stops", chunks=2, max_tokens=48, sampled=True)
    count = TokenCount()
    answering = asyncio.create_task(session.generate(request, on_event=count))
    await count.wait_for_tokens(4)
    name = await session.wait_for_event("decode", "kv_arrived", request.request_id)
    process = session.cluster.process(name)
    with session.cluster.stopped(process.pid):
        assert count.by_sequence[0] < 48
        answer = await answering
        assert_undisturbed(answer, request)
        assert answer.end.path.attempts == 2
        assert answer.end.path.decode_node != name
        status = await session.status()
        assert next(node for node in status.nodes if node.name == name).status in ("Suspect", "Lost")
    await _is_used_again(session, name, process.incarnation)


async def test_a_prefill_node_that_is_stopped_while_it_computes(session: ClusterSession) -> None:
    request = slow_request("prefill-stops", chunks=6, sampled=True)
    answering = asyncio.create_task(session.generate(request))
    decode = await session.wait_for_event("decode", "read_done", request.request_id)
    name = await session.wait_for_event("prefill", "chunk_computed", request.request_id)
    process = session.cluster.process(name)
    with session.cluster.stopped(process.pid):
        answer = await answering
        assert_undisturbed(answer, request)
        assert answer.end.path.attempts == 2
        first = [e.name for e in await session.trace(decode, request.request_id) if e.attempt.attempt == 1]
        assert "kv_arrived" not in first
        await session.wait_until_idle(decode)
    await _is_used_again(session, name, process.incarnation)


async def test_all_nodes_stopped_for_a_while(session: ClusterSession) -> None:
    """All nodes have failed the request, and there are no others: it continues when the nodes do."""
    request = slow_request("all-stop", chunks=2, max_tokens=48)
    answering = asyncio.create_task(session.generate(request))
    await session.wait_for_event("decode", "remote_kv_arrived", request.request_id)
    names = [*session.cluster.nodes("prefill"), *session.cluster.nodes("decode")]
    with ExitStack() as held:
        for name in names:
            held.enter_context(session.cluster.stopped(session.cluster.process(name).pid))
        await session.wait_for_status(lambda status: status.health == "unavailable")
    answer = await answering
    assert_undisturbed(answer, request)
    assert answer.end.path.attempts >= 2


async def _is_used_again(session: ClusterSession, name: str, incarnation: str) -> None:
    """The same process is used again, all processes are idle, and new requests run on it."""
    await session.wait_until_whole()
    await session.wait_until_idle()
    assert session.cluster.process(name).incarnation == incarnation
    requests = [slow_request(f"after-{name}-{i}", chunks=1) for i in range(4)]
    answers = await asyncio.gather(*map(session.generate, requests))
    for answer, request in zip(answers, requests, strict=True):
        assert_undisturbed(answer, request)
        assert answer.end.path.attempts == 1
    used = {answer.end.path.prefill_node for answer in answers} | {answer.end.path.decode_node for answer in answers}
    assert name in used
