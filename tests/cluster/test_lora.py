"""Adapters in a whole cluster: each request has the tokens of its adapter, whatever happens to names and nodes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random

import pytest

import baton
from baton import LLM
from baton.client import OperatorClient
from baton.errors import UnknownModel
from baton.messages.adapters import AdapterRow
from baton.messages.generation import GenerateRequest
from baton.messages.sampling import SamplingParams
from baton.model_formats.adapters import open_adapter
from baton.runner import SimulatedSpec, StepTime
from baton.runner.loading import load_runner
from baton.runner.model.random_model import write_random_model
from baton.runner.model_runner import TorchModelRunner
from baton.runner.simulated import SimulatedRunner
from baton.runner.spec import TorchSpec
from tests.support.adapter_files import expert_tensors, lora_tensors, write_adapter, write_simple_adapter
from tests.support.caller import Answer, TokenCount
from tests.support.mini_cluster import BOTH_KINDS, MiniCluster, mini_cluster, random_prompt
from tests.support.simulated_oracle import expected_tokens
from tests.support.tiny_models import TINY_MODELS

pytestmark = pytest.mark.one_transport

DEMO_MODEL = Path(baton.__file__).parent / "demo_model"
SPEC = SimulatedSpec(num_blocks=192, vocab_size=256, max_model_len=512, step_time=StepTime(0.004))
LONG = 400
"""Tokens of a stream that runs while its adapter loses its name and its node dies."""
PROMPT = random_prompt(Random(1), 70, 256)


def right(digest: str, num_tokens: int, prompt: Sequence[int] = PROMPT) -> list[int]:
    """The tokens of an undisturbed request with this adapter."""
    params = SamplingParams(temperature=0.0, seed=3, max_tokens=num_tokens, ignore_eos=True)
    return expected_tokens(prompt, params, SPEC, digest)


def request(model: str, num_tokens: int, prompt: Sequence[int] = PROMPT) -> GenerateRequest:
    return GenerateRequest(prompt, model=model, temperature=0.0, seed=3, max_tokens=num_tokens, ignore_eos=True)


class Operator:
    """Calls of an operator to the router, in threads beside the cluster's loop."""

    def __init__(self, cluster: MiniCluster) -> None:
        self._client = OperatorClient(cluster.router.operator)

    async def load(self, name: str, directory: Path, *, replaces: bool = False) -> str:
        """Load an adapter; returns its digest."""
        load = partial(self._client.load_adapter, name, str(directory), replaces=replaces)
        return (await asyncio.to_thread(load)).digest

    async def unload(self, name: str) -> None:
        await asyncio.to_thread(self._client.unload_adapter, name)

    async def rows(self) -> Sequence[AdapterRow]:
        return await asyncio.to_thread(self._client.adapters)

    async def wait_until_acknowledged(self, name: str, nodes: list[str]) -> None:
        """Return once just these nodes acknowledge an adapter. Each question is a round trip."""
        while [*next(row for row in await self.rows() if row.name == name).nodes] != nodes:
            pass


async def test_adapters_and_the_base_model_side_by_side_through_reloads_and_dead_nodes(tmp_path: Path) -> None:
    adapters = tmp_path / "adapters"
    one, two = (write_simple_adapter(adapters / name, seed) for seed, name in enumerate(("one", "two")))
    first, second = open_adapter(one).digest(), open_adapter(two).digest()
    async with mini_cluster(
        lambda _: SimulatedRunner(replace(SPEC, sleep=time.sleep)),
        tmp_path,
        decode=2,
        token_ids_only=True,
        router_settings={**BOTH_KINDS, "lora_modules": f"one={one}"},
        lora_modules=f"one={one}",
        lora_dir=str(adapters),
        max_loras=2,
        max_cpu_loras=2,
    ) as cluster:
        operator = Operator(cluster)
        assert await operator.load("two", two) == second
        await operator.wait_until_acknowledged("one", ["decode-0", "decode-1", "prefill-0"])

        # All at once, twice, so that the second time finds prefixes in caches: those of its own adapter.
        digests = {"": "", "one": first, "two": second}
        for _ in range(2):
            asked = [request(name, 12) for name in digests]
            answers = await asyncio.gather(*map(cluster.generate, asked))
            assert [answer.token_ids for answer in answers] == [right(digest, 12) for digest in digests.values()]
            assert all(answer.end.path.prefill_node for answer in answers)
        assert all(answer.end.cached_tokens > 0 for answer in answers)

        # The name gets other weights while a stream runs, and the node of the stream dies.
        count, stream = TokenCount(), request("one", LONG)
        running = asyncio.create_task(cluster.generate(stream, on_event=count))
        await count.wait_for_tokens(20)
        write_simple_adapter(one, seed=7)
        third = await operator.load("one", one, replaces=True)
        assert third not in digests.values()
        answer: Answer = await cluster.generate(request("one", 12))
        assert answer.token_ids == right(third, 12)
        assert answer.end.cached_tokens == 0, "no KV of the adapter that had the name before"
        name = next(name for name, node in cluster.nodes.items() if node.node.scheduler.decoding)
        await cluster.nodes[name].end()
        assert (await running).token_ids == right(first, LONG)

        # A node of the same name learns of adapters by itself.
        await cluster.start_node(name)
        await operator.wait_until_acknowledged("one", ["decode-0", "decode-1", "prefill-0"])
        for _ in range(4):
            answers = await asyncio.gather(*(cluster.generate(request(name, 6)) for name in ("one", "two", "one")))
            assert [answer.token_ids for answer in answers] == [right(each, 6) for each in (third, second, third)]

        await operator.unload("two")
        with pytest.raises(UnknownModel):
            await cluster.generate(request("two", 6))


@pytest.mark.parametrize("is_mixture", [False, True])
async def test_a_computed_model_has_the_tokens_that_it_has_without_a_cluster(tmp_path: Path, is_mixture: bool) -> None:
    base = DEMO_MODEL
    if is_mixture:
        base = tmp_path / "base"
        write_random_model(base, TINY_MODELS["mixtral"], seed=5)

    def runner(_: str = "") -> TorchModelRunner:
        return load_runner(TorchSpec(base, dtype="float32", block_size=16, num_blocks=64, num_threads=1))

    modules = runner()._transformer.adapters.modules
    for rank, name in ((4, "one"), (8, "two")):
        tensors, targets = lora_tensors(modules, rank, seed=rank, scale=0.3), []
        if is_mixture:
            shapes = [(256, 64), (64, 128)]
            tensors = expert_tensors("model.layers.1.mlp.experts", shapes, 4, rank, seed=rank, scale=0.3)
            targets = ["experts.gate_up_proj", "experts.down_proj"]
        write_adapter(tmp_path / name, tensors, rank, target_parameters=targets)
    lora_modules = f"one={tmp_path / 'one'},two={tmp_path / 'two'}"
    prompts = [random_prompt(Random(seed), 40, 200) for seed in range(2)]
    names = ["", "one", "two"]
    with LLM(base, dtype="float32", threads=1, lora_modules=lora_modules) as llm:
        params = baton.SamplingParams(temperature=0.0, seed=3, max_tokens=12, ignore_eos=True)
        alone = {
            (name, place): list(llm.generate([prompt], params, adapter=name, use_tqdm=False)[0].outputs[0].token_ids)
            for name in names
            for place, prompt in enumerate(prompts)
        }
    assert len({tuple(tokens) for tokens in alone.values()}) == len(alone), "adapters change what the model says"
    async with mini_cluster(
        runner,
        base,
        router_settings={**BOTH_KINDS, "lora_modules": lora_modules},
        lora_modules=lora_modules,
        dtype="float32",
    ) as cluster:
        asked = [request(name, 12, prompts[place]) for name, place in alone]
        answers = await asyncio.gather(*map(cluster.generate, asked))
        assert [answer.token_ids for answer in answers] == list(alone.values())
        assert all(answer.end.path.prefill_node for answer in answers)
