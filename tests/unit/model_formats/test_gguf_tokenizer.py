"""Tokenizers of GGUF files: their tokens are those of the tokenizers that they were made of."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from baton.model_formats.gguf.container import open_gguf
from baton.model_formats.gguf.facts import Facts
from baton.model_formats.gguf.tokenizer import (
    PRE_TOKENIZERS,
    generation_config_json,
    tokenizer_config_json,
    tokenizer_json,
)
from baton.model_formats.special_tokens import read_end_tokens
from baton.text.model_template import ModelTemplate
from baton.text.tokenizer import Tokenizer
from tests.doubles.fake_workers import FakeWorkers
from tests.support.gguf_files import write_gguf
from tests.support.gguf_models import byte_level_tokens

TEXTS = (
    "The cat sat on the mat, and the dog didn't.",
    "  two  blanks\n\nand\ttabs ",
    "1234567 numbers and ümläuts, 日本語, 🦜",
    "",
    " ",
)
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def directory_of(tmp_path: Path, metadata: Mapping[str, Any], architecture: str = "llama") -> Path:
    """A directory with the tokenizer's files and generation_config.json of a GGUF file with this metadata."""
    rows = np.zeros((len(metadata["tokenizer.ggml.tokens"]), 1), dtype=np.float32)
    more = {f"{architecture}.context_length": 512, **metadata}
    source = write_gguf(tmp_path / "model.gguf", {"token_embd.weight": ("F32", rows)}, more, architecture)
    with open_gguf(source) as file:
        facts = Facts(file)
        (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer_json(facts)))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config_json(facts)))
        (tmp_path / "generation_config.json").write_text(json.dumps(generation_config_json(facts)))
    return tmp_path


def words(pre: str, text: str) -> list[str]:
    how = tokenizers.Tokenizer.from_str(
        json.dumps(
            {"version": "1.0", "added_tokens": [], "pre_tokenizer": PRE_TOKENIZERS[pre].to_json()}
            | {"model": {"type": "BPE", "vocab": {}, "merges": []}}
        )
    ).pre_tokenizer
    return [word for word, _ in how.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", "IT|'s|ĠHelloWorld|Ġ12345|!|ĊĊĠ|Ġok"),
        ("smollm", "IT|'s|ĠHelloWorld|Ġ|1|2|3|4|5|!|ĊĊĠ|Ġok"),
        ("llama-bpe", "IT|'s|ĠHelloWorld|Ġ|123|45|!ĊĊ|Ġ|Ġok"),
        ("qwen2", "IT|'s|ĠHelloWorld|Ġ|1|2|3|4|5|!ĊĊ|Ġ|Ġok"),
        ("gpt-4o", "IT's|ĠHello|World|Ġ|123|45|!ĊĊ|Ġ|Ġok"),
        ("tekken", "IT|'s|ĠHello|World|Ġ|1|2|3|4|5|!ĊĊ|Ġ|Ġok"),
    ],
)
def test_texts_are_cut_into_the_words_of_each_pre_tokenizer(pre: str, expected: str) -> None:
    assert words(pre, "IT's HelloWorld 12345!\n\n  ok") == expected.split("|")


def trained(normalizer: Any, pre_tokenizer: Any, decoder: Any, alphabet: list[str]) -> Any:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoder
    trainer = trainers.BpeTrainer(vocab_size=500, show_progress=False, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([Path(__file__).read_text(), *TEXTS], trainer)
    return tokenizer


def tokens_of(tokenizer: Any) -> list[str]:
    return [tokenizer.id_to_token(token) for token in range(tokenizer.get_vocab_size())]


def test_a_byte_level_tokenizer_has_the_same_tokens_and_texts(tmp_path: Path) -> None:
    steps = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    original = trained(None, steps, decoders.ByteLevel(), pre_tokenizers.ByteLevel.alphabet())
    merges = json.loads(original.to_str())["model"]["merges"]
    directory = directory_of(
        tmp_path,
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "smollm",
            "tokenizer.ggml.tokens": tokens_of(original),
            "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        },
    )
    again = Tokenizer.load(directory)
    for text in TEXTS:
        assert again.encode(text) == original.encode(text).ids
        assert again.decode(again.encode(text)) == text


def merged(text: str, scores: Mapping[str, float]) -> list[str]:
    """The pieces of SentencePiece: the two neighbours with the best result are merged, until none has a result."""
    pieces = list(text)
    while True:
        results = ["".join(pair) for pair in pairwise(pieces)]
        best = max((result for result in results if result in scores), key=lambda result: scores[result], default=None)
        if best is None:
            return pieces
        place = results.index(best)
        pieces[place : place + 2] = [best]


@pytest.mark.parametrize("has_prefix", [True, False])
def test_a_sentencepiece_tokenizer_merges_by_score(tmp_path: Path, has_prefix: bool) -> None:
    cut = pre_tokenizers.Split("\u2581", "merged_with_next")
    texts = tokens_of(trained(normalizers.Replace(" ", "\u2581"), cut, decoders.Fuse(), []))
    # Scores as SentencePiece gives them: a longer piece was found later.
    scores = {text: -float(place) for place, text in enumerate(texts)}
    head = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256))]
    directory = directory_of(
        tmp_path,
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": [*head, *texts],
            "tokenizer.ggml.scores": [*[0.0] * len(head), *scores.values()],
            "tokenizer.ggml.token_type": [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(texts)],
            "tokenizer.ggml.add_space_prefix": has_prefix,
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
        },
    )
    again = Tokenizer.load(directory)
    for text in TEXTS:
        blanks = ("\u2581" if has_prefix and text else "") + text.replace(" ", "\u2581")
        ids = again.encode(text)
        assert ids == [1, *(len(head) + texts.index(piece) for piece in merged(blanks, scores))]
        assert again.decode(ids) == text
    # Characters without a token are bytes.
    assert again.decode(again.encode("ↈ")) == "ↈ"
    assert again.encode("</s>")[-1] == 2


def test_special_tokens_are_found_in_texts_and_are_not_shown(tmp_path: Path) -> None:
    metadata = byte_level_tokens()
    tokens = metadata["tokenizer.ggml.tokens"]
    tokenizer = Tokenizer.load(directory_of(tmp_path, metadata))
    ids = tokenizer.encode("<|im_start|>the<|im_end|>")
    assert ids == [tokens.index(token) for token in ("<|im_start|>", "t", "he", "<|im_end|>")]
    assert tokenizer.decode(ids) == "the"


@pytest.mark.parametrize("kind", [NORMAL, CONTROL, USER_DEFINED])
def test_ends_of_turns_are_known_by_their_names_whatever_their_kind_is(tmp_path: Path, kind: int) -> None:
    metadata = byte_level_tokens()
    tokens = metadata["tokenizer.ggml.tokens"]
    named, known, eot = tokens.index("<|endoftext|>"), tokens.index("<|im_end|>"), tokens.index("[UNUSED3]")
    kinds = [kind if place == known else found for place, found in enumerate(metadata["tokenizer.ggml.token_type"])]
    keys = {"token_type": kinds, "eos_token_id": named, "eot_token_id": eot}
    directory = directory_of(tmp_path, {**metadata, **{f"tokenizer.ggml.{key}": value for key, value in keys.items()}})
    assert read_end_tokens(directory, {}) == {named, known, eot}
    tokenizer = Tokenizer.load(directory)
    assert tokenizer.encode("a<|im_end|>") == [tokens.index("a"), known]
    assert tokenizer.decode([tokens.index("a"), known]) == "a"


def test_the_chat_template_is_that_of_the_file(tmp_path: Path) -> None:
    template = ModelTemplate.load(directory_of(tmp_path, byte_level_tokens()), FakeWorkers())
    text = template.render([{"role": "user", "content": "Hi"}], datetime.now(UTC))
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_the_templates_with_names_are_those_of_the_file(tmp_path: Path) -> None:
    names = {"tokenizer.chat_templates": ["tool_use"], "tokenizer.chat_template.tool_use": "TOOLS {{ tools }}"}
    template = ModelTemplate.load(directory_of(tmp_path, {**byte_level_tokens(), **names}), FakeWorkers())
    chat = [{"role": "user", "content": "Hi"}]
    assert template.render(chat, datetime.now(UTC), None, [{"x": 1}]) == "TOOLS [{'x': 1}]"
    assert template.render(chat, datetime.now(UTC)).startswith("<|im_start|>user")


@pytest.mark.parametrize(
    ("pre", "says", "begins"), [("smollm", None, False), ("llama-bpe", None, True), ("llama-bpe", False, False)]
)
def test_a_text_begins_with_bos_if_the_file_or_its_kind_says_so(
    tmp_path: Path, pre: str, says: bool | None, begins: bool
) -> None:
    metadata = {**byte_level_tokens(), "tokenizer.ggml.pre": pre}
    if says is not None:
        metadata["tokenizer.ggml.add_bos_token"] = says
    ids = Tokenizer.load(directory_of(tmp_path, metadata)).encode("the")
    assert (ids[0] == metadata["tokenizer.ggml.bos_token_id"]) == begins


def test_special_tokens_of_phi3_take_the_blanks_after_them(tmp_path: Path) -> None:
    texts = ["<unk>", "<s>", "</s>", "a", "\n", "<|end|>", "<|user|>"]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.scores": [0.0] * len(texts),
        "tokenizer.ggml.token_type": [UNKNOWN, CONTROL, CONTROL, NORMAL, NORMAL, CONTROL, USER_DEFINED],
        "tokenizer.ggml.add_space_prefix": False,
    }
    assert Tokenizer.load(directory_of(tmp_path, metadata, "phi3")).encode("a<|end|>\na") == [3, 5, 3]
