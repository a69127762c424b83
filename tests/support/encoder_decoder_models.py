"""Tiny models with an encoder and a decoder, one for each supported shape, and their inputs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from baton.engine.request import Request
from baton.messages.sampling import SamplingParams
from baton.messages.spans import ContentKind, EncoderContent, source_spans
from baton.model_formats.encoder_decoders import encoder_decoder
from baton.runner.model.random_model import write_random_model
from tests.support.image_models import add_special_tokens
from tests.support.requests import request_of

_BART: Mapping[str, Any] = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "vocab_size": 256,
    "max_position_embeddings": 160,
    "init_std": 0.7,
    "tie_word_embeddings": False,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
_T5: Mapping[str, Any] = {
    "model_type": "t5",
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 96,
    "num_layers": 3,
    "num_heads": 4,
    "vocab_size": 256,
    "n_positions": 160,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "initializer_factor": 2.0,
    "decoder_start_token_id": 2,
}
ENCODER_DECODERS: Mapping[str, Mapping[str, Any]] = {
    "bart": {**_BART, "model_type": "bart"},
    "mbart": {
        **_BART,
        "model_type": "mbart",
        "scale_embedding": True,
        "tie_word_embeddings": True,
        "init_std": 0.3,
    },
    "t5": {**_T5, "tie_word_embeddings": True},
    "mt5": {**_T5, "model_type": "mt5", "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "whisper": {
        **{name: value for name, value in _BART.items() if name != "max_position_embeddings"},
        "model_type": "whisper",
        "num_mel_bins": 8,
        "max_source_positions": 50,
        "max_target_positions": 60,
        "decoder_start_token_id": 3,
    },
}
ALIGNMENT_HEADS = [[2, 1], [1, 0], [2, 3], [0, 2]]
SPEECH_TOKENS = {
    240: "<|startoftranscript|>",
    241: "<|en|>",
    242: "<|de|>",
    243: "<|transcribe|>",
    244: "<|translate|>",
    245: "<|notimestamps|>",
    246: "<|startofprev|>",
    247: "<|endoftext|>",
}


def write_encoder_decoder(directory: Path, name: str, seed: int = 5, dtype: str = "float32") -> None:
    """Write a model directory; that of Whisper takes one second of speech."""
    write_random_model(directory, ENCODER_DECODERS[name], seed, dtype)
    if name == "whisper":
        features = {"feature_size": 8, "sampling_rate": 16000, "hop_length": 160, "chunk_length": 1, "n_fft": 400}
        (directory / "preprocessor_config.json").write_text(json.dumps(features))
        add_special_tokens(directory, SPEECH_TOKENS)
        path = directory / "generation_config.json"
        generation = json.loads(path.read_text()) if path.is_file() else {}
        path.write_text(json.dumps({**generation, "alignment_heads": ALIGNMENT_HEADS}))


def speech(seed: int, num_samples: int = 16_000) -> bytes:
    """A second of tones and noise, as GenerateRequest.audio has it."""
    rng = np.random.default_rng(seed)
    at = np.arange(num_samples) / 16_000
    tones = sum(np.sin(2 * np.pi * rng.uniform(80, 3000) * at) * rng.uniform(0.05, 0.3) for _ in range(4))
    samples = np.clip(tones + rng.normal(0, 0.02, num_samples), -1, 1)
    return (samples * 32767).astype("<i2").tobytes()


def source(directory: Path, seed: int, num_tokens: int = 0) -> bytes:
    """The input of the encoder: speech, or so many token ids."""
    found = encoder_decoder(directory)
    assert found is not None
    if found.source == "speech":
        return speech(seed)
    return np.random.default_rng(seed).integers(3, 256, num_tokens).astype("<u4").tobytes()


def request_for(
    directory: Path, name: str, data: bytes, tokens: Sequence[int], params: SamplingParams, **fields: Any
) -> Request:
    """A request with an input for the encoder, whose decoder begins with these tokens."""
    found = encoder_decoder(directory)
    assert found is not None
    content = EncoderContent.of(data, ContentKind.SPEECH if found.source == "speech" else ContentKind.TEXT)
    spans = source_spans(content.digest, found.most_rows if found.source == "speech" else len(data) // 4)
    return request_of(name, [0] * spans[-1].stop + list(tokens), params, spans=spans, contents=[content], **fields)
