"""The times of a transcript's tokens equal those of transformers' `_extract_token_timestamps`, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.whisper.generation_whisper import _dynamic_time_warping

from baton.engine.core import EngineCore
from baton.engine.request import Request
from baton.messages.node import Leg
from baton.messages.pooling import Pooling, PoolingParams
from baton.messages.sampling import SamplingParams
from baton.runner.encoder_decoder.alignment import first_rows, token_rows
from baton.runner.encoder_decoder.loading import load_encoder_decoder
from baton.runner.spec import TorchSpec
from tests.oracle.test_image_exact import engine_of
from tests.support.encoder_decoder_models import ALIGNMENT_HEADS, request_for, speech, write_encoder_decoder

PROMPT = [240, 241, 243, 245]
SCALE = 2
"""What makes the heads of a random model look at some rows more than at others."""
BEGIN = 64
"""Positions of the encoder's input."""
TEXTS = {"two": (2, 16_000), "short": (12, 9_000), "long": (30, 16_000), "full": (56, 12_345), "brief": (5, 2_000)}
"""Numbers of tokens and samples. Of one token, and the end behind it, all paths cost the same but for rounding."""


class Generated(dict[str, Any]):
    """What transformers' `generate` returns, whose keys are attributes, too."""

    __getattr__ = dict.__getitem__


def expected_rows(attention: Sequence[torch.Tensor], heads: Sequence[Sequence[int]], num_rows: int) -> list[int]:
    """The rows that transformers finds, of weights [1, H, T, S] of each layer."""
    width, tokens = 7, attention[0].shape[2]
    model: Any = SimpleNamespace(config=SimpleNamespace(decoder_layers=len(attention), median_filter_width=width))
    out = Generated(cross_attentions=[attention], sequences=torch.zeros(1, tokens))
    found = transformers.WhisperForConditionalGeneration._extract_token_timestamps(
        model, out, heads, num_frames=2 * num_rows, num_input_ids=0
    )
    # Behind the last token transformers repeats its time.
    return [round(time / 0.02) for time in found[0, :-1].tolist()]


@pytest.mark.parametrize(
    ("num_tokens", "num_rows", "num_heads"), [(1, 20, 2), (8, 40, 2), (30, 50, 3), (5, 3, 2), (20, 4, 2), (90, 200, 4)]
)
def test_rows_are_those_of_transformers(num_tokens: int, num_rows: int, num_heads: int) -> None:
    rng = np.random.default_rng(num_tokens)
    keys = rng.normal(size=(num_heads, num_rows + 10, 16)).astype(np.float32)
    spoken = np.sort(rng.integers(0, num_rows, num_tokens))
    queries = (keys[:, spoken] + rng.normal(size=(num_heads, num_tokens, 16))).astype(np.float32)
    weights = torch.softmax(torch.from_numpy(queries) @ torch.from_numpy(keys).transpose(1, 2), -1)
    heads = [(0, head) for head in range(num_heads)]
    found = token_rows(zip(queries, keys, strict=True), num_rows, 7)
    assert found.tolist() == expected_rows([weights[None]], heads, num_rows)


def test_of_equal_paths_the_same_is_taken_as_by_transformers() -> None:
    for seed in range(5):
        costs = np.random.default_rng(seed).integers(-1, 2, (6 + seed, 9)).astype(np.float32)
        tokens, rows = _dynamic_time_warping(costs.astype(np.float64))
        assert first_rows(costs).tolist() == [rows[tokens == token][0] for token in range(len(costs))]


def times_of(engine: EngineCore, requests: Sequence[Request]) -> dict[str, list[float]]:
    for request in requests:
        engine.scheduler.add_request(request)
    found = {}
    while engine.has_work():
        for output in (output for outputs in engine.step().values() for output in outputs):
            assert output.error is None
            found[output.attempt.request_id.removesuffix("+")] = np.frombuffer(output.embedding, "<f4").tolist()
    return found


def test_times_of_a_model_are_those_of_transformers_whatever_is_beside_them(tmp_path: Path) -> None:
    write_encoder_decoder(tmp_path, "whisper")
    weights = load_file(tmp_path / "model.safetensors")
    sharper = {name: tensor * (SCALE if "encoder_attn.q_proj" in name else 1) for name, tensor in weights.items()}
    save_file(sharper, tmp_path / "model.safetensors", {"format": "pt"})
    model: Any = transformers.WhisperForConditionalGeneration.from_pretrained(
        tmp_path, dtype=torch.float32, local_files_only=True, attn_implementation="eager"
    ).eval()
    extractor = transformers.WhisperFeatureExtractor.from_pretrained(tmp_path)
    rng = np.random.default_rng(0)
    requests: list[Any] = []
    expected = {}
    for name, (num_tokens, num_samples) in TEXTS.items():
        # Another sound each 40 ms, so that the rows of the encoder differ.
        data = b"".join(speech(seed, 640) for seed in range(num_samples // 640 + 1))[: 2 * num_samples]
        text = rng.integers(0, 200, num_tokens).tolist()
        num_rows = num_samples // 320
        align = PoolingParams(Pooling.ALIGN, second_start=BEGIN + len(PROMPT), num_rows=num_rows)
        requests.append((name, data, [*PROMPT, *text], SamplingParams(max_tokens=1), align))
        samples = np.frombuffer(data, "<i2").astype(np.float32) / 32768
        with torch.inference_mode():
            attention = model(
                input_features=extractor(samples, sampling_rate=16_000, return_tensors="pt").input_features,
                decoder_input_ids=torch.tensor([[*PROMPT, *text]]),
                output_attentions=True,
            ).cross_attentions
        of_text = [layer[:, :, len(PROMPT) - 1 :] for layer in attention]
        expected[name] = expected_rows(of_text, ALIGNMENT_HEADS, num_rows)
    assert len({row for rows in expected.values() for row in rows}) > 15
    runner = load_encoder_decoder(TorchSpec(tmp_path, dtype="float32", num_blocks=128))

    def made(suffix: str = "") -> list[Request]:
        return [
            request_for(tmp_path, name + suffix, *each, leg=Leg.EMBED, pooling=align) for name, *each, align in requests
        ]

    engine = engine_of(runner)
    for request in made():
        assert times_of(engine, [request]) == {request.request_id: expected[request.request_id]}
    # The transcripts are cached by now, and are computed all the same.
    assert times_of(engine, made("+")) == expected
    assert engine.scheduler.make_stats().prefix_cache.num_hit_tokens["device"] > 0
    in_chunks = engine_of(runner, max_num_batched_tokens=24)
    assert times_of(in_chunks, made()) == expected
