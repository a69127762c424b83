"""Beam search through the cluster finds the same beams as transformers, token for token."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from baton.engine.sequences.beams import BeamSearch
from baton.messages.generation import Chunk, GenerateRequest
from baton.runner import SimulatedSpec
from baton.runner.loading import load_runner
from baton.runner.model.random_model import write_random_model
from baton.runner.model_runner import TorchModelRunner
from baton.runner.simulated import SimulatedRunner
from baton.runner.spec import TorchSpec
from tests.support.caller import Answer
from tests.support.mini_cluster import mini_cluster, random_prompt
from tests.support.simulated_oracle import expected_beams
from tests.support.tiny_models import TINY_MODELS

pytestmark = pytest.mark.one_transport

NEW_TOKENS = 14
SEARCHES: list[dict[str, Any]] = [
    {"beam_width": 2, "n": 2},
    {"beam_width": 4, "n": 4, "length_penalty": 2.0},
    {"beam_width": 8, "n": 3, "length_penalty": 0.0},
    {"beam_width": 3, "n": 1, "length_penalty": -1.0, "early_stopping": True},
    {"beam_width": 5, "n": 5, "early_stopping": True},
]


def runner_of(model_dir: Path, num_blocks: int) -> Callable[[str], TorchModelRunner]:
    return lambda node_id: load_runner(TorchSpec(model_dir, dtype="float32", block_size=16, num_blocks=num_blocks))


def found_by_transformers(
    model: Any, prompt: Sequence[int], stops: Sequence[int], search: dict[str, Any]
) -> list[list[int]]:
    with torch.no_grad():
        found = model.generate(
            torch.tensor([list(prompt)]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            num_beams=search["beam_width"],
            num_return_sequences=search["n"],
            length_penalty=search.get("length_penalty", 1.0),
            early_stopping=search.get("early_stopping", False),
            eos_token_id=list(stops),
            pad_token_id=0,
        )
    return [_without_padding(row[len(prompt) :].tolist(), stops) for row in found]


def _without_padding(tokens: list[int], stops: Sequence[int]) -> list[int]:
    end = next((index + 1 for index, token in enumerate(tokens) if token in stops), len(tokens))
    return tokens[:end]


def sequences(answer: Answer, search: dict[str, Any]) -> list[list[int]]:
    return [answer.sequence(index).token_ids for index in range(search["n"])]


async def test_simulated_nodes_search_too(tmp_path: Path) -> None:
    spec = SimulatedSpec(num_blocks=96, vocab_size=256, max_model_len=512)
    async with mini_cluster(lambda _: SimulatedRunner(spec), tmp_path, token_ids_only=True) as cluster:
        for search in SEARCHES:
            prompt = random_prompt(Random(search["beam_width"]), 40, 256)
            answer = await cluster.generate(GenerateRequest(prompt, max_tokens=6, ignore_eos=True, **search))
            options = {key: value for key, value in search.items() if key not in ("beam_width", "n")}
            naive = BeamSearch(search["beam_width"], frozenset(), 6, **options)
            assert sequences(answer, search) == expected_beams(prompt, naive, spec)[: search["n"]]
            assert answer.end.path.prefill_node == "prefill-0"
        await cluster.wait_until_idle()


@pytest.mark.parametrize(
    ("name", "num_blocks"), [("llama", 96), ("qwen2", 14), ("gpt2", 14)], ids=["roomy", "tight", "tight-gpt2"]
)
async def test_beams_equal_transformers(tmp_path: Path, name: str, num_blocks: int) -> None:
    write_random_model(tmp_path, TINY_MODELS[name], seed=5)
    model, rng = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval(), Random(6)
    asked: list[tuple[GenerateRequest, list[list[int]], dict[str, Any]]] = []
    for index, search in enumerate(SEARCHES):
        prompt = random_prompt(rng, (1, 15, 16, 33, 50)[index], 256)
        stops = rng.sample(range(256), (1, 2, 6, 20, 40)[index])
        expected = found_by_transformers(model, prompt, stops, search)
        request = GenerateRequest(prompt, max_tokens=NEW_TOKENS, ignore_eos=True, stop_token_ids=stops, **search)
        asked.append((request, expected, search))
    assert len({len(tokens) for _, expected, _ in asked for tokens in expected}) > 1, "some must end early"
    chunks: list[Chunk] = []
    async with mini_cluster(
        runner_of(tmp_path, num_blocks), tmp_path, max_num_batched_tokens=24, max_num_seqs=6
    ) as cluster:
        answers = await asyncio.gather(
            *(
                cluster.generate(request, on_event=lambda e: chunks.append(e) if isinstance(e, Chunk) else None)
                for request, _, _ in asked
            )
        )
        greedy = await cluster.generate(GenerateRequest([1, 2, 3], temperature=0.0, max_tokens=4, ignore_eos=True))
        await cluster.wait_until_idle()
    for answer, (request, expected, search) in zip(answers, asked, strict=True):
        assert sequences(answer, search) == expected
        for index in range(search["n"]):
            is_stop = expected[index][-1] in request.stop_token_ids
            end = answer.ends[index] if search["n"] > 1 else answer.end
            assert end.finish_reason == ("stop" if is_stop else "length")
        assert answer.end.completion_tokens == sum(map(len, expected))
        assert answer.end.path.prefill_node == "prefill-0"
    with_tokens = [chunk for chunk in chunks if chunk.token_ids]
    assert len(with_tokens) == sum(search["n"] for search in SEARCHES), "nothing is streamed"
    assert len(greedy.token_ids) == 4
