"""However requests end, the books of both nodes are empty right afterwards, not only when leases have expired."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

from baton.errors import DeadlineExceeded, WouldBeLate
from baton.messages.generation import GenerateRequest
from baton.messages.sampling import SamplingParams
from baton.runner import SimulatedSpec, StepTime
from baton.runner.simulated import SimulatedRunner
from decode_node.app import DecodeRole
from prefill_node.app import PrefillRole
from tests.support.mini_cluster import MiniCluster, mini_cluster, random_prompt
from tests.support.simulated_oracle import expected_tokens
from tests.support.step_gate import StepGate

SPEC = SimulatedSpec(num_blocks=96, vocab_size=256, max_model_len=512)
GREEDY = SamplingParams(temperature=0.0)


async def _assert_nothing_is_left(cluster: MiniCluster, *node_ids: str) -> None:
    await cluster.wait_until_idle(*node_ids)
    for node_id in node_ids or tuple(cluster.nodes):
        node = cluster.nodes[node_id].node
        assert not node.scheduler.requests
        events = [event.name for event in await cluster.trace(node_id)]
        assert "lease_expired" not in events, "nobody reported the end of the request"
        match node.role:
            case PrefillRole(offering=handoff, connector=connector):
                stats = handoff.stats()
                assert (stats.granted, stats.reading, stats.suspect) == (0, 0, 0)
            case DecodeRole(intake=intake, connector=connector):
                assert (intake.counts().live, intake.counts().quarantined) == (0, 0)
        assert connector.num_followed == 0


async def test_a_request_that_ends_with_its_first_token_leaves_no_offer(tmp_path: Path) -> None:
    """The decode node is busy in a step and never subscribes to the prompt."""
    gate = StepGate(allowed=0)
    held = SimulatedSpec(num_blocks=96, vocab_size=256, max_model_len=512, step_time=StepTime(1.0), sleep=gate)

    def make_runner(node_id: str) -> SimulatedRunner:
        return SimulatedRunner(held if node_id.startswith("decode") else SPEC)

    async with mini_cluster(make_runner, tmp_path, token_ids_only=True) as cluster:
        first = asyncio.create_task(cluster.generate(GenerateRequest([1] * 40, temperature=0.0, max_tokens=4)))
        await asyncio.to_thread(gate.wait_for_step, 1)
        for number in range(3):
            answer = await cluster.generate(GenerateRequest([2 + number] * 40, temperature=0.0, max_tokens=1))
            assert len(answer.token_ids) == 1
        await _assert_nothing_is_left(cluster, "prefill-0")
        gate.allow(None)
        assert len((await first).token_ids) == 4
        await _assert_nothing_is_left(cluster)


async def test_nothing_is_left_of_many_requests_of_which_half_leave_early(tmp_path: Path) -> None:
    rng = Random(2)
    prompts = [random_prompt(rng, length, 256) for length in (3, 15, 16, 17, 64, 100, 300) for _ in range(4)]
    async with mini_cluster(
        lambda _: SimulatedRunner(SPEC), tmp_path, prefill=2, decode=2, token_ids_only=True, max_num_batched_tokens=64
    ) as cluster:

        async def stays(request: GenerateRequest) -> None:
            answer = await cluster.generate(request)
            assert isinstance(request.prompt, list)
            assert answer.token_ids == expected_tokens(request.prompt, GREEDY, SPEC)[: len(answer.token_ids)]
            assert len(answer.token_ids) == request.max_tokens

        async def leaves(request: GenerateRequest, events: int) -> None:
            call = cluster.call(request)
            for _ in range(events):
                await call.read()
            call.cancel()

        async def is_late(request: GenerateRequest, timeout_s: float) -> None:
            try:
                await cluster.generate(request, timeout_s)
            except (DeadlineExceeded, WouldBeLate):
                return

        async def one(number: int) -> None:
            request = GenerateRequest(
                rng.choice(prompts), f"r{number}", temperature=0.0, max_tokens=rng.choice([1, 2, 5, 16])
            )
            match rng.randrange(6):
                case 0 | 1:
                    await stays(request)
                case 2:
                    await is_late(request, rng.random() * 0.1)
                case events:
                    await leaves(request, events - 3)

        for _ in range(4):
            await asyncio.gather(*(one(number) for number in range(60)))
        await _assert_nothing_is_left(cluster)
