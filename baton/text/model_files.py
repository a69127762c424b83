"""The facts about a model in its directory's JSON files, for processes without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.errors import ConfigError
from baton.messages.sampling import NUMBER_RANGES, SamplingDefaults
from baton.model_formats.encoder_decoders import EncoderDecoder, read_encoder_decoder
from baton.model_formats.files import read_object
from baton.model_formats.limits import (
    CONTEXT_WITHOUT_POSITIONS,
    LARGEST_VOCABULARY,
    LONGEST_CONTEXT,
    TYPES_WITHOUT_POSITIONS,
    longest_context,
)
from baton.model_formats.special_tokens import read_end_tokens


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Facts from the JSON files of a model directory."""

    vocab_size: int
    max_model_len: int
    """The most tokens of a sequence."""
    eos_token_ids: frozenset[int]
    source: EncoderDecoder | None = None
    """None: the model has no encoder beside its decoder."""


def read_model_files(model_dir: Path) -> ModelFiles:
    """Read the files; raises ConfigError when one is invalid or lacks a needed field."""
    config = _read_json(model_dir / "config.json", model_dir)
    text = config.get("text_config") or config
    # A part may lack what transformers has by default, which nodes know: until they have said it, nothing is refused.
    most_tokens, most_words = (LONGEST_CONTEXT, LARGEST_VOCABULARY) if text is not config else (None, None)
    if config.get("model_type") in TYPES_WITHOUT_POSITIONS:
        most_tokens = CONTEXT_WITHOUT_POSITIONS
    source = read_encoder_decoder(model_dir, config)
    longest = ("max_position_embeddings", "n_positions", "n_ctx", "model_max_length")
    return ModelFiles(
        vocab_size=_positive(text, ("vocab_size",), model_dir, most_words),
        max_model_len=(
            longest_context(model_dir, config, _positive(text, longest, model_dir, most_tokens))
            if source is None
            else source.max_model_len
        ),
        eos_token_ids=read_end_tokens(model_dir, config),
        source=source,
    )


def read_sampling_defaults(model_dir: Path) -> SamplingDefaults:
    """The model's own sampling parameters, from its generation_config.json; none where there is no such file.

    Raises ConfigError for a number that a request could not have. top_k 0 means off, as transformers has it.
    """
    path = model_dir / "generation_config.json"
    if not path.is_file():
        return SamplingDefaults()
    config = _read_json(path, model_dir)
    numbers = {name: config[name] for name in SamplingDefaults.__slots__ if config.get(name) is not None}
    for name, number in numbers.items():
        allowed = NUMBER_RANGES.get(name)
        if isinstance(number, bool) or not isinstance(number, int | float):
            problem = "a number"
        elif allowed is not None:
            problem = "" if number in allowed else f"in {allowed}"
        else:
            problem = "" if isinstance(number, int) and number >= -1 else "-1, 0 or more, and a whole number"
        if problem:
            raise ConfigError(
                f"{path}: {name} must be {problem}, not {number!r:.80}; correct it, or set --generation-config none"
            )
    if numbers.get("top_k") == 0:
        numbers["top_k"] = -1
    return SamplingDefaults(**numbers)


def _read_json(path: Path, model_dir: Path) -> Mapping[str, Any]:
    if not model_dir.is_dir():
        raise ConfigError(f"model directory {model_dir} does not exist; name a directory with config.json")
    if not path.is_file():
        raise ConfigError(f"{model_dir} has no {path.name}; is it a model directory?")
    return read_object(path)


def _positive(config: Mapping[str, Any], names: tuple[str, ...], model_dir: Path, default: int | None) -> int:
    """The number of the first of these names. `default`: for a configuration that has none of them; None: it must."""
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and value > 0:
            return value
    if default is not None and not any(name in config for name in names):
        return default
    raise ConfigError(f"{model_dir / 'config.json'} has no {names[0]}")
