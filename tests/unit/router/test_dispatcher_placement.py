"""The dispatcher together with the placer: cache updates reach the placer, and requests follow them."""

from __future__ import annotations

from dataclasses import replace

from baton.messages.kv_cache import BlockStored, KVCacheUpdate
from baton.messages.node import NodeDescription, Outcome, StageTimings, WatchKVCache
from router.placement.placer import PlacementSettings, Placer
from tests.support.router_parts import block_keys, decode, prefill
from tests.support.router_rig import RouterRig, router_rig

PROMPT = "a long beginning, and an end"


def reporting_node(node: NodeDescription) -> NodeDescription:
    """Return the description of a node that reports its cache."""
    return replace(node, kv_layout="layout")


def placer() -> Placer:
    return Placer(PlacementSettings(alone_tokens=0))


def stored(text: str) -> BlockStored:
    return BlockStored(block_keys([ord(letter) for letter in text], 4))


async def tell_cached(rig: RouterRig, name: str, update: KVCacheUpdate) -> None:
    node = rig.nodes[name]
    node.report(kv_cache=update)
    await node.all_read()


async def asked_for_everything(rig: RouterRig, name: str) -> None:
    assert isinstance(await rig.nodes[name].inbox.get(), WatchKVCache)


async def serve_request(rig: RouterRig, pair: tuple[str, str]) -> None:
    """Send a request and run it to its end on these nodes."""
    reader = rig.ask(PROMPT, max_tokens=2)
    attempt = await rig.next_attempt(*pair)
    rig.report(pair[0], attempt, 0, "x", Outcome.HANDED_OFF, StageTimings(1, 2))
    rig.report(pair[1], attempt, 1, "y", Outcome.LENGTH, StageTimings(transfer_ms=3, kv_bytes=10))
    finished = await reader.finished()
    (told,) = rig.requests.placer.explain(reader.accepted.request_id, rig.timers.monotonic())
    assert told.decision.measured is not None
    assert (told.decision.measured.timings.queue_ms, told.decision.measured.first_token_ms) == (1, finished.ttft_ms)


async def test_nodes_are_asked_for_their_cache_and_requests_follow_it() -> None:
    nodes = [reporting_node(prefill("p1")), reporting_node(prefill("p2")), reporting_node(decode())]
    async with router_rig(*nodes, placer=placer()) as rig:
        for name in ("p1", "p2", "d1"):
            await asked_for_everything(rig, name)
        await tell_cached(rig, "p2", KVCacheUpdate(0, 0, [stored(PROMPT)], restart=True))
        for _ in range(3):
            await serve_request(rig, ("p2", "d1"))


async def test_a_gap_in_cache_updates_requests_a_snapshot() -> None:
    nodes = [reporting_node(prefill("p1")), reporting_node(prefill("p2")), reporting_node(decode())]
    async with router_rig(*nodes, placer=placer()) as rig:
        for name in ("p1", "p2", "d1"):
            await asked_for_everything(rig, name)
        await tell_cached(rig, "p2", KVCacheUpdate(0, 0, [], restart=True))
        await tell_cached(rig, "p2", KVCacheUpdate(4, 5, [stored("nothing of this")]))
        await asked_for_everything(rig, "p2")
        await tell_cached(rig, "p2", KVCacheUpdate(5, 5, [stored(PROMPT)], restart=True))
        await serve_request(rig, ("p2", "d1"))


async def test_nodes_are_not_asked_for_caches_that_no_policy_uses() -> None:
    async with router_rig(reporting_node(prefill()), reporting_node(decode())) as rig:
        await serve_request(rig, ("p1", "d1"))


async def test_a_request_cancelled_before_or_after_placement_leaves_nothing() -> None:
    async with router_rig(reporting_node(prefill()), reporting_node(decode()), placer=placer()) as rig:
        for name in ("p1", "d1"):
            await asked_for_everything(rig, name)
        reader = rig.ask(PROMPT, max_tokens=2)
        await rig.next_submit("p1")
        assert not rig.requests.placer.is_idle
        await reader.leaves()
        assert rig.requests.placer.is_idle


async def test_prompts_on_a_decode_node_keep_no_hand_off_from_it() -> None:
    small = reporting_node(decode(max_num_batched_tokens=8))
    async with router_rig(reporting_node(prefill()), small, placer=placer()) as rig:
        for name in ("p1", "d1"):
            await asked_for_everything(rig, name)
        await rig.tell_all("d1", running=1, uncomputed_tokens=1000)
        await serve_request(rig, ("p1", "d1"))
