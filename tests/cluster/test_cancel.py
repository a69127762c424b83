"""A client that leaves at any stage of its request: the blocks of both nodes are freed, no other request notices."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import pytest

from baton.errors import Cancelled, DeadlineExceeded
from baton.messages.generation import GenerateRequest
from baton.messages.sampling import SamplingParams
from baton.runner import SimulatedSpec, StepTime
from baton.runner.simulated import SimulatedRunner
from baton.v1 import generation_pb2, generation_pb2_grpc
from tests.support.mini_cluster import MiniCluster, mini_cluster, random_prompt
from tests.support.simulated_oracle import expected_tokens
from tests.support.step_gate import StepGate

CHUNK = 32
PROMPT = random_prompt(Random(1), 4 * CHUNK, 256)
PARAMS = SamplingParams(temperature=0.0, max_tokens=8)


def _spec(gate: StepGate | None = None) -> SimulatedSpec:
    step_time = StepTime(1.0) if gate else StepTime()
    return SimulatedSpec(num_blocks=128, vocab_size=256, max_model_len=512, step_time=step_time, sleep=gate)


@asynccontextmanager
async def gated_cluster(tmp_path: Path, prefill: StepGate, decode: StepGate) -> AsyncIterator[MiniCluster]:
    def make_runner(node_id: str) -> SimulatedRunner:
        return SimulatedRunner(_spec(prefill if node_id.startswith("prefill") else decode))

    async with mini_cluster(make_runner, tmp_path, token_ids_only=True, max_num_batched_tokens=CHUNK) as cluster:
        yield cluster


async def _leave_at(cluster: MiniCluster, gate: StepGate, step: int) -> None:
    """Start a request, wait until the gate holds the engine in that step, and cancel it."""
    call = cluster.call(GenerateRequest(PROMPT, request_id="leaver", temperature=0.0, max_tokens=8))
    reading = asyncio.create_task(call.read())
    await asyncio.to_thread(gate.wait_for_step, step)
    await reading
    call.cancel()


async def _still_serves(cluster: MiniCluster) -> None:
    answer = await cluster.generate(GenerateRequest(PROMPT, temperature=0.0, max_tokens=8))
    assert answer.token_ids == expected_tokens(PROMPT, PARAMS, _spec())
    await cluster.wait_until_idle()
    assert all(node.num_blocks_in_use == 0 for node in cluster.nodes.values())


@pytest.mark.parametrize(
    ("transport", "step"), [("default", 1), ("default", 2), ("tcp", 2), ("tcp", 4)], indirect=["transport"]
)
async def test_a_client_that_leaves_while_its_prompt_is_computed_frees_both_nodes(tmp_path: Path, step: int) -> None:
    """Step 1: nothing offered yet. 2: one chunk offered, maybe being read. 4: the last chunk."""
    prefill, decode = StepGate(allowed=step - 1), StepGate()
    async with gated_cluster(tmp_path, prefill, decode) as cluster:
        await _leave_at(cluster, prefill, step)
        await cluster.wait_until_idle("decode-0")
        prefill.allow(None)
        await cluster.wait_until_idle("prefill-0")
        await _still_serves(cluster)


@pytest.mark.parametrize(("transport", "step"), [("tcp", 1), ("default", 3)], indirect=["transport"])
async def test_a_client_that_leaves_while_tokens_are_generated_frees_both_nodes(tmp_path: Path, step: int) -> None:
    """Step 1: the KV has arrived, the first token was sent by the prefill node. 3: in the middle."""
    prefill, decode = StepGate(), StepGate(allowed=step - 1)
    async with gated_cluster(tmp_path, prefill, decode) as cluster:
        await _leave_at(cluster, decode, step)
        await cluster.wait_until_idle("prefill-0")
        decode.allow(None)
        await cluster.wait_until_idle("decode-0")
        await _still_serves(cluster)


@pytest.mark.one_transport
async def test_a_client_that_leaves_the_queue_disturbs_no_other_request(tmp_path: Path) -> None:
    prefill, decode = StepGate(allowed=0), StepGate()
    async with gated_cluster(tmp_path, prefill, decode) as cluster:
        first = asyncio.create_task(
            cluster.generate(GenerateRequest(PROMPT, request_id="stays", temperature=0.0, max_tokens=8))
        )
        await asyncio.to_thread(prefill.wait_for_step, 1)
        call = cluster.call(GenerateRequest(PROMPT[::-1], request_id="leaver", temperature=0.0, max_tokens=8))
        await call.read()
        call.cancel()
        prefill.allow(None)
        assert (await first).token_ids == expected_tokens(PROMPT, PARAMS, _spec())
        await cluster.wait_until_idle()
        await _still_serves(cluster)


@pytest.mark.one_transport
async def test_a_cancel_by_another_call_ends_the_stream(tmp_path: Path) -> None:
    prefill, decode = StepGate(), StepGate(allowed=2)
    async with gated_cluster(tmp_path, prefill, decode) as cluster:
        request = GenerateRequest(PROMPT, request_id="r", temperature=0.0, max_tokens=8)
        answer = asyncio.create_task(cluster.generate(request))
        await asyncio.to_thread(decode.wait_for_step, 3)
        stub = generation_pb2_grpc.GenerationStub(cluster.channel)
        await stub.Cancel(generation_pb2.CancelRequest(request_id="r"))
        decode.allow(None)
        with pytest.raises(Cancelled):
            await answer
        await cluster.wait_until_idle()
        await _still_serves(cluster)


@pytest.mark.one_transport
async def test_a_deadline_frees_both_nodes(tmp_path: Path) -> None:
    prefill, decode = StepGate(), StepGate(allowed=0)
    async with gated_cluster(tmp_path, prefill, decode) as cluster:
        request = GenerateRequest(PROMPT, request_id="r", temperature=0.0, max_tokens=8)
        with pytest.raises(DeadlineExceeded):
            await cluster.generate(request, timeout_s=0.5)
        await cluster.wait_until_idle("prefill-0")
        decode.allow(None)
        await cluster.wait_until_idle("decode-0")
        await _still_serves(cluster)
