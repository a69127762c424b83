"""Greedy tokens of models with an encoder and a decoder equal transformers' own `generate()` in float32.

Alone, batched, cut within an input, cached, preempted, swapped, with n > 1; bits don't depend on mates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers

from baton.engine.core import EngineCore
from baton.engine.request import Request
from baton.messages.sampling import SamplingParams
from baton.runner.backends.operations import Operations
from baton.runner.backends.torch_operations import TorchOperations
from baton.runner.encoder_decoder.loading import load_encoder_decoder
from baton.runner.model_runner import TorchModelRunner
from baton.runner.spec import TorchSpec
from tests.oracle.test_image_exact import cramped_engine_of, engine_of
from tests.oracle.test_token_exact import run_all
from tests.support.encoder_decoder_models import ENCODER_DECODERS, request_for, source, write_encoder_decoder

NEW_TOKENS = 12
PENALTY = 1.5
"""Tiny models would repeat one token, which would prove nothing."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, repetition_penalty=PENALTY)
DRAWN = SamplingParams(temperature=0.7, seed=7, max_tokens=NEW_TOKENS, logprobs=2, repetition_penalty=1.2)


class Input(NamedTuple):
    """What the encoder gets, and the tokens with which the decoder begins."""

    source: bytes
    tokens: Sequence[int]


def load(directory: Path, operations: Operations | None = None, **settings: Any) -> TorchModelRunner:
    spec = TorchSpec(directory, **{"dtype": "float32", "num_blocks": 128, **settings})
    return load_encoder_decoder(spec, operations)


def inputs_of(directory: Path) -> dict[str, Input]:
    """Inputs of several lengths, of which two are equal, with one or several tokens for the decoder.

    Some need another block while they decode.
    """
    lengths = (5, 64, 1, 90, 5, 130)
    begins = ([2, *range(20, 32)], [2, 7, 9], [2], [2, *range(40, 60)], [2, *range(60, 71)], [2, 30])
    sources = [source(directory, seed % 4, length) for seed, length in enumerate(lengths)]
    return {f"p{place}": Input(data, begin) for place, (data, begin) in enumerate(zip(sources, begins, strict=True))}


def requests_for(
    directory: Path, inputs: Mapping[str, Input], params: SamplingParams = GREEDY, suffix: str = ""
) -> list[Request]:
    return [request_for(directory, f"{name}{suffix}", *each, params) for name, each in inputs.items()]


@pytest.fixture(scope="module", params=ENCODER_DECODERS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def directory(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp(kind)
    write_encoder_decoder(made, kind)
    return made


@pytest.fixture(scope="module")
def inputs(directory: Path) -> Mapping[str, Input]:
    return inputs_of(directory)


@pytest.fixture(scope="module")
def expected(directory: Path, inputs: Mapping[str, Input]) -> Mapping[str, Sequence[int]]:
    return generate_with_transformers(directory, inputs)


def generate_with_transformers(
    directory: Path, inputs: Mapping[str, Input], new_tokens: int = NEW_TOKENS, penalty: float = PENALTY
) -> dict[str, Sequence[int]]:
    import transformers

    is_speech = (directory / "preprocessor_config.json").exists()
    kind = transformers.AutoModelForSpeechSeq2Seq if is_speech else transformers.AutoModelForSeq2SeqLM
    model = kind.from_pretrained(
        directory, dtype=torch.float32, local_files_only=True, attn_implementation="eager"
    ).eval()
    found = {}
    for name, (data, tokens) in inputs.items():
        if is_speech:
            extractor = transformers.WhisperFeatureExtractor.from_pretrained(directory)
            samples = np.frombuffer(data, "<i2").astype(np.float32) / 32768
            given = {"input_features": extractor(samples, sampling_rate=16_000, return_tensors="pt").input_features}
        else:
            ids = torch.from_numpy(np.frombuffer(data, "<u4").astype(np.int64))[None]
            given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        # Whisper's own generate() adds its languages and time stamps.
        out = transformers.GenerationMixin.generate(
            model,
            **given,
            decoder_input_ids=torch.tensor([list(tokens)]),
            max_new_tokens=new_tokens,
            do_sample=False,
            repetition_penalty=penalty,
            eos_token_id=None,
            pad_token_id=0,
        )
        found[name] = out[0, len(tokens) :].tolist()
    return found


@pytest.fixture(scope="module")
def runner(directory: Path) -> TorchModelRunner:
    return load(directory)


def test_nodes_share_no_rows_of_another_transformers_whose_code_makes_them(runner: TorchModelRunner) -> None:
    assert runner.model.numerics.endswith(f"/transformers-{transformers.__version__}")


def test_tokens_are_those_of_generate(
    runner: TorchModelRunner,
    directory: Path,
    inputs: Mapping[str, Input],
    expected: Mapping[str, Sequence[int]],
) -> None:
    assert runner.model.bit_exact, runner.model.bit_exact_reason
    assert len({token for tokens in expected.values() for token in tokens}) > 20
    engine = engine_of(runner)
    for request in requests_for(directory, inputs):
        assert run_all(engine, [request]) == {request.request_id: expected[request.request_id]}
    together = engine_of(runner)
    assert run_all(together, requests_for(directory, inputs)) == expected
    again = run_all(together, requests_for(directory, inputs, suffix="-again"))
    assert {name.removesuffix("-again"): tokens for name, tokens in again.items()} == expected
    assert together.scheduler.make_stats().prefix_cache.num_hit_tokens["device"] > 0
    large = engine_of(runner, max_num_batched_tokens=2048)
    assert run_all(large, requests_for(directory, inputs)) == expected


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted_requests_go_on_with_the_same_tokens(
    directory: Path, inputs: Mapping[str, Input], expected: Mapping[str, Sequence[int]], mode: str
) -> None:
    cramped = load(directory, num_blocks=16, host_cache_bytes=1 << 20)
    engine = cramped_engine_of(cramped, mode)
    assert run_all(engine, requests_for(directory, inputs)) == expected
    assert engine.scheduler.make_stats().num_preemptions_by_mode[mode] > 0


def test_several_sequences_of_an_input(
    runner: TorchModelRunner, directory: Path, inputs: Mapping[str, Input], expected: Mapping[str, Sequence[int]]
) -> None:
    engine = engine_of(runner)
    for request in requests_for(directory, {"p3": inputs["p3"]}, replace(GREEDY, n=2)):
        engine.scheduler.add_request(request)
    found: dict[int, list[int]] = {}
    while engine.has_work():
        for output in (output for outputs in engine.step().values() for output in outputs):
            found.setdefault(output.sequence_index, []).extend(output.new_token_ids)
    assert list(found.values()) == [expected["p3"]] * 2


def test_bits_depend_on_the_request_alone(directory: Path, inputs: Mapping[str, Input], kind: str) -> None:
    # The layers of all are the same modules: each model is computed in one dtype.
    dtype = "float32" if kind in ("bart", "t5") else "bfloat16"
    runner = load(directory, dtype=dtype)
    assert runner.model.bit_exact, runner.model.bit_exact_reason
    alone: dict[str, list[Any]] = {}
    for request in requests_for(directory, inputs, DRAWN):
        alone |= outputs_of(engine_of(runner), [request])
    for budget in (24, 200):
        engine = engine_of(runner, max_num_batched_tokens=budget, enable_prefix_caching=False)
        assert outputs_of(engine, requests_for(directory, inputs, DRAWN)) == alone
    two_threads = load(directory, dtype=dtype, num_threads=2)
    assert outputs_of(engine_of(two_threads), requests_for(directory, inputs, DRAWN)) == alone


def test_torchs_products_give_the_tokens_of_generate(
    directory: Path, inputs: Mapping[str, Input], expected: Mapping[str, Sequence[int]]
) -> None:
    plain = load(directory, TorchOperations(1))
    assert run_all(engine_of(plain), requests_for(directory, inputs)) == expected


def outputs_of(engine: EngineCore, requests: Sequence[Request]) -> dict[str, list[Any]]:
    """Tokens and log-probabilities, if wanted, of requests for one sequence each."""
    found: dict[str, list[Any]] = {}
    for request in requests:
        engine.scheduler.add_request(request)
    while engine.has_work():
        for output in (output for outputs in engine.step().values() for output in outputs):
            found.setdefault(output.attempt.request_id, []).extend([*output.new_token_ids, *output.new_logprobs])
    return found
