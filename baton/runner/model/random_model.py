"""Writes model directories with seeded random weights, for benchmarks of a shape and tests of an architecture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from baton.runner.model.model_classes import has_other_parts, takes_images
from baton.runner.model.weights import DTYPES


def write_random_model(directory: Path, config: Mapping[str, Any], seed: int, dtype: str = "float32") -> None:
    """Write a complete model directory: config.json, model.safetensors, tokenizer.json.

    `config` is what a config.json holds, `model_type` included. The same arguments give the same bytes. There is no
    end-of-sequence token unless `config` names one, so that benchmarks run to their full length.
    """
    from transformers import AutoConfig

    fields = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, **config}
    model_type = fields.pop("model_type")
    settings = AutoConfig.for_model(model_type, **fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model_class = _class_for(settings)
        model = model_class.from_config(settings, dtype=DTYPES[dtype])
    write_module(directory, model)


def write_module(directory: Path, module: Any) -> None:
    """Write a transformers module as a complete model directory, with a tokenizer of made-up words."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    directory.mkdir(parents=True, exist_ok=True)
    module.save_pretrained(directory)
    _write_tokenizer(directory, module.config.get_text_config().vocab_size)


def _class_for(config: Any) -> Any:
    import transformers

    if takes_images(config) or has_other_parts(config):
        return transformers.AutoModelForMultimodalLM
    if config.is_encoder_decoder:
        is_speech = hasattr(config, "num_mel_bins")
        return transformers.AutoModelForSpeechSeq2Seq if is_speech else transformers.AutoModelForSeq2SeqLM
    return transformers.AutoModelForCausalLM


def _write_tokenizer(directory: Path, vocab_size: int) -> None:
    """Write a byte-level tokenizer: one token for each byte, and a made-up word for each further id."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"Ġw{token_id}" for token_id in range(len(alphabet), vocab_size)]
    vocabulary = {token: token_id for token_id, token in enumerate((alphabet + words)[:vocab_size])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
