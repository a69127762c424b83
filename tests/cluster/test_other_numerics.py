"""A pair whose nodes compute other bits serves where the operator permits it, says so, and spoils nobody's cache."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest

from baton.client import OperatorClient
from baton.messages.generation import GenerateRequest
from baton.messages.sampling import SamplingParams
from baton.runner import SimulatedSpec, StepTime
from baton.runner.backends.torch_operations import TorchOperations
from baton.runner.loading import load_runner
from baton.runner.model.random_model import write_random_model
from baton.runner.model_runner import TorchModelRunner
from baton.runner.simulated import SimulatedRunner
from baton.runner.spec import TorchSpec
from tests.oracle.test_token_exact import NEW_TOKENS, generate_with_transformers
from tests.support.caller import Answer, TokenCount
from tests.support.mini_cluster import BOTH_KINDS, MiniCluster, mini_cluster
from tests.support.simulated_oracle import expected_tokens
from tests.support.tiny_models import TINY_MODELS

pytestmark = [pytest.mark.one_transport, pytest.mark.usefixtures("forked_commands")]

SPEC = SimulatedSpec(
    num_blocks=192, vocab_size=256, max_model_len=1024, step_time=StepTime(per_step=0.002), sleep=time.sleep
)
PROMPT = list(range(70))
ACROSS = {"pair_across_numerics": True}


class OtherRunner(SimulatedRunner):
    """Computes other KV and other tokens for every prompt, in blocks of the same shape."""

    root = b"other numerics"

    def __init__(self, spec: SimulatedSpec) -> None:
        super().__init__(spec)
        self.model = replace(self.model, numerics="other")


def runner_of(node_id: str) -> SimulatedRunner:
    return (SimulatedRunner if node_id.startswith("prefill") else OtherRunner)(SPEC)


async def ask(cluster: MiniCluster, name: str, max_tokens: int = 8) -> Answer:
    return await cluster.generate(GenerateRequest(PROMPT, name, temperature=0.0, max_tokens=max_tokens))


async def test_a_pair_across_numerics_spoils_no_cache_and_its_streams_move_and_fail_over(tmp_path: Path) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=8)
    router = {**BOTH_KINDS, **ACROSS}
    async with mini_cluster(
        runner_of, tmp_path, decode=2, token_ids_only=True, router_settings=router, **ACROSS
    ) as cluster:
        operator = OperatorClient(cluster.router.operator)
        try:
            await asyncio.to_thread(operator.cordon, ["prefill-0", "decode-1"])
            alone = await ask(cluster, "alone")
            assert alone.end.bit_exact, "one node alone"
            await asyncio.to_thread(operator.uncordon, ["prefill-0", "decode-1"])
            await asyncio.to_thread(operator.cordon, ["decode-0"])
            for number in range(2):
                mixed = await ask(cluster, f"mixed-{number}")
                assert mixed.token_ids == expected_tokens(PROMPT, greedy, SPEC) != alone.token_ids
                path = mixed.end.path
                assert (path.prefill_node, path.decode_node) == ("prefill-0", "decode-1")
                assert (mixed.end.bit_exact, path.reason[:26]) == (False, "no pair of equal numerics ")
            # Its stream moves to the node of equal numerics, and to no prefill node.
            count = TokenCount()
            request = GenerateRequest(PROMPT, "moves", temperature=0.0, max_tokens=400)
            moving = asyncio.create_task(cluster.generate(request, on_event=count))
            await count.wait_for_tokens(3)
            await asyncio.to_thread(operator.uncordon, ["decode-0"])
            assert await cluster.baton("move", "moves") == "moves: decode-1 -> decode-0\n"
            moved = await moving
            assert moved.token_ids == expected_tokens(PROMPT, replace(greedy, max_tokens=400), SPEC)
            assert (moved.end.bit_exact, moved.end.path.attempts) == (False, 2)
            assert "not bit-exact" in await cluster.baton("trace", "moves")
            await asyncio.to_thread(operator.cordon, ["prefill-0"])
            for idle in ("decode-0", "decode-1"):
                other = {"decode-0": "decode-1", "decode-1": "decode-0"}[idle]
                await asyncio.to_thread(operator.cordon, [idle])
                again = await ask(cluster, f"again-{idle}")
                assert (again.end.path.decode_node, again.end.bit_exact) == (other, True)
                assert again.token_ids == alone.token_ids, "nothing that it has cached was computed elsewhere"
                await asyncio.to_thread(operator.uncordon, [idle])
            await asyncio.to_thread(operator.uncordon, ["prefill-0"])
            # A stream of one kind of nodes goes on at the other when its own are gone.
            await asyncio.to_thread(operator.cordon, ["prefill-0", "decode-1"])
            count = TokenCount()
            request = GenerateRequest(PROMPT, "fails-over", temperature=0.0, max_tokens=200)
            failing = asyncio.create_task(cluster.generate(request, on_event=count))
            await count.wait_for_tokens(3)
            await asyncio.to_thread(operator.uncordon, ["prefill-0"])
            await cluster.nodes.pop("decode-0").end()
            failed_over = await failing
            assert failed_over.token_ids[:3] == alone.token_ids[:3]
            assert (failed_over.end.path.decode_node, failed_over.end.bit_exact) == ("prefill-0", False)
        finally:
            operator.close()


async def test_torch_decodes_what_kernels_computed(tmp_path: Path) -> None:
    """Their blocks have the same shape, so in float32 the tokens are generate()'s, though nothing promises it."""
    write_random_model(tmp_path, TINY_MODELS["llama"], seed=5)

    def make_runner(node_id: str) -> TorchModelRunner:
        operations = TorchOperations(1) if node_id.startswith("decode") else None
        return load_runner(TorchSpec(tmp_path, dtype="float32", num_blocks=96), operations=operations)

    prompts = {"r": PROMPT}
    settings = {**BOTH_KINDS, **ACROSS}
    async with mini_cluster(make_runner, tmp_path, router_settings=settings, **ACROSS) as cluster:
        answer = await ask(cluster, "r", NEW_TOKENS)
    assert (answer.end.path.prefill_node, answer.end.bit_exact) == ("prefill-0", False)
    assert answer.token_ids == generate_with_transformers(tmp_path, prompts)["r"]


async def test_without_the_setting_nodes_of_other_numerics_are_no_pair(tmp_path: Path) -> None:
    """Neither the nodes' settings alone nor the router's are enough."""
    for of_router, of_nodes in ((ACROSS, {}), ({}, ACROSS)):
        settings = {**BOTH_KINDS, **of_router}
        async with mini_cluster(
            runner_of, tmp_path, decode=2, token_ids_only=True, router_settings=settings, num_ready=2, **of_nodes
        ) as cluster:
            answer = await ask(cluster, "r")
            assert (answer.end.path.prefill_node, answer.end.bit_exact) == ("", True)
            assert "Incompatible" in await cluster.baton("get", "nodes")
