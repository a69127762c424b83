"""Prompts of models that write down speech: the special tokens that say what the decoder is to write."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from baton.errors import ConfigError
from baton.messages.request_limits import MAX_LOGIT_BIAS
from baton.model_formats.audio import MOST_SAMPLES
from baton.model_formats.encoder_decoders import read_encoder_decoder
from baton.model_formats.files import read_object

SAMPLES_PER_ROW = 320
"""Samples for each row of the encoder: two frames of 10 ms."""
_LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")
_SPECIAL = re.compile(r"<\|.*\|>")


class TokenNames(Protocol):
    """The tokenizer as these prompts use it; `baton.text.tokenizer.Tokenizer` is the real one."""

    def tokens(self) -> Mapping[int, str]: ...


@dataclass(frozen=True, slots=True)
class SpeechPrompts:
    """The tokens of one model for speech."""

    start: int
    """`<|startoftranscript|>`."""
    no_timestamps: int
    """`<|notimestamps|>`."""
    transcribe: int | None
    """`<|transcribe|>`; None: the model knows English alone and has one task."""
    translate: int | None
    """`<|translate|>`, into English."""
    previous: int | None
    """`<|startofprev|>`, before the text that came before."""
    languages: Mapping[str, int]
    """The token of each language, by its code (ISO 639-1, or 639-2 for those without one); empty: English alone."""
    suppressed: Sequence[int]
    """Tokens that are never written, such as brackets and the special ones above."""
    special: frozenset[int]
    """The tokens that are no text."""
    max_length: int
    """The most tokens of prompt and text together."""
    most_samples: int = MOST_SAMPLES
    """The most samples that the encoder hears; it would leave out what comes behind them."""
    aligns: bool = False
    """Whether generation_config.json names the heads that say when words are spoken (`alignment_heads`)."""

    @classmethod
    def load(cls, model_dir: Path, tokenizer: TokenNames) -> SpeechPrompts | None:
        """The tokens of a model directory; None for a model of another kind. Raises ConfigError."""
        config = read_object(model_dir / "config.json")
        shape = read_encoder_decoder(model_dir, config)
        if shape is None or shape.source != "speech":
            return None
        path = model_dir / "generation_config.json"
        generation = read_object(path) if path.is_file() else config
        special = {text: token for token, text in tokenizer.tokens().items() if _SPECIAL.fullmatch(text)}
        languages = {found[1]: token for text, token in special.items() if (found := _LANGUAGE.fullmatch(text))}
        # Tokenizers of models for English alone may have the tokens of languages, too.
        if generation.get("is_multilingual") is False:
            languages = {}

        def required(text: str) -> int:
            if text not in special:
                raise ConfigError(f"{model_dir} has no token {text} in its tokenizer.json; copy it again")
            return special[text]

        if config.get("max_target_positions") is None:
            raise ConfigError(f"{model_dir} has no max_target_positions in its config.json; copy it again")
        return cls(
            start=required("<|startoftranscript|>"),
            no_timestamps=required("<|notimestamps|>"),
            transcribe=required("<|transcribe|>") if languages else None,
            translate=special.get("<|translate|>") if languages else None,
            previous=special.get("<|startofprev|>"),
            languages=languages,
            suppressed=_suppressed(generation, config, path),
            special=frozenset(special.values()),
            max_length=shape.most_tokens,
            aligns=bool(generation.get("alignment_heads")),
            most_samples=min(MOST_SAMPLES, shape.most_rows * SAMPLES_PER_ROW),
        )

    def prompt(self, language: str, *, translates: bool = False, before: Sequence[int] = ()) -> tuple[int, ...]:
        """The prompt for speech in a language. `before`: the tokens of text that came before, whose end is used."""
        # The text before has at most half of the room, as in OpenAI's Whisper.
        text = [token for token in before if token not in self.special][-(self.max_length // 2 - 1) :]
        task = self.translate if translates else self.transcribe
        ids = [self.start, self.languages.get(language), task, self.no_timestamps]
        if text and self.previous is not None:
            ids = [self.previous, *text, *ids]
        return tuple(token for token in ids if token is not None)


def _suppressed(generation: Mapping[str, Any], config: Mapping[str, Any], path: Path) -> tuple[int, ...]:
    found = generation.get("suppress_tokens") or ()
    if not isinstance(found, Sequence) or any(type(token) is not int for token in found):
        raise ConfigError(f"{path}: suppress_tokens must be token ids; copy it again")
    vocab_size = config.get("vocab_size")
    tokens = tuple(token for token in dict.fromkeys(found) if 0 <= token < (vocab_size or 0))
    if len(tokens) > MAX_LOGIT_BIAS:
        raise ConfigError(f"{path}: suppress_tokens has {len(tokens)} tokens; at most {MAX_LOGIT_BIAS} are taken")
    return tokens
