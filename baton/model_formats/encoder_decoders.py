"""Models with an encoder and a decoder: what a model directory says of both, and how an input lies in a prompt.

The input of the encoder (a text, or speech) comes first in the prompt, in spans of placeholders, and the decoder's
tokens follow. At the positions of the input the KV cache holds the keys and values of the decoder's cross-attention,
which are computed once; at the others those of its self-attention. So both are allocated, shared, moved and handed over
as the blocks of one sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from baton.errors import ConfigError
from baton.model_formats.files import read_json, read_object
from baton.model_formats.limits import LONGEST_CONTEXT

ALIGNMENT = 64
"""The decoder's tokens begin at a multiple of this many positions, and so with a block: block sizes divide it."""

_LEAST_TOKENS = 8
"""The fewest tokens for which a decoder may have room."""

Source = Literal["text", "speech"]


@dataclass(frozen=True, slots=True)
class EncoderDecoder:
    """What a configuration says of a model with an encoder and a decoder."""

    source: Source
    """What its encoder takes."""
    most_rows: int
    """The most rows that the encoder makes of an input; of speech it makes as many always."""
    most_tokens: int
    """The most tokens of the decoder, those with which it begins included."""
    start: tuple[int, ...]
    """The tokens with which the decoder begins, where a request does not say."""

    @property
    def max_model_len(self) -> int:
        """The most positions of a prompt and its output."""
        return aligned(self.most_rows) + self.most_tokens

    def num_left(self, num_prompt_tokens: int, max_model_len: int) -> int:
        """How many tokens the decoder can have behind a client's prompt, where so many positions are served; below 1:
        the prompt does not fit.

        The prompt is the encoder's for a text, and the decoder's for speech, where 0 stands for `start`.
        """
        is_text = self.source == "text"
        num_rows = num_prompt_tokens if is_text else self.most_rows
        num_tokens = len(self.start) if is_text else num_prompt_tokens or len(self.start)
        return min(self.most_tokens, max_model_len - aligned(num_rows)) - num_tokens

    def longest_prompt(self, num_output_tokens: int, max_model_len: int) -> int:
        """The longest of a client's prompts beside an output of so many tokens; below 1: there is none."""
        if self.source == "text":
            return min(self.most_rows, (max_model_len - len(self.start) - num_output_tokens) // ALIGNMENT * ALIGNMENT)
        return min(self.most_tokens, max_model_len - aligned(self.most_rows)) - num_output_tokens


_BART = EncoderDecoder("text", 1024, 1024, (2,))
_T5 = EncoderDecoder("text", 512, 512, (0,))
_DEFAULTS: Mapping[str, EncoderDecoder] = {
    "bart": _BART,
    "mbart": _BART,
    "t5": _T5,
    "mt5": _T5,
    "whisper": EncoderDecoder("speech", 1500, 448, (50257,)),
}
"""By `model_type`, what transformers takes where a config.json says nothing. Positions of T5 are relative: 512 is the
length with which it was trained."""


def aligned(num_rows: int) -> int:
    """The position of the decoder's first token behind an input of so many rows."""
    return -(-num_rows // ALIGNMENT) * ALIGNMENT


def has_encoder_and_decoder(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a model with an encoder and a decoder which Baton serves."""
    model_type = config.get("model_type")
    return (
        isinstance(model_type, str) and model_type in _DEFAULTS and config.get("is_encoder_decoder", True) is not False
    )


def is_encoder_decoder_directory(directory: Path) -> bool:
    """Whether a directory has such a model; no for one that can't be read, which its loader refuses."""
    try:
        return has_encoder_and_decoder(read_object(directory / "config.json"))
    except ConfigError:
        return False


def encoder_decoder(directory: Path) -> EncoderDecoder | None:
    """What a model directory says of its encoder and decoder; None if it has not both. Raises ConfigError."""
    return read_encoder_decoder(directory, read_object(directory / "config.json"))


def read_encoder_decoder(directory: Path, config: Mapping[str, Any]) -> EncoderDecoder | None:
    """The same of a config.json that has been read, with the directory's generation_config.json. Raises ConfigError."""
    if not has_encoder_and_decoder(config):
        return None

    def number(default: int, *names: str, least: int = _LEAST_TOKENS) -> int:
        name = next((name for name in names if config.get(name) is not None), "")
        value = config[name] if name else default
        if type(value) is not int or not least <= value <= LONGEST_CONTEXT:
            raise ConfigError(f"{directory} has {name} {value!r:.40} in its config.json; copy it again")
        return value

    default = _DEFAULTS[config["model_type"]]
    if default.source == "speech":
        most_rows = number(default.most_rows, "max_source_positions", least=1)
        most_tokens = number(default.most_tokens, "max_target_positions")
    else:
        names = ("n_positions", "max_position_embeddings") if default is _T5 else ("max_position_embeddings",)
        most_rows = most_tokens = number(default.most_rows, *names)
    return EncoderDecoder(default.source, most_rows, most_tokens, _start(directory, config, default.start))


def _start(directory: Path, config: Mapping[str, Any], default: tuple[int, ...]) -> tuple[int, ...]:
    """The tokens with which the decoder begins. Raises ConfigError."""
    path = directory / "generation_config.json"
    generation = read_json(path) if path.is_file() else None
    # transformers saves these numbers there, and in older versions in config.json.
    files = [generation, config] if isinstance(generation, dict) else [config]

    def given(name: str) -> Any:
        return next((file[name] for file in files if file.get(name) is not None), None)

    first, forced = given("decoder_start_token_id"), given("forced_bos_token_id")
    start = default if first is None else (first,)
    start = start if forced is None else (*start, forced)
    if start == default:
        return start
    vocab_size = config.get("vocab_size")
    for token in start:
        if type(token) is not int or token < 0 or (type(vocab_size) is int and token >= vocab_size):
            raise ConfigError(
                f"{directory} begins its decoder with {token!r:.40}, no token id, in its config.json or "
                "generation_config.json; copy it again"
            )
    return start
