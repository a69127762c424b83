"""A stream that has begun goes on at nodes of its version alone, whichever router and attempt continues it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.errors import RequestNotFound, Status, VersionGone
from baton.messages.ids import AttemptKey
from baton.messages.node import NodeDescription, Outcome
from baton.messages.sampling import SamplingParams
from router.admission.limits import DispatchLimits
from router.admission.request import ValidRequest
from router.http.errors import kind_of
from tests.support.router_parts import MODEL, decode
from tests.support.router_rig import RouterRig, router_rig

OLD = (decode("d1"), decode("d2"))
NEW = tuple(replace(decode(name), model_fingerprint="new") for name in ("d3", "d4", "d5"))
LIMITS = DispatchLimits(recovery_wait_s=5.0)
THEIRS = AttemptKey("r", 2, 77)


async def come(rig: RouterRig, *nodes: NodeDescription) -> None:
    """Let exactly these nodes be registered, and those of them that live be attached."""
    rig.register(*nodes)
    await rig.wait_until_attached(sum(rig.nodes[node.node_id].is_up for node in nodes))


@pytest.mark.parametrize("n", [1, 2])
async def test_a_begun_stream_waits_for_a_node_of_its_version_and_goes_on_there(n: int) -> None:
    async with router_rig(*OLD, limits=LIMITS) as rig:
        reader = rig.ask("hello", max_tokens=4, n=n)
        rig.report("d1", await rig.next_attempt("d1"), 0, "ab")
        await reader.wait_for_tokens(2)
        # The version with most nodes is another one by now, and those of the stream's get no new requests.
        await come(rig, *OLD, *NEW)
        rig.nodes["d1"].die()
        again = await rig.next_submit("d2")
        assert list(again.output_token_ids) == ([97, 98] if n == 1 else [])
        rig.nodes["d2"].die()
        await rig.wait_until(lambda: rig.requests.num_waiting == 1)
        assert all(rig.nodes[node.node_id].inbox.empty() for node in NEW)
        await come(rig, *NEW, returned := decode("d6"))
        rig.timers.advance(1.0)
        last = await rig.next_submit(returned.node_id)
        for index in range(n):
            rig.report(
                "d6", last.attempt, 2 * (n == 1), "cd" if n == 1 else "abcd", Outcome.LENGTH, sequence_index=index
            )
        assert (await reader.finished()).path.decode_node == "d6"


async def test_a_begun_stream_whose_version_does_not_come_back_ends_and_says_why() -> None:
    async with router_rig(OLD[0], limits=LIMITS) as rig:
        reader = rig.ask("hello", max_tokens=4)
        rig.report("d1", await rig.next_attempt("d1"), 0, "ab")
        await reader.wait_for_tokens(2)
        rig.nodes["d1"].die()
        await come(rig, *NEW)
        await rig.wait_until(lambda: rig.requests.num_waiting == 1)
        # The waiting stream holds up no other request.
        other = rig.ask("hello", max_tokens=1)
        await rig.serve("d3", text="x")
        await other.finished()
        rig.timers.advance(5.1)
        with pytest.raises(
            VersionGone, match=rf"bits {OLD[0].bits}, of which none took work for 5 s: ask again"
        ) as gone:
            await reader.finished()
        assert (gone.value.status, gone.value.retryable) == (Status.ABORTED, True)
        assert (kind_of(gone.value).status, kind_of(gone.value).code) == (503, "version_gone")


async def test_a_stream_without_tokens_begins_anew_at_another_version() -> None:
    async with router_rig(OLD[0], limits=LIMITS) as rig:
        reader = rig.ask("hello", max_tokens=2)
        rig.report("d1", await rig.next_attempt("d1"))
        await rig.nodes["d1"].all_read()
        await come(rig, OLD[0], NEW[0])
        rig.nodes["d1"].die()
        await rig.serve("d3", text="xy")
        assert (await reader.finished()).path.attempts == 2


def record_lost_router(rig: RouterRig, node: NodeDescription) -> None:
    """Write what a lost router wrote about its request, which it sent to this node."""
    params = SamplingParams(seed=5, max_tokens=6)
    theirs = ValidRequest((5, 6, 7), params, request_id="r", model=MODEL, stop=(), num_returned=1)
    rig.left_behind(theirs, THEIRS, None, node)


@pytest.mark.parametrize("position", [0, 1])
async def test_another_router_continues_a_stream_at_its_version_if_its_client_has_tokens(position: int) -> None:
    async with router_rig(NEW[0], limits=LIMITS) as rig:
        record_lost_router(rig, OLD[0])
        reader = rig.resume("r", position, prompt=[5, 6, 7], max_tokens=6, seed=5)
        if position:
            await rig.wait_until(lambda: rig.requests.num_waiting == 1)
            await come(rig, NEW[0], OLD[1])
        name = "d2" if position else "d3"
        submit = await rig.next_submit(name)
        await rig.end(reader, name, submit.attempt, 0, "abcdef")
        assert reader.text == "abcdef"[position:]


async def test_a_client_that_has_to_send_its_prompt_again_gets_the_same_version() -> None:
    async with router_rig(*OLD, limits=LIMITS) as rig:
        record_lost_router(rig, OLD[0])
        reader = rig.resume("r", 1, call=2)
        assert await rig.next_adopt("d1") == THEIRS
        await come(rig, *OLD, *NEW)
        rig.nodes["d1"].die()
        await reader.raises(RequestNotFound, "ask for it again")
        repeated = rig.ask([5, 6, 7], request_id="r", max_tokens=6, seed=5, call=3)
        await rig.serve("d2", text="abcdef")
        await repeated.finished()
