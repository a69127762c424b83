"""What one node has cached no other one computes again: a chat's next turn, on whichever nodes it lands."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from random import Random

import pytest

from baton.client import OperatorClient
from baton.messages.generation import GenerateRequest
from baton.messages.sampling import SamplingParams
from baton.runner import SimulatedSpec, StepTime
from baton.runner.simulated import SimulatedRunner
from tests.support.mini_cluster import mini_cluster
from tests.support.simulated_oracle import expected_tokens

pytestmark = [pytest.mark.usefixtures("forked_commands")]

SPEC = SimulatedSpec(
    num_blocks=256,
    vocab_size=256,
    max_model_len=2048,
    step_time=StepTime(per_step=0.001, per_prefill_token=0.0003),
    sleep=time.sleep,
)
NEW_TOKENS = 15
TURNS = 10


async def test_a_turn_of_a_chat_computes_its_new_tokens_alone_on_nodes_that_never_saw_it(tmp_path: Path) -> None:
    settings = {"placement": "cost", "max_local_prefill_tokens": 0}
    num_computed: list[int] = []
    paths: list[tuple[str, str]] = []
    rng = Random(1)
    async with mini_cluster(
        lambda _: SimulatedRunner(SPEC), tmp_path, prefill=2, decode=2, token_ids_only=True, router_settings=settings
    ) as cluster:
        operator = OperatorClient(cluster.router.operator)
        for number in range(32):
            # The router learns how fast the nodes are.
            await cluster.generate(GenerateRequest([number] * (16 << number % 4), temperature=0.0, max_tokens=2))
        history = [rng.randrange(256) for _ in range(200)]
        for turn in range(TURNS):
            request = GenerateRequest(history, f"turn-{turn}", temperature=0.0, max_tokens=20)
            answer = await cluster.generate(request)
            assert answer.finished is not None
            params = SamplingParams(temperature=0.0, max_tokens=20)
            assert answer.token_ids == expected_tokens(history, params, SPEC)
            num_computed.append(answer.finished.prompt_tokens - answer.finished.cached_tokens)
            path = answer.finished.path
            paths.append((path.prefill_node, path.decode_node))
            history = [*history, *answer.token_ids, *(rng.randrange(256) for _ in range(NEW_TOKENS))]
            await cluster.wait_until_idle()
            # The next turn lands on nodes that have nothing of this one.
            await asyncio.to_thread(operator.uncordon, [name for name in cluster.nodes if name not in paths[-1]])
            await asyncio.to_thread(operator.cordon, paths[-1])
        assert len(set(paths)) > 1
        assert max(num_computed[1:]) <= NEW_TOKENS + 2 * SPEC.block_size, num_computed
