"""The bundled demo model is complete: small, readable by the usual loaders, and trained."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

import baton

DIRECTORY = Path(baton.__file__).parent / "demo_model"
FILES = {
    "README.md",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}
SPECIAL_TOKENS = ("<s>", "</s>", "<|user|>", "<|assistant|>")
MAX_BYTES = 12_000_000
# The whole model costs 1.5 nats a token on the snippet, one of 150 steps 3.3, a uniform guess log(4096) = 8.3.
MAX_NATS_PER_TOKEN = 2.0
SNIPPET = '''class Stack:
    """A stack of values."""

    def __init__(self, items=None):
        self._items = list(items) if items is not None else []

    def __len__(self):
        return len(self._items)

    def push(self, value):
        """Put a value on top of the stack."""
        self._items.append(value)

    def pop(self):
        """Remove and return the value on top of the stack."""
        if not self._items:
            raise IndexError("pop from an empty stack")
        return self._items.pop()


def main():
    import sys

    for name in sys.argv[1:]:
        with open(name, encoding="utf-8") as file:
            for line in file:
                print(line.rstrip())


if __name__ == "__main__":
    main()
'''


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DIRECTORY / "tokenizer.json"))


@cache
def config() -> dict[str, object]:
    loaded: dict[str, object] = json.loads((DIRECTORY / "config.json").read_text(encoding="utf-8"))
    return loaded


def test_the_directory_holds_the_model_and_nothing_else() -> None:
    assert {path.name for path in DIRECTORY.iterdir()} == FILES
    assert sum(path.stat().st_size for path in DIRECTORY.iterdir()) <= MAX_BYTES


def test_the_shape_suits_the_kernels() -> None:
    shape = config()
    assert shape["architectures"] == ["LlamaForCausalLM"]
    assert shape["max_position_embeddings"] == 2048
    assert shape["tie_word_embeddings"] is True
    assert shape["head_dim"] in (32, 64)
    for width in ("hidden_size", "intermediate_size", "vocab_size"):
        assert int(str(shape[width])) % 64 == 0, width
    heads, key_value_heads = int(str(shape["num_attention_heads"])), int(str(shape["num_key_value_heads"]))
    assert key_value_heads < heads
    assert heads % key_value_heads == 0


def test_the_weights_are_finite_bfloat16_stored_once() -> None:
    with safe_open(DIRECTORY / "model.safetensors", framework="pt") as weights:
        names = set(weights.keys())
        for name in names:
            tensor = weights.get_tensor(name)
            assert tensor.dtype == torch.bfloat16, name
            assert bool(tensor.isfinite().all()), name
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


@given(st.text())
def test_any_text_round_trips(text: str) -> None:
    # A special token spelt out in a text is that token, which decoding skips.
    assume(not any(token in text for token in SPECIAL_TOKENS))
    ids = tokenizer().encode(text).ids
    assert ids[0] == config()["bos_token_id"]
    assert max(ids) < int(str(config()["vocab_size"]))
    assert tokenizer().decode(ids) == text


@pytest.mark.parametrize("text", ["def f(x):\n\treturn x  # naïve\r\n", "中文 字 — 😀👩‍👩‍👧", "\x00\u200b\ufeff", ""])
def test_hard_texts_round_trip(text: str) -> None:
    assert tokenizer().decode(tokenizer().encode(text).ids) == text


def test_both_readers_of_the_tokenizer_agree() -> None:
    other = AutoTokenizer.from_pretrained(DIRECTORY)
    assert other(SNIPPET)["input_ids"] == tokenizer().encode(SNIPPET).ids
    assert (other.bos_token, other.eos_token) == ("<s>", "</s>")


def test_the_chat_template_renders_to_its_special_tokens() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Add two."},
        {"role": "assistant", "content": "def add(x): return x + 2"},
        {"role": "user", "content": "Add three."},
    ]
    reader = AutoTokenizer.from_pretrained(DIRECTORY)
    text = reader.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<s><|user|>Be brief.</s><|user|>Add two.</s><|assistant|>def add(x): return x + 2</s>"
        "<|user|>Add three.</s><|assistant|>"
    )
    ids = tokenizer().encode(text, add_special_tokens=False).ids
    specials = [tokenizer().id_to_token(token) for token in ids if token < len(SPECIAL_TOKENS)]
    assert specials == ["<s>", *["<|user|>", "</s>"] * 2, "<|assistant|>", "</s>", "<|user|>", "</s>", "<|assistant|>"]


def test_the_weights_are_trained() -> None:
    model = AutoModelForCausalLM.from_pretrained(DIRECTORY, dtype=torch.float32)
    ids = torch.tensor([tokenizer().encode(SNIPPET).ids])
    with torch.no_grad():
        loss = model(input_ids=ids, labels=ids).loss.item()
    assert loss < MAX_NATS_PER_TOKEN
