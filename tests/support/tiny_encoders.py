"""Tiny encoders with seeded random weights, one for each supported architecture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

_BASE: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": 90,
    "initializer_range": 0.15,
    "pad_token_id": 1,
}
TINY_ENCODERS: Mapping[str, Mapping[str, Any]] = {
    "bert": {**_BASE, "type_vocab_size": 2},
    "roberta": {**_BASE, "type_vocab_size": 1},
    "xlm-roberta": {**_BASE, "type_vocab_size": 1},
    "electra": {**_BASE, "embedding_size": 32, "type_vocab_size": 2},
    "distilbert": {**_BASE, "dim": 64, "hidden_dim": 96, "n_layers": 2, "n_heads": 4},
    "modernbert": {
        **_BASE,
        "num_hidden_layers": 4,
        "global_attn_every_n_layers": 3,
        "local_attention": 16,
        "classifier_pooling": "mean",
        "bos_token_id": 2,
        "eos_token_id": 3,
        "cls_token_id": 2,
        "sep_token_id": 3,
    },
}


def write_encoder(directory: Path, name: str, *, num_labels: int = 0, seed: int = 5, **fields: Any) -> None:
    """Write a model directory without a tokenizer; with `num_labels` it has a classification head."""
    from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

    config = AutoConfig.for_model(name, **{**TINY_ENCODERS[name], **fields})
    if num_labels:
        config.num_labels = num_labels
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        kind = AutoModelForSequenceClassification if num_labels else AutoModel
        model = kind.from_config(config)
        # Biases that are zero, and norms that change nothing, would hide what is left out.
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(directory)


def write_pair_tokenizer(directory: Path) -> None:
    """Write a tokenizer with a token for each byte, and special tokens around texts and pairs as BERT has them."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    cls, sep = alphabet[:2]
    tokenizer = Tokenizer(models.BPE(vocab={letter: place for place, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{cls} $A {sep}", pair=f"{cls} $A {sep} $B:1 {sep}:1", special_tokens=[(cls, 0), (sep, 1)]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
