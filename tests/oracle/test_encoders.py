"""Encoders give transformers' own vectors and labels, with the same bits alone and among others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from baton.engine.core import EngineCore
from baton.engine.kv_cache.block_hash import CacheKeyFields
from baton.engine.request import Request
from baton.engine.scheduler import Scheduler, SchedulerConfig
from baton.errors import ConfigError
from baton.messages.node import Leg, Outcome
from baton.messages.node_model import Capability
from baton.messages.pooling import EMBEDDING_KINDS, Pooling, PoolingParams
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams
from baton.runner.backends.operations import Operations
from baton.runner.backends.torch_operations import TorchOperations
from baton.runner.loading import load_runner
from baton.runner.model.attention import UnsupportedAttention
from baton.runner.spec import TorchSpec
from baton.runner.text_encoder.encoder_runner import EncoderRunner, load_encoder
from tests.doubles.fake_clock import FakeClock
from tests.support.tiny_encoders import TINY_ENCODERS, write_encoder
from tests.support.tiny_models import TINY_MODELS

RNG = Random(4)
TEXTS = {f"of-{length}": [RNG.randrange(5, 256) for _ in range(length)] for length in (1, 2, 16, 17, 63, 64, 70, 80)}
PAIRS = {name: len(text) // 2 for name, text in TEXTS.items()}
"""Where the second text begins."""


def load(directory: Path, dtype: str = "float32", operations: Operations | None = None) -> EncoderRunner:
    return load_encoder(TorchSpec(directory, dtype=dtype, num_blocks=256), operations)


def vectors(
    runner: Any, texts: Mapping[str, Sequence[int]], params: Mapping[str, PoolingParams], budget: int = 4096
) -> dict[str, bytes]:
    """The vectors of texts, in steps of at most so many tokens."""
    config = SchedulerConfig(
        num_blocks=runner.memory.num_blocks,
        max_num_batched_tokens=budget,
        max_num_seqs=32,
        max_model_len=runner.model.max_model_len,
        enable_chunked_prefill=not isinstance(runner, EncoderRunner),
        enable_prefix_caching=not isinstance(runner, EncoderRunner),
    )
    engine = EngineCore(Scheduler(config, CacheKeyFields.of(runner.model, runner.layout), FakeClock()), runner)
    for name, text in texts.items():
        engine.scheduler.add_request(
            Request(name, RequestSpec(text, SamplingParams(), pooling=params[name]), leg=Leg.EMBED)
        )
    found: dict[str, bytes] = {}
    while len(found) < len(texts):
        for output in (output for outputs in engine.step().values() for output in outputs):
            assert output.outcome is Outcome.STOP, output
            found[output.attempt.request_id] = output.embedding
    return found


def transformers_model(directory: Path, kind: str) -> Any:
    import transformers

    return (
        getattr(transformers, kind)
        .from_pretrained(directory, dtype=torch.float32, local_files_only=True, attn_implementation="eager")
        .eval()
    )


def inputs_of(text: Sequence[int], second: int, has_types: bool) -> dict[str, torch.Tensor]:
    types = torch.tensor([[0] * second + [1] * (len(text) - second)] if second else [[0] * len(text)])
    inputs = {"input_ids": torch.tensor([list(text)]), "attention_mask": torch.ones(1, len(text), dtype=torch.long)}
    return {**inputs, "token_type_ids": types} if has_types else inputs


def pooled(rows: npt.NDArray[np.float32], params: PoolingParams) -> npt.NDArray[np.float64]:
    wide = rows.astype(np.float64)
    row = {Pooling.LAST: wide[-1], Pooling.CLS: wide[0], Pooling.MEAN: wide.mean(axis=0)}[params.kind]
    vector: npt.NDArray[np.float64] = row / np.linalg.norm(row) if params.normalize else row
    return vector


@pytest.mark.parametrize("name", TINY_ENCODERS)
def test_an_encoder_gives_transformers_vectors_with_the_same_bits_in_any_batch(tmp_path: Path, name: str) -> None:
    write_encoder(tmp_path, name)
    runner = load(tmp_path)
    assert runner.model.bit_exact, runner.model.bit_exact_reason
    assert runner.model.capabilities == {Capability.EMBED, Capability.SCORE}
    has_types = runner.model.pooling.has_token_types
    texts, params = {}, {}
    for kind in sorted(EMBEDDING_KINDS, key=str):
        for text in TEXTS:
            second = PAIRS[text] if has_types else 0
            texts[f"{kind.value} {text}"] = TEXTS[text]
            params[f"{kind.value} {text}"] = PoolingParams(kind, kind is not Pooling.LAST, second_start=second)
    together = vectors(runner, texts, params)
    reference = transformers_model(tmp_path, "AutoModel")
    rows = {}
    with torch.inference_mode():
        for text in TEXTS:
            inputs = inputs_of(TEXTS[text], PAIRS[text] if has_types else 0, has_types)
            rows[text] = reference(**inputs).last_hidden_state[0].numpy()
    for one, vector in together.items():
        expected = pooled(rows[one.partition(" ")[2]], params[one])
        scale = max(1.0, float(np.abs(expected).max()))
        np.testing.assert_allclose(np.frombuffer(vector, "<f4") / scale, expected / scale, rtol=0, atol=1e-5)
    assert vectors(runner, texts, params, budget=90) == together, "in small steps"
    backwards = dict(reversed(texts.items()))
    assert vectors(runner, backwards, params) == together, "in another order"
    for one in [key for key in texts if key.startswith("mean")]:
        assert vectors(runner, {one: texts[one]}, params) == {one: together[one]}, "alone"


@pytest.mark.parametrize("name", TINY_ENCODERS)
def test_a_classifier_gives_transformers_probabilities(tmp_path: Path, name: str) -> None:
    write_encoder(tmp_path, name, num_labels=3)
    runner = load(tmp_path)
    assert Capability.CLASSIFY in runner.model.capabilities
    assert Capability.SCORE not in runner.model.capabilities, "three numbers are no score"
    has_types = runner.model.pooling.has_token_types
    params = {text: PoolingParams(Pooling.CLASSIFY, second_start=PAIRS[text] if has_types else 0) for text in TEXTS}
    together = vectors(runner, TEXTS, params)
    reference = transformers_model(tmp_path, "AutoModelForSequenceClassification")
    for text, vector in together.items():
        with torch.inference_mode():
            logits = reference(**inputs_of(TEXTS[text], params[text].second_start, has_types)).logits[0]
        np.testing.assert_allclose(np.frombuffer(vector, "<f4"), torch.softmax(logits, 0).numpy(), atol=1e-5)
        assert vectors(runner, {text: TEXTS[text]}, params) == {text: vector}, "alone"


@pytest.mark.parametrize("name", ["qwen2", "llama", "gpt2"])
def test_a_decoder_with_labels_gives_transformers_outputs(tmp_path: Path, name: str) -> None:
    from transformers import AutoConfig, AutoModelForSequenceClassification

    fields = {**TINY_MODELS[name], "pad_token_id": 0, "num_labels": 3}
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    torch.manual_seed(3)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    runner = load_runner(TorchSpec(tmp_path, dtype="float32", num_blocks=128))
    assert runner.model.bit_exact
    assert runner.model.capabilities & {Capability.GENERATE, Capability.CLASSIFY} == {Capability.CLASSIFY}
    params = {text: PoolingParams(Pooling.CLASSIFY, activate=False) for text in TEXTS}
    together = vectors(runner, TEXTS, params)
    reference = transformers_model(tmp_path, "AutoModelForSequenceClassification")
    for text, vector in together.items():
        with torch.inference_mode():
            logits = reference(input_ids=torch.tensor([TEXTS[text]])).logits[0].numpy()
        np.testing.assert_allclose(np.frombuffer(vector, "<f4"), logits, atol=1e-4)
    assert vectors(runner, TEXTS, params, budget=32) == together, "in chunks"


@pytest.mark.parametrize(("name", "dtype", "plain"), [("bert", "bfloat16", False), ("modernbert", "float32", True)])
def test_encoders_with_other_dtypes_and_kernels(tmp_path: Path, name: str, dtype: str, plain: bool) -> None:
    write_encoder(tmp_path, name, num_labels=1)
    runner = load(tmp_path, dtype, TorchOperations(1) if plain else None)
    assert runner.model.bit_exact, runner.model.bit_exact_reason
    assert Capability.SCORE in runner.model.capabilities
    exact = load(tmp_path)
    for kind in (Pooling.MEAN, Pooling.CLASSIFY):
        params = dict.fromkeys(TEXTS, PoolingParams(kind))
        together = vectors(runner, TEXTS, params)
        assert vectors(runner, TEXTS, params, budget=90) == together
        for text, vector in vectors(exact, TEXTS, params).items():
            off = np.frombuffer(vector, "<f4") - np.frombuffer(together[text], "<f4")
            assert np.linalg.norm(off) < (1e-5 if plain else 0.05)


def test_an_encoder_with_attention_sinks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.bert import modeling_bert

    original = modeling_bert.BertSelfAttention.forward

    def forward(self: Any, *rows: Any, **arguments: Any) -> Any:
        return original(self, *rows, **arguments, s_aux=torch.zeros(self.num_attention_heads))

    monkeypatch.setattr(modeling_bert.BertSelfAttention, "forward", forward)
    write_encoder(tmp_path, "bert")
    with pytest.raises(UnsupportedAttention, match="has attention sinks"):
        load(tmp_path)


def test_what_an_encoder_can_not_have_is_refused(tmp_path: Path) -> None:
    write_encoder(tmp_path, "bert")
    for settings in ({"tensor_parallel": 2}, {"quantization": "int8"}, {"cache_dtype": "int8"}):
        with pytest.raises(ConfigError, match="is an encoder, which is computed plainly: leave --"):
            load_encoder(TorchSpec(tmp_path, num_blocks=64, **settings))
