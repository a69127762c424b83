"""Hand-off cases that other systems have had bugs in, one by one, over a whole cluster in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random

import pytest

from baton.errors import Cancelled, TransferCause
from baton.failpoints import set_injector
from baton.messages.generation import Finished, GenerateRequest
from baton.messages.ids import Peer
from baton.messages.sampling import SamplingParams
from baton.node.kv.intake import Intake
from baton.node.kv.offering import Offering
from baton.node.leftovers import GIVE_UP_AFTER_S
from baton.runner.blocks.sub_blocks import WHOLE, Division
from kv_transfer.digests import OfferedDigests
from kv_transfer.link.link_client import LinkClient
from kv_transfer.mover.agent_reads import STALL_S
from kv_transfer.mover.mover import Mover
from kv_transfer.sender.lease_values import LeaseTimes
from router.placement.breaker import PAIR_FAILURES
from tests.support.handoff_failpoints import HANDOFF_FAILPOINTS
from tests.support.simulated_cluster import ROUTER, STEP_S, SimulatedCluster, SimulatedLimits, simulated_cluster
from tests.support.simulated_oracle import expected_tokens
from tests.support.virtual_time import run_virtually, virtually

SMALL = SimulatedLimits(num_blocks=24, chunk=8)
AT_ONCE_S = 0.5
"""The number of seconds in which blocks are freed without waiting for a lease (4 s) or a grace period (2 s)."""
BOUND_S = 30.0


@pytest.fixture(autouse=True)
def no_failpoints() -> Iterator[None]:
    yield
    set_injector(None)


def prompt_of(num_tokens: int, seed: int = 0) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(SMALL.spec.vocab_size) for _ in range(num_tokens)]


async def ask(cluster: SimulatedCluster, prompt: list[int], request_id: str = "r", max_tokens: int = 8) -> Finished:
    """Run a request to its end, and check that its answer is complete and right."""
    async with asyncio.timeout(BOUND_S):
        request = GenerateRequest(prompt, request_id, temperature=0.0, max_tokens=max_tokens)
        answer = await cluster.generate(request)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    assert answer.error is None
    assert answer.token_ids == expected_tokens(prompt, params, SMALL.spec)
    assert answer.finished is not None
    return answer.finished


def events(cluster: SimulatedCluster, node_id: str, name: str) -> list[tuple[str, int, str]]:
    """Request id, value and detail of each event of this name that a node recorded."""
    found = [event for event in cluster.nodes[node_id].log.after(0) if event.name == name]
    return [(event.attempt.request_id, event.value, event.detail) for event in found]


async def recorded(cluster: SimulatedCluster, node_id: str, name: str, count: int = 1) -> None:
    """Wait until a node has recorded the event this many times. Polling costs nothing in virtual time."""
    for _ in range(int(BOUND_S / STEP_S)):
        if len(events(cluster, node_id, name)) >= count:
            return
        await asyncio.sleep(STEP_S)
    raise AssertionError(f"{node_id} never recorded {name}")


async def all_offered(cluster: SimulatedCluster, num_blocks: int) -> None:
    """Wait until the decode node has been offered this many blocks, in any number of offers."""
    for _ in range(int(BOUND_S / STEP_S)):
        if sum(count for _, count, _ in events(cluster, "decode-0", "offer_received")) == num_blocks:
            return
        await asyncio.sleep(STEP_S)
    raise AssertionError("decode-0 was not offered everything")


async def reading(cluster: SimulatedCluster, count: int) -> None:
    """Wait until this many prompts are being read at once."""
    readers = [node.half for node in cluster.nodes.values() if isinstance(node.half, Intake)]
    for _ in range(int(BOUND_S / STEP_S)):
        if sum(reader.counts().in_progress for reader in readers) == count:
            return
        await asyncio.sleep(STEP_S)
    raise AssertionError(f"{count} prompts were never read at once")


async def idle(cluster: SimulatedCluster, within_s: float = BOUND_S) -> None:
    await cluster.wait_until_idle(within_s)
    for node in cluster.nodes.values():
        node.assert_nothing_is_left()


# Prefixes that are cached on one or both nodes.


@virtually
async def test_a_full_hit_on_the_decode_node_alone() -> None:
    async with simulated_cluster(Random(1), limits=SMALL) as cluster:
        prompt = prompt_of(33)
        await ask(cluster, prompt, "first")
        cluster.kill("prefill-0")
        await cluster.start("prefill-0")
        await cluster.wait_until_whole()
        block_bytes = cluster.nodes["decode-0"].runner.layout.block_bytes
        assert (await ask(cluster, prompt, "again")).kv_bytes == block_bytes, "the last block alone"
        assert ("again", 9, "") in events(cluster, "prefill-0", "closing_offered"), "all were offered"
        await idle(cluster)


@virtually
async def test_a_hit_on_the_prefill_node_alone_still_offers_everything() -> None:
    async with simulated_cluster(Random(1), limits=SMALL) as cluster:
        prompt = prompt_of(33)
        first = await ask(cluster, prompt, "first")
        cluster.kill("decode-0")
        await cluster.start("decode-0")
        await cluster.wait_until_whole()
        again = await ask(cluster, prompt, "again")
        assert again.kv_bytes == first.kv_bytes > 0
        assert again.cached_tokens == 32
        chunks = [value for name, value, _ in events(cluster, "prefill-0", "chunk_computed") if name == "again"]
        assert len(chunks) == 1, "it computed next to nothing"
        await idle(cluster)


@virtually
async def test_a_partial_hit_on_either_side() -> None:
    async with simulated_cluster(Random(1), limits=SMALL) as cluster:
        block_bytes = cluster.nodes["decode-0"].runner.layout.block_bytes
        await ask(cluster, prompt_of(20), "first")
        longer = await ask(cluster, [*prompt_of(20), *prompt_of(12, seed=1)], "longer")
        assert longer.kv_bytes == 3 * block_bytes
        other = await ask(cluster, [*prompt_of(8), *prompt_of(12, seed=2)], "other")
        assert other.kv_bytes == 3 * block_bytes
        await idle(cluster)


@pytest.mark.parametrize("seed", range(100, 110))
@virtually
async def test_prompts_that_fit_on_one_node_only_do_not_deadlock(seed: int) -> None:
    """Ten prompts, and blocks for two or three of them, not as many on both nodes, so that some prompts pass others."""
    rng = Random(seed)
    num_prefill_blocks, num_blocks = rng.randrange(12, 20), rng.randrange(14, 22)
    limits = replace(
        SMALL, max_num_seqs=8, lease=LeaseTimes(), num_prefill_blocks=num_prefill_blocks, num_blocks=num_blocks
    )
    async with simulated_cluster(rng, limits=limits) as cluster:

        async def one(number: int) -> Finished:
            await asyncio.sleep(rng.uniform(0, 0.05))
            prompt = prompt_of(rng.choice([3, 9, 17, 25, 33, 37]), number)
            return await ask(cluster, prompt, f"r{number}", rng.randrange(2, 10))

        began_at = asyncio.get_running_loop().time()
        ends = await asyncio.gather(*map(one, range(10)))
        assert asyncio.get_running_loop().time() - began_at < 5, "somebody waited for a deadline"
        assert [end.path.attempts for end in ends] == [1] * 10
        await idle(cluster)


@virtually
async def test_two_loads_that_share_a_prefix_in_a_pool_that_fits_one() -> None:
    # A decode node has 16 blocks; each needs 12 for its prompt and 2 for its tokens, 6 of them shared at best.
    async with simulated_cluster(Random(1), limits=replace(SMALL, num_blocks=17)) as cluster:
        prompts = [[*prompt_of(24), *prompt_of(24, seed)] for seed in (1, 2)]
        both = await asyncio.gather(*(ask(cluster, prompt, f"r{i}") for i, prompt in enumerate(prompts)))
        assert [finished.path.attempts for finished in both] == [1, 1]
        assert all(finished.kv_bytes for finished in both)
        await idle(cluster)


@virtually
async def test_a_request_preempted_after_its_transfer() -> None:
    async with simulated_cluster(Random(1), limits=replace(SMALL, num_blocks=17)) as cluster:
        prompts = [prompt_of(14, seed) for seed in range(4)]
        ends = await asyncio.gather(*(ask(cluster, prompt, f"r{i}", 40) for i, prompt in enumerate(prompts)))
        assert all(finished.path.attempts == 1 and finished.kv_bytes for finished in ends)
        arrived = [name for name, _, _ in events(cluster, "decode-0", "kv_arrived")]
        preempted = {name for name, _, _ in events(cluster, "decode-0", "preempted")}
        assert preempted & set(arrived)
        assert len(arrived) == len(set(arrived)), "what is lost is computed, not pulled again"
        await idle(cluster)


# Clients that leave.


@pytest.mark.parametrize("place", HANDOFF_FAILPOINTS)
@virtually
async def test_a_client_that_leaves_at_a_step_frees_everything_at_once(place: str) -> None:
    limits = replace(SMALL, meets_senders=place != "Connected")
    async with simulated_cluster(Random(1), limits=limits) as cluster:
        struck = asyncio.Event()

        def leave(name: str, request_id: str) -> None:
            if name == place and not struck.is_set():
                struck.set()
                asyncio.get_running_loop().call_soon(cluster.dispatcher.cancel, "leaver")

        set_injector(leave)
        request = GenerateRequest(prompt_of(30), "leaver", temperature=0.0, max_tokens=40)
        answer = await cluster.generate(request)
        assert struck.is_set()
        assert isinstance(answer.error, Cancelled)
        await idle(cluster, AT_ONCE_S)


@pytest.mark.parametrize("place", ["Offer-done", "read-posted"])
@virtually
async def test_a_client_that_leaves_under_a_read_leaves_its_blocks_to_the_read(place: str) -> None:
    async with simulated_cluster(Random(1), limits=SMALL) as cluster:
        cluster.fabric.freeze("prefill-0.1")

        def leave(name: str, request_id: str) -> None:
            if name == place:
                set_injector(None)
                asyncio.get_running_loop().call_later(0.1, cluster.dispatcher.cancel, "leaver")

        set_injector(leave)
        request = GenerateRequest(prompt_of(30), "leaver", temperature=0.0, max_tokens=40)
        await cluster.generate(request)
        await asyncio.sleep(10.0)
        stats = cluster.nodes["decode-0"].scheduler.make_stats()
        assert stats.quarantined_blocks > 0
        sender = cluster.nodes["prefill-0"].half
        assert isinstance(sender, Offering)
        assert sender.stats().suspect == 1
        assert not events(cluster, "decode-0", "quarantine_released")
        cluster.fabric.thaw("prefill-0.1")
        await idle(cluster, AT_ONCE_S)
        assert len(events(cluster, "decode-0", "quarantine_released")) == 1


@virtually
async def test_a_node_whose_reads_never_end_gets_no_more_requests() -> None:
    async with simulated_cluster(Random(1), limits=replace(SMALL, max_quarantined_blocks=0)) as cluster:
        cluster.fabric.freeze("prefill-0.1")
        leaver = asyncio.create_task(
            cluster.generate(GenerateRequest(prompt_of(30), "leaver", temperature=0.0, max_tokens=4))
        )
        await recorded(cluster, "decode-0", "read_started")
        cluster.dispatcher.cancel("leaver")
        await leaver
        finished = await ask(cluster, prompt_of(20, seed=1), "next")
        assert finished.path.attempts == 2
        assert ("next", 0, "refused") in events(cluster, "decode-0", "kv_failed")
        cluster.fabric.thaw("prefill-0.1")
        await idle(cluster, AT_ONCE_S)
        assert (await ask(cluster, prompt_of(20, seed=2), "later")).kv_bytes > 0
        await idle(cluster)


@virtually
async def test_a_stalled_transfer_between_living_nodes_is_retried_at_another_node() -> None:
    """The data path is dead while the links live: no node counts as lost, so nothing else would end the wait."""
    async with simulated_cluster(Random(1), prefill=2, limits=replace(SMALL, num_blocks=96)) as cluster:
        cluster.fabric.freeze("prefill-0.1")
        stalled = [prompt_of(30, seed) for seed in range(4)]
        asked_at = asyncio.get_running_loop().time()
        answers = await asyncio.gather(*(ask(cluster, prompt, f"r{n}") for n, prompt in enumerate(stalled)))
        assert asyncio.get_running_loop().time() - asked_at < 3 * STALL_S
        assert {answer.path.prefill_node for answer in answers} == {"prefill-1"}
        causes = {detail for _, _, detail in events(cluster, "decode-0", "kv_failed")}
        assert causes == {TransferCause.STALLED.value}
        assert sum(answer.path.attempts > 1 for answer in answers) >= PAIR_FAILURES
        placer = cluster.dispatcher.requests.placer
        assert placer.open_breakers(cluster.clock.monotonic()) == {"prefill-0->decode-0"}
        assert cluster.nodes["decode-0"].scheduler.make_stats().quarantined_blocks
        cluster.fabric.thaw("prefill-0.1")
        await idle(cluster)


@virtually
async def test_a_drain_gives_up_on_reads_that_never_end() -> None:
    async with simulated_cluster(Random(1), limits=SMALL) as cluster:
        cluster.fabric.freeze("prefill-0.1")
        asking = asyncio.create_task(
            cluster.generate(GenerateRequest(prompt_of(30), "leaver", temperature=0.0, max_tokens=4))
        )
        await recorded(cluster, "decode-0", "read_started")
        cluster.dispatcher.cancel("leaver")
        await asking
        draining = cluster.nodes["decode-0"].service.draining
        draining.refuse_new_work()
        async with asyncio.timeout(GIVE_UP_AFTER_S + 3):
            (left,) = await draining.wait_idle()
        assert (left.attempt.request_id, left.state, left.num_blocks) == ("leaver", "QUARANTINED", 4)
        assert events(cluster, "decode-0", "drain_gave_up") == [("leaver", 4, "QUARANTINED prefill-0")]
        await asyncio.sleep(1)
        (seen,) = (node for node in cluster.view.statuses(0.0, 0.0) if node.name == "decode-0")
        assert seen.detail.startswith("the drain gave up on 4 blocks whose reads do not end")
        cluster.fabric.thaw("prefill-0.1")
        await idle(cluster)


# Leases.


@virtually
async def test_a_response_lost_after_the_prefill_is_freed_by_its_lease() -> None:
    """The decode node never gets the request, and the router is silent from then on."""
    async with simulated_cluster(Random(1), limits=SMALL) as cluster:
        cluster.network.hold(ROUTER, "decode-0.1")
        asking = asyncio.create_task(
            cluster.generate(GenerateRequest(prompt_of(30), "lost", temperature=0.0, max_tokens=4))
        )
        await recorded(cluster, "prefill-0", "closing_offered")
        cluster.network.silence(ROUTER)
        granted_at = asyncio.get_running_loop().time()
        assert not cluster.nodes["prefill-0"].is_idle
        await recorded(cluster, "prefill-0", "lease_expired")
        waited = asyncio.get_running_loop().time() - granted_at
        assert SMALL.lease.unclaimed_s - 1 <= waited <= SMALL.lease.unclaimed_s + 1
        await asyncio.sleep(AT_ONCE_S)
        assert cluster.nodes["prefill-0"].is_idle
        cluster.heal()
        await asking
        await idle(cluster)


@virtually
async def test_a_lease_that_ran_out_under_a_read_whose_sender_kept_the_blocks_is_honoured() -> None:
    limits = replace(SMALL, lease=LeaseTimes(lease_s=1.2, unclaimed_s=12, grace_s=2))
    async with simulated_cluster(Random(1), limits=limits) as cluster:
        cluster.fabric.freeze("prefill-0.1")
        asking = asyncio.create_task(ask(cluster, prompt_of(30), "slow"))
        await all_offered(cluster, 8)
        cluster.network.hold("decode-0.1", "prefill-0.1")
        await recorded(cluster, "prefill-0", "lease_suspect")
        cluster.network.let_through("decode-0.1", "prefill-0.1")
        cluster.fabric.thaw("prefill-0.1")
        finished = await asking
        assert (finished.path.attempts, finished.kv_bytes > 0) == (1, True)
        assert [detail for _, _, detail in events(cluster, "prefill-0", "lease_released")] == ["confirmed"]
        await idle(cluster)


@virtually
async def test_a_lease_that_ended_before_the_subscription_is_not_read() -> None:
    limits = replace(SMALL, lease=LeaseTimes(lease_s=4, unclaimed_s=0.5, grace_s=2))
    async with simulated_cluster(Random(1), limits=limits) as cluster:
        # The reader's first messages are delayed until the offer is over.
        cluster.network.hold("decode-0.1", "prefill-0.1")
        asking = asyncio.create_task(ask(cluster, prompt_of(30), "late"))
        await recorded(cluster, "prefill-0", "lease_expired")
        cluster.network.let_through("decode-0.1", "prefill-0.1")
        assert (await asking).path.attempts == 2
        assert not events(cluster, "decode-0", "read_started")
        await idle(cluster)


@pytest.mark.parametrize("node_id", ["prefill-0", "decode-0"])
def test_digests_that_can_not_be_computed_fail_their_transfer_at_once(node_id: str) -> None:
    asked: list[Sequence[int]] = []

    def fail(block_ids: Sequence[int], division: Division = WHOLE, /) -> Sequence[int]:
        asked.append(block_ids)
        raise MemoryError("no digests today")

    async def main() -> None:
        async with simulated_cluster(Random(1), limits=SMALL) as cluster:
            half = cluster.nodes[node_id].half
            if isinstance(half, Offering):
                assert half._digests is not None
                half._digests = OfferedDigests(fail)
            else:
                (mover,) = half.mover.parts
                assert isinstance(mover, Mover)
                mover._digest_queue._digests = fail
            finished = await ask(cluster, prompt_of(30))
            assert finished.path.attempts == 2
            await idle(cluster)
            assert len(asked) == 1 or node_id == "decode-0", "nothing more of that prompt can be offered"

    run_virtually(main())


# Heartbeats.


@pytest.mark.parametrize(
    ("source", "target", "notices"),
    [("prefill-0", "decode-0", "decode-0"), ("decode-0", "prefill-0", "prefill-0")],
    ids=["deaf reader", "deaf sender"],
)
@virtually
async def test_heartbeats_lost_one_way_are_noticed_within_three_and_end_in_a_retry(
    source: str, target: str, notices: str
) -> None:
    async with simulated_cluster(Random(1), limits=SMALL) as cluster:
        cluster.fabric.freeze("prefill-0.1")
        asking = asyncio.create_task(ask(cluster, prompt_of(30)))
        await all_offered(cluster, 8)
        cluster.network.hold(f"{source}.1", f"{target}.1")
        held_at = asyncio.get_running_loop().time()
        await recorded(cluster, notices, "kv_failed" if notices == "decode-0" else "lease_suspect")
        assert asyncio.get_running_loop().time() - held_at <= 3 * SMALL.heartbeat_s + STEP_S
        assert (await asking).path.attempts == 2
        cluster.heal()
        cluster.fabric.thaw("prefill-0.1")
        await idle(cluster)
        assert not [name for name, _, _ in events(cluster, "decode-0", "kv_arrived")]


class CountingIntake(Intake):
    """A cluster that counts the links that it opens."""

    num_opened = 0

    def _new_link(self, source: Peer) -> LinkClient:
        self.num_opened += 1
        return super()._new_link(source)


class CountingCluster(SimulatedCluster):
    make_intake = CountingIntake


@virtually
async def test_a_link_for_unfinished_reads_is_opened_with_back_off() -> None:
    async with simulated_cluster(Random(1), limits=SMALL, cluster=CountingCluster) as cluster:
        cluster.fabric.freeze("prefill-0.1")
        asking = asyncio.create_task(ask(cluster, prompt_of(30)))
        await recorded(cluster, "decode-0", "read_started")
        cluster.network.silence("prefill-0.1")
        await asking
        await asyncio.sleep(300)
        intake = cluster.nodes["decode-0"].half
        assert isinstance(intake, CountingIntake)
        # The first, then after 1, 2, 4, 8, 16, 32, and every 60 seconds, each of which waits 5 for its welcome.
        assert 8 <= intake.num_opened <= 12
        cluster.heal()
        cluster.fabric.thaw("prefill-0.1")
        await idle(cluster, 70)
        await cluster.wait_until_whole()
        assert (await ask(cluster, prompt_of(30, seed=1))).kv_bytes > 0
        await idle(cluster)


# Many requests, and drains.


@virtually
async def test_a_prefill_node_drains_when_its_last_lease_is_over() -> None:
    async with simulated_cluster(Random(1), limits=SMALL, prefill=2) as cluster:
        cluster.fabric.freeze("prefill-0.1")
        asking = asyncio.create_task(ask(cluster, prompt_of(30), "first"))
        await recorded(cluster, "prefill-0", "closing_offered")
        draining = cluster.nodes["prefill-0"].service.draining
        draining.refuse_new_work()
        drained = asyncio.create_task(draining.wait_idle())
        other = await ask(cluster, prompt_of(30, seed=1), "other")
        assert (other.path.prefill_node, other.path.attempts) == ("prefill-1", 1)
        assert not drained.done()
        cluster.fabric.thaw("prefill-0.1")
        first = await asking
        assert (first.path.prefill_node, first.path.attempts) == ("prefill-0", 1)
        async with asyncio.timeout(AT_ONCE_S):
            await drained
        await idle(cluster)


@virtually
async def test_240_requests_at_once_raise_no_false_alarm() -> None:
    limits = replace(SMALL, num_blocks=3000, chunk=256, max_num_seqs=256)
    async with simulated_cluster(Random(1), limits=limits, prefill=2, decode=2) as cluster:
        for name in ("prefill-0.1", "prefill-1.1"):
            cluster.fabric.freeze(name)
        asking = [ask(cluster, prompt_of(10 + i % 20, seed=i), f"r{i}", 3) for i in range(240)]
        answers = asyncio.gather(*asking)
        await reading(cluster, 240)
        # Longer than a lease, which heartbeats renew.
        await asyncio.sleep(2 * SMALL.lease.lease_s)
        for name in ("prefill-0.1", "prefill-1.1"):
            cluster.fabric.thaw(name)
        ends = await answers
        assert {finished.path.attempts for finished in ends} == {1}
        assert all(finished.kv_bytes for finished in ends)
        for node_id in cluster.nodes:
            for alarm in ("kv_failed", "lease_suspect", "lease_expired", "quarantined"):
                assert not events(cluster, node_id, alarm), alarm
        await idle(cluster)


@pytest.mark.parametrize("prefill", [2, 8, 16])
def test_the_first_prompt_of_a_pair_is_read_whatever_the_sizes_of_their_blocks(prefill: int) -> None:
    """The decode node, with blocks of 4 tokens, opens its link for the request: blocks may be offered by then."""

    async def run() -> None:
        limits = replace(
            SMALL,
            prefill_block_size=prefill,
            num_prefill_blocks=96 // prefill,
            meets_senders=False,
            on_transfer_failure="fail",
        )
        async with simulated_cluster(Random(1), limits=limits) as cluster:
            for number in range(2):
                answer = await ask(cluster, prompt_of(40, number), f"r{number}", max_tokens=3)
                assert (answer.path.attempts, answer.kv_bytes > 0) == (1, True)
            await cluster.wait_until_idle(BOUND_S)

    run_virtually(run())
