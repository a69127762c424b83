"""Prompts for speech: tokens are found by their texts, and what a model's files lack is told."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from baton.errors import ConfigError
from baton.text.prompts import SpeechPrompts

SPECIAL = (
    *("<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|haw|>", "<|translate|>", "<|transcribe|>"),
    *("<|startofprev|>", "<|nospeech|>", "<|notimestamps|>", "<|0.00|>"),
)


@dataclass
class Names:
    texts: tuple[str, ...] = SPECIAL
    words: int = field(default=100)

    def tokens(self) -> Mapping[int, str]:
        """100 words, and then the special tokens."""
        words = {token: f"word{token}" for token in range(self.words)}
        return words | {self.words + place: text for place, text in enumerate(self.texts)}


def write(path: Path, generation: Mapping[str, Any] | None = None, **config: Any) -> Path:
    known = {"model_type": "whisper", "vocab_size": 111, "max_target_positions": 20} | config
    (path / "config.json").write_text(json.dumps(known))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def load(path: Path, names: Names | None = None) -> SpeechPrompts:
    found = SpeechPrompts.load(path, (names or Names()).tokens())
    assert found is not None
    return found


def test_the_tokens_of_a_model_for_many_languages(tmp_path: Path) -> None:
    prompts = load(write(tmp_path, {"suppress_tokens": [1, 2, 2, 107, -1, 5000], "is_multilingual": True}))
    assert prompts.languages == {"en": 102, "de": 103, "haw": 104}
    assert prompts.suppressed == (1, 2, 107)
    assert prompts.prompt("de") == (101, 103, 106, 109)
    assert prompts.prompt("haw", translates=True) == (101, 104, 105, 109)


def test_a_model_says_how_much_it_hears(tmp_path: Path) -> None:
    assert (
        load(write(tmp_path)).most_samples == load(write(tmp_path, max_source_positions=1500)).most_samples == 480_000
    )
    assert load(write(tmp_path, max_source_positions=50)).most_samples == 16_000
    with pytest.raises(ConfigError, match="max_source_positions"):
        load(write(tmp_path, max_source_positions=0))


def test_text_before_is_cut_to_half_of_the_room_and_has_no_special_tokens(tmp_path: Path) -> None:
    prompts = load(write(tmp_path))
    assert prompts.prompt("en", before=[7, 101, 8]) == (107, 7, 8, 101, 102, 106, 109)
    assert prompts.prompt("en", before=range(50)) == (107, *range(41, 50), 101, 102, 106, 109)
    assert prompts.prompt("en", before=[109]) == prompts.prompt("en")


def test_a_model_for_english_alone_has_no_languages_and_one_task(tmp_path: Path) -> None:
    for prompts in (
        load(write(tmp_path, {"is_multilingual": False})),
        load(write(tmp_path), Names(tuple(text for text in SPECIAL if text not in ("<|en|>", "<|de|>", "<|haw|>")))),
    ):
        assert not prompts.languages
        assert prompts.translate is None
        assert len(prompts.prompt("en")) == 2
        assert prompts.prompt("en") == (prompts.start, prompts.no_timestamps)
        (tmp_path / "generation_config.json").unlink(missing_ok=True)


def test_other_models_have_no_prompts_for_speech(tmp_path: Path) -> None:
    assert SpeechPrompts.load(write(tmp_path, model_type="llama"), Names().tokens()) is None


@pytest.mark.parametrize("text", ["<|startoftranscript|>", "<|notimestamps|>", "<|transcribe|>"])
def test_a_missing_token_is_named(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path), Names(tuple(one for one in SPECIAL if one != text)))
    assert f"has no token {text} in its tokenizer.json" in str(caught.value)


def test_unusable_numbers_are_named(tmp_path: Path) -> None:
    for length in (None, 0, "448", True):
        with pytest.raises(ConfigError, match="max_target_positions"):
            load(write(tmp_path, max_target_positions=length))
    for suppressed in ("all", [1.5], [[1]]):
        with pytest.raises(ConfigError, match="suppress_tokens must be"):
            load(write(tmp_path, {"suppress_tokens": suppressed}))
    with pytest.raises(ConfigError, match="301 tokens; at most 300"):
        load(write(tmp_path, {"suppress_tokens": list(range(301))}, vocab_size=1000))
