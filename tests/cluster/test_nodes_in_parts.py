"""Nodes whose KV cache lies in several processes hand over, divided alike or not, and tokens are those of one node."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager, closing
from pathlib import Path
from random import Random

import pytest

from baton.client import OperatorClient
from baton.errors import BackgroundFault
from baton.messages.generation import GenerateRequest
from baton.messages.sampling import SamplingParams
from baton.runner import SimulatedSpec
from baton.runner.simulated import SimulatedRunner
from decode_node.app import DecodeRole
from prefill_node.app import PrefillRole
from tests.support.mini_cluster import MiniCluster, mini_cluster, random_prompt
from tests.support.parts_runner import PartsRunner
from tests.support.simulated_oracle import expected_tokens

NUM_LAYERS = 6
SPEC = SimulatedSpec(num_blocks=192, vocab_size=256, max_model_len=512, num_layers=NUM_LAYERS)
WHOLE = (range(6),)
IN_TWO = (range(3), range(3, 6))
IN_THREE = (range(2), range(2, 5), range(5, 6))
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
PROMPTS = [random_prompt(Random(seed), 20 + 37 * seed, 256) for seed in range(8)]


@asynccontextmanager
async def cluster_of(
    directory: Path,
    prefill: Sequence[range],
    decode: Sequence[range],
    runners: dict[str, PartsRunner] | None = None,
) -> AsyncIterator[MiniCluster]:
    """A pair of nodes that are divided so. `runners`: takes the runners of those that are in parts."""
    with ExitStack() as stack:

        def make_runner(node_id: str) -> SimulatedRunner:
            layers = prefill if node_id.startswith("prefill") else decode
            if len(layers) == 1:
                return SimulatedRunner(SPEC)
            runner = stack.enter_context(closing(PartsRunner(SPEC, layers)))
            if runners is not None:
                runners[node_id] = runner
            return runner

        settings = {"token_ids_only": True, "max_num_batched_tokens": 64}
        async with mini_cluster(make_runner, directory, **settings) as cluster:  # type: ignore[arg-type]
            yield cluster


async def ask_all(cluster: MiniCluster, key: str) -> None:
    """Ask all prompts at once. Each must be handed over at the first try."""
    requests = [
        GenerateRequest(prompt, request_id=f"{key}-{n}", temperature=0.0, max_tokens=8, ignore_eos=True)
        for n, prompt in enumerate(PROMPTS)
    ]
    answers = await asyncio.gather(*(cluster.generate(request) for request in requests))
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert answer.token_ids == expected_tokens(prompt, GREEDY, SPEC)
        path = answer.end.path
        assert path.prefill_node != path.decode_node
        assert path.attempts == 1, "a digest or a lease was doubted"


@pytest.mark.parametrize(
    ("transport", "prefill", "decode"),
    [
        ("default", IN_TWO, IN_TWO),
        ("tcp", IN_TWO, IN_THREE),
        ("tcp", IN_THREE, WHOLE),
        ("default", WHOLE, IN_TWO),
    ],
    indirect=["transport"],
    ids=["alike", "unlike", "reader-has-one", "sender-has-one"],
)
async def test_tokens_are_those_of_one_node(tmp_path: Path, prefill: Sequence[range], decode: Sequence[range]) -> None:
    async with cluster_of(tmp_path, prefill, decode) as cluster:
        await ask_all(cluster, "first")
        await cluster.wait_until_idle()
        await ask_all(cluster, "again")
        await cluster.wait_until_idle()
        sender, reader = cluster.nodes["prefill-0"].node.role, cluster.nodes["decode-0"].node.role
        assert isinstance(sender, PrefillRole)
        assert isinstance(reader, DecodeRole)
        assert len(sender.offering.mover.parts) == len(prefill)
        assert len(reader.intake.mover.parts) == len(decode)
        assert reader.intake.mover.figures.reads_in_flight == 0
        assert reader.intake.probes.outcomes == {("prefill-0", "passed"): 1}


@pytest.mark.one_transport
async def test_a_node_in_parts_changes_its_role_and_keeps_its_parts(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, IN_TWO, IN_THREE) as cluster:
        await ask_all(cluster, "first")
        await cluster.wait_until_idle()
        operator = OperatorClient(cluster.router.operator)
        for name, role in (("decode-0", "prefill"), ("prefill-0", "decode")):
            await asyncio.to_thread(operator.set_role, name, role)
        for name, role in (("decode-0", "prefill"), ("prefill-0", "decode")):
            while True:
                nodes = (await asyncio.to_thread(operator.status)).nodes
                if any((node.name, node.role, node.status) == (name, role, "Ready") for node in nodes):
                    break
        operator.close()
        await ask_all(cluster, "again")
        await cluster.wait_until_idle()


@pytest.mark.parametrize(("transport", "name"), [("tcp", "prefill-0"), ("default", "decode-0")], indirect=["transport"])
async def test_a_node_ends_when_one_of_its_parts_is_lost(tmp_path: Path, name: str) -> None:
    runners: dict[str, PartsRunner] = {}
    async with cluster_of(tmp_path, IN_TWO, IN_THREE, runners) as cluster:
        await ask_all(cluster, "first")
        runners[name].lose(1)
        with pytest.raises(BackgroundFault, match="mover failed: StreamEnded"):
            await cluster.nodes[name].task
