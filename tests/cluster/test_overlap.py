"""Blocks are transferred while the rest of the prompt is still being computed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

from baton.messages.generation import GenerateRequest
from baton.messages.sampling import SamplingParams
from baton.runner import SimulatedSpec, StepTime
from baton.runner.simulated import SimulatedRunner
from tests.support.mini_cluster import MiniCluster, mini_cluster, random_prompt
from tests.support.simulated_oracle import expected_tokens
from tests.support.step_gate import StepGate

BLOCK_SIZE = 16
CHUNK = 64
NUM_CHUNKS = 8


async def _until_read(cluster: MiniCluster, num_blocks: int) -> None:
    """Wait until the prefill node has heard that so many blocks were read; each question is a round trip."""
    while not any(e.name == "read_progress" and e.value >= num_blocks for e in await cluster.trace("prefill-0")):
        pass


async def test_all_but_the_last_chunk_are_read_before_it_is_computed(tmp_path: Path) -> None:
    gate = StepGate(allowed=NUM_CHUNKS - 1)
    spec = SimulatedSpec(num_blocks=256, vocab_size=256, max_model_len=1024, block_size=BLOCK_SIZE)
    gated = SimulatedSpec(
        num_blocks=256, vocab_size=256, max_model_len=1024, block_size=BLOCK_SIZE, step_time=StepTime(1.0), sleep=gate
    )

    def make_runner(node_id: str) -> SimulatedRunner:
        return SimulatedRunner(gated if node_id.startswith("prefill") else spec)

    prompt = random_prompt(Random(3), CHUNK * NUM_CHUNKS, 256)
    async with mini_cluster(make_runner, tmp_path, token_ids_only=True, max_num_batched_tokens=CHUNK) as cluster:
        request = GenerateRequest(prompt, request_id="r", temperature=0.0, max_tokens=4)
        answer = asyncio.create_task(cluster.generate(request))
        # The last chunk's step stands at the gate. Were offers kept until the prompt is done, this would wait for ever.
        await _until_read(cluster, (NUM_CHUNKS - 1) * CHUNK // BLOCK_SIZE)
        gate.allow(None)
        result = await answer
        events = await cluster.trace("prefill-0")
        await cluster.wait_until_idle()

    assert result.token_ids == expected_tokens(prompt, SamplingParams(temperature=0.0, max_tokens=4), spec)
    last_chunk = max(e.seq for e in events if e.name == "chunk_computed")
    read_before = max(e.value for e in events if e.name == "read_progress" and e.seq < last_chunk)
    assert read_before * BLOCK_SIZE >= 6 * CHUNK
    assert result.end.kv_bytes == len(prompt) // BLOCK_SIZE * SimulatedRunner(spec).layout.block_bytes
