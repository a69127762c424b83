"""A simulated model whose steps take so long that a test can act in the middle of any stage."""

from __future__ import annotations

from random import Random

from baton.messages.generation import GenerateRequest
from baton.messages.sampling import SamplingParams
from baton.runner import SimulatedSpec
from tests.support.caller import Answer
from tests.support.mini_cluster import random_prompt
from tests.support.simulated_oracle import expected_tokens

_SPEC = SimulatedSpec()
VOCAB_SIZE, MAX_MODEL_LEN = _SPEC.vocab_size, _SPEC.max_model_len
CHUNK = 64
STEP_TIMES = {"BATON_SIMULATED_PREFILL_TOKEN_MS": "4", "BATON_SIMULATED_DECODE_SEQ_MS": "40"}
"""A chunk takes 0.26 s, an output token 40 ms for each running sequence."""
BRISK_STEP_TIMES = {"BATON_SIMULATED_PREFILL_TOKEN_MS": "1", "BATON_SIMULATED_DECODE_SEQ_MS": "5"}
"""Shorter step times, for faults that strike at a step of the protocol."""
FLAGS = ("--runner", "simulated", "--max-num-batched-tokens", str(CHUNK), "--kv-cache-memory", "8MiB")


def slow_request(request_id: str, chunks: int = 4, max_tokens: int = 6, *, sampled: bool = False) -> GenerateRequest:
    """Return a request whose prompt follows from its id."""
    prompt = random_prompt(Random(request_id), chunks * CHUNK - 5, VOCAB_SIZE)
    temperature, seed = (1.0, 7) if sampled else (0.0, None)
    return GenerateRequest(prompt, request_id=request_id, temperature=temperature, seed=seed, max_tokens=max_tokens)


def expected_tokens_of(request: GenerateRequest) -> list[int]:
    """Return the tokens of an undisturbed run."""
    assert isinstance(request.prompt, list)
    params = SamplingParams(
        temperature=request.temperature or 0.0, seed=request.seed or 0, max_tokens=request.max_tokens or 0
    )
    return expected_tokens(request.prompt, params, _SPEC)


def assert_undisturbed(answer: Answer, request: GenerateRequest) -> None:
    """Check that the answer has all tokens of an undisturbed run, each index once and in order."""
    assert answer.token_ids == expected_tokens_of(request)
    assert answer.indices == list(range(len(answer.token_ids)))
