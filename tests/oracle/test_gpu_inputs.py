"""On a GPU: adapters, images, encoders' inputs, given rows and pooled vectors, with bits of the request alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from baton.engine.request import Request
from baton.messages.node_model import Capability
from baton.messages.pooling import EMBEDDING_KINDS, Pooling, PoolingParams
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams
from baton.model_formats.adapters import open_adapter
from baton.runner.encoder_decoder.loading import load_encoder_decoder
from baton.runner.loading import load_runner
from baton.runner.model.random_model import write_random_model
from baton.runner.spec import TorchSpec
from baton.runner.text_encoder.encoder_runner import load_encoder
from tests.oracle.test_adapters_exact import GREEDY, TARGETS
from tests.oracle.test_encoder_decoder_exact import generate_with_transformers as transformers_tokens
from tests.oracle.test_encoder_decoder_exact import inputs_of, outputs_of, requests_for
from tests.oracle.test_encoders import TEXTS, vectors
from tests.oracle.test_image_exact import engine_of, prompt_of
from tests.oracle.test_prompt_embeds import DRAWN, alone, generate_with_transformers, prompts_of, run_recorded
from tests.oracle.test_prompt_embeds import run_all as run_prompts
from tests.oracle.test_token_exact import BLOCK_SIZE, make_engine, make_prompts, run_all
from tests.support.adapter_files import lora_tensors, write_adapter
from tests.support.encoder_decoder_models import ENCODER_DECODERS, write_encoder_decoder
from tests.support.image_models import IMAGE_MODELS, write_image_model
from tests.support.peft_adapters import SETTINGS, generate_with_peft, write_peft_adapter
from tests.support.tiny_encoders import TINY_ENCODERS, write_encoder
from tests.support.tiny_models import TINY_MODELS

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.timeout(300),
]
LOGGED = SamplingParams(temperature=0.8, seed=4, max_tokens=12, logprobs=2)


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3_text", "gpt2", "qwen3_moe"])
def test_tokens_with_adapters_are_those_of_peft(tmp_path: Path, name: str) -> None:
    base = tmp_path / "base"
    write_random_model(base, TINY_MODELS[name], seed=5)
    runner = load_runner(TorchSpec(base, dtype="float32", block_size=BLOCK_SIZE, num_blocks=96, device=DEVICE))
    prompts = dict(list(make_prompts(runner.model.vocab_size).items())[:4])
    expected = {f"{key}-": tokens for key, tokens in generate_with_peft(base, None, prompts).items()}
    requests = [Request(f"{key}-", RequestSpec(prompt, GREEDY)) for key, prompt in prompts.items()]
    for index, settings in enumerate(SETTINGS):
        adapter = tmp_path / f"{index}"
        targets: dict[str, Any] = {"target_modules": TARGETS.get(name, "all-linear")}
        if name == "qwen3_moe" and not settings.get("lora_bias"):  # PEFT has no biases for parameters
            targets["target_parameters"] = ["experts.gate_up_proj", "experts.down_proj", "mlp.gate.weight"]
        write_peft_adapter(base, adapter, seed=index, **targets, **settings)
        digest = open_adapter(adapter).digest()
        runner.adapters.load(adapter, digest)
        with_it = generate_with_peft(base, adapter, prompts)
        expected |= {f"{key}-{index}": tokens for key, tokens in with_it.items()}
        requests += [
            Request(f"{key}-{index}", RequestSpec(prompt, GREEDY, cache_salt=digest, adapter=digest))
            for key, prompt in prompts.items()
        ]
    assert run_all(make_engine(runner), requests) == expected
    assert len({tuple(tokens) for tokens in expected.values()}) > len(prompts)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_other_adapters_in_the_batch_change_no_bit(tmp_path: Path, name: str, dtype: str) -> None:
    write_random_model(tmp_path / "base", TINY_MODELS[name], seed=5)
    runner = load_runner(
        TorchSpec(tmp_path / "base", dtype=dtype, block_size=BLOCK_SIZE, num_blocks=160, device=DEVICE)
    )
    assert runner.model.bit_exact
    digests = [""]
    for rank in (4, 9, 16):
        files = tmp_path / f"{rank}"
        write_adapter(files, lora_tensors(runner._transformer.adapters.modules, rank, seed=rank, scale=0.1), rank)
        digests.append(open_adapter(files).digest())
        runner.adapters.load(files, digests[-1])
    prompts = dict(list(make_prompts(runner.model.vocab_size).items())[:3])

    def requests() -> list[Request]:
        return [
            Request(f"{key}-{place}", RequestSpec(prompt, LOGGED, cache_salt=digest, adapter=digest))
            for key, prompt in prompts.items()
            for place, digest in enumerate(digests)
        ]

    together = outputs_of(make_engine(runner), requests())
    assert len({str(output) for output in together.values()}) == len(together)
    for request in requests():
        assert outputs_of(make_engine(runner), [request]) == {request.request_id: together[request.request_id]}


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_prompt_embeddings(tmp_path: Path, name: str) -> None:
    write_random_model(tmp_path, TINY_MODELS[name], seed=5)
    runner = load_runner(TorchSpec(tmp_path, dtype="float32", block_size=BLOCK_SIZE, num_blocks=64, device=DEVICE))
    assert Capability.PROMPT_EMBEDS in runner.model.capabilities
    prompts = prompts_of(runner.model.row_width)
    assert run_prompts(make_engine(runner), prompts) == generate_with_transformers(tmp_path, prompts)
    assert run_recorded(make_engine(runner), prompts, DRAWN) == alone(runner, prompts, DRAWN)


def same_in_any_batch(runner: Any) -> Mapping[str, bytes]:
    """The vectors of all texts, which are the same together and alone."""
    params = {f"{kind.value} {text}": PoolingParams(kind) for kind in EMBEDDING_KINDS for text in TEXTS}
    texts = {one: TEXTS[one.partition(" ")[2]] for one in params}
    together = vectors(runner, texts, params)
    assert vectors(runner, dict(reversed(texts.items())), params, budget=90) == together
    for one in texts:
        assert vectors(runner, {one: texts[one]}, params) == {one: together[one]}
    return together


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [*TINY_ENCODERS, "llama"])
def test_pooled_vectors(tmp_path: Path, name: str, dtype: str) -> None:
    if name in TINY_ENCODERS:
        write_encoder(tmp_path, name)
        on_cpu: Any = load_encoder(TorchSpec(tmp_path, dtype=dtype, num_blocks=256))
        runner: Any = load_encoder(TorchSpec(tmp_path, dtype=dtype, num_blocks=256, device=DEVICE))
    else:
        write_random_model(tmp_path, TINY_MODELS[name], seed=5)
        on_cpu = load_runner(TorchSpec(tmp_path, dtype=dtype, num_blocks=256))
        runner = load_runner(TorchSpec(tmp_path, dtype=dtype, num_blocks=256, device=DEVICE))
    assert runner.model.bit_exact, runner.model.bit_exact_reason
    together = same_in_any_batch(runner)
    for one, expected in same_in_any_batch(on_cpu).items():
        off = np.frombuffer(together[one], "<f4") - np.frombuffer(expected, "<f4")
        assert np.linalg.norm(off) < (2e-5 if dtype == "float32" else 0.05)


def test_classifiers(tmp_path: Path) -> None:
    write_encoder(tmp_path, "bert", num_labels=3)
    params = dict.fromkeys(TEXTS, PoolingParams(Pooling.CLASSIFY))
    specs = (TorchSpec(tmp_path, dtype="float32", num_blocks=256, device=device) for device in ("cpu", DEVICE))
    found = [vectors(load_encoder(spec), TEXTS, params) for spec in specs]
    for text in TEXTS:
        on_cpu, on_gpu = (np.frombuffer(each[text], "<f4") for each in found)
        np.testing.assert_allclose(on_gpu, on_cpu, atol=1e-4)


@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_images(tmp_path: Path, name: str) -> None:
    write_image_model(tmp_path, name)
    prompts = {f"p{seed}": prompt_of(tmp_path, seed, num_images) for seed, num_images in enumerate((1, 2, 0, 3))}
    requests = [prompt.request(key) for key, prompt in prompts.items()]
    expected = run_all(engine_of(load_runner(TorchSpec(tmp_path, dtype="float32", num_blocks=64))), requests)
    on_gpu = load_runner(TorchSpec(tmp_path, dtype="float32", num_blocks=64, device=DEVICE))
    assert run_all(engine_of(on_gpu), [prompt.request(key) for key, prompt in prompts.items()]) == expected
    runner = load_runner(TorchSpec(tmp_path, dtype="bfloat16", num_blocks=64, device=DEVICE))
    assert runner.model.bit_exact
    for budget in (24, 200):
        engine = engine_of(runner, max_num_batched_tokens=budget, enable_prefix_caching=False)
        together = outputs_of(engine, [prompt.request(key, LOGGED) for key, prompt in prompts.items()])
        for key, prompt in prompts.items():
            assert outputs_of(engine_of(runner), [prompt.request(key, LOGGED)]) == {key: together[key]}


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_encoders_and_decoders(tmp_path: Path, name: str) -> None:
    write_encoder_decoder(tmp_path, name)
    inputs = inputs_of(tmp_path)
    on_gpu = load_encoder_decoder(TorchSpec(tmp_path, dtype="float32", num_blocks=128, device=DEVICE))
    expected = transformers_tokens(tmp_path, inputs)
    assert run_all(engine_of(on_gpu), requests_for(tmp_path, inputs)) == expected
    runner = load_encoder_decoder(TorchSpec(tmp_path, dtype="bfloat16", num_blocks=128, device=DEVICE))
    assert runner.model.bit_exact, runner.model.bit_exact_reason
    alone: dict[str, list[Any]] = {}
    for request in requests_for(tmp_path, inputs, LOGGED):
        alone |= outputs_of(engine_of(runner), [request])
    for budget in (24, 200):
        engine = engine_of(runner, max_num_batched_tokens=budget, enable_prefix_caching=False)
        assert outputs_of(engine, requests_for(tmp_path, inputs, LOGGED)) == alone
