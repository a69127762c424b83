"""A sender that gives its blocks to others 50 ms after it offered them, and reads that take longer than that.

Such a read often brings another request's KV, and NIXL reports it as done. If the reader does not ask whether the lease
was held through the read, clients get wrong tokens with the status OK; if it asks, none does.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from random import Random

from baton.messages.generation import GenerateRequest
from baton.messages.sampling import SamplingParams
from baton.node.kv.intake import Intake
from baton.node.kv.offering import Offering
from kv_transfer.link.link_messages import ReadConfirmed, SenderMessage
from kv_transfer.sender.lease_values import LeaseEvent
from tests.doubles.faulty_transfer_backend import Faults
from tests.support.simulated_cluster import Answer, SimulatedCluster, SimulatedLimits, simulated_cluster
from tests.support.simulated_oracle import expected_tokens
from tests.support.virtual_time import run_virtually

LEASE_S = 0.05
NUM_REQUESTS = 300
PER_CLUSTER = 100
AT_ONCE = 8
LIMITS = SimulatedLimits(num_blocks=24, chunk=160, digests=False)
"""All running prompts fit into one step, so that each is offered at once; one is a third of the pool. Digests would
find the same; here the question alone has to."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=4)
BOUND_S = 600.0


class ForgetfulOffering(Offering):
    """A sender that ends its leases after 50 ms at most, as if their reader were dead, and informs no reader."""

    def link_opened(self, link: int, node_id: str, incarnation: str, address: str, block_size: int) -> None:
        super().link_opened(link, node_id, incarnation, address, block_size)
        self._forget(incarnation)

    def _forget(self, incarnation: str) -> None:
        records = self._book._records
        for lease in records.readers.of(incarnation):
            self._carry_out(records.advance(lease, LeaseEvent.READER_GONE, "forgotten"))
        if not self._stopped:
            asyncio.get_running_loop().call_later(LEASE_S, self._forget, incarnation)


class TrustingIntake(Intake):
    """A reader that takes every answer as a confirmation, so the check is off."""

    def link_received(self, incarnation: str, message: SenderMessage) -> None:
        if isinstance(message, ReadConfirmed):
            message = ReadConfirmed(message.attempt, True)
        super().link_received(incarnation, message)


def race(seed: int, intake: type[Intake], outcomes: Counter[str]) -> None:
    """Run a hundred requests, eight at a time, through one pair of nodes."""

    class RacingCluster(SimulatedCluster):
        make_handoff = ForgetfulOffering
        make_intake = intake

    run_virtually(_race(Random(seed), RacingCluster, outcomes))


async def _race(rng: Random, cluster_type: type[SimulatedCluster], outcomes: Counter[str]) -> None:
    def faults() -> Faults:
        return Faults(rng.randrange(1 << 30), polls=8, delay=0.5, slow=0.2)

    async with simulated_cluster(rng, limits=LIMITS, faults=faults, cluster=cluster_type) as cluster:
        # Reads complete without the sender, as over shared memory; this sender expects no reader, so none would end.
        cluster.fabric.sender_must_pump = False
        turns = asyncio.Semaphore(AT_ONCE)

        async def ask(number: int) -> None:
            prompt = [rng.randrange(LIMITS.spec.vocab_size) for _ in range(rng.randint(4, 32))]
            request = GenerateRequest(prompt, f"r{number}", temperature=0.0, max_tokens=4)
            async with turns:
                answer = await cluster.generate(request)
            outcomes[_judge(answer, expected_tokens(prompt, GREEDY, LIMITS.spec))] += 1

        async with asyncio.timeout(BOUND_S):
            await asyncio.gather(*(ask(number) for number in range(PER_CLUSTER)))
        await cluster.wait_until_idle(BOUND_S)
        for node in cluster.nodes.values():
            node.assert_nothing_is_left()
            lost = [e for e in node.log.after(0) if e.name == "kv_failed" and e.detail == "lease_lost"]
            outcomes["lease lost"] += len(lost)


def _judge(answer: Answer, expected: list[int]) -> str:
    right = answer.token_ids == expected[: len(answer.token_ids)]
    if answer.finished is None:
        assert answer.error is not None
        return "failed" if right else "failed after wrong tokens"
    return "right" if right and len(answer.token_ids) == len(expected) else "wrong"


def outcomes_with(intake: type[Intake]) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    for seed in range(NUM_REQUESTS // PER_CLUSTER):
        race(seed, intake, outcomes)
    return outcomes


def test_without_the_lease_check_clients_get_wrong_tokens() -> None:
    """Shows that the harness produces the fault against which the check protects."""
    outcomes = outcomes_with(TrustingIntake)
    assert outcomes["wrong"] >= NUM_REQUESTS / 10
    assert outcomes["right"] + outcomes["wrong"] == NUM_REQUESTS


def test_with_the_lease_check_no_client_gets_wrong_tokens() -> None:
    outcomes = outcomes_with(Intake)
    assert outcomes["lease lost"] >= NUM_REQUESTS / 10, "blocks were taken away under reads all the time"
    assert outcomes["wrong"] == outcomes["failed after wrong tokens"] == 0
    assert outcomes["right"] + outcomes["failed"] == NUM_REQUESTS
