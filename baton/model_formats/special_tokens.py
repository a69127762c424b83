"""The named special tokens of a tokenizer, as transformers finds them, and the tokens that end an answer.

`generate()` of transformers ends at the tokens of generation_config.json, or of config.json where that file names none.
To these comes the tokenizer's own `eos_token`, as in vLLM and llama.cpp: a model tuned for chats often ends its turns
with it, and its other files were left as they were.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baton.errors import ConfigError
from baton.model_formats.files import read_object

CONFIG_FILE = "tokenizer_config.json"


def find_special_tokens(model_dir: Path) -> Mapping[str, str]:
    """The texts of the special tokens of a model that have names (such as `eos_token`), by these names.

    They are in tokenizer_config.json. Where that has no `added_tokens_decoder`, as files of older versions have not,
    special_tokens_map.json is read, too, and comes first. Raises ConfigError.
    """
    config = _read(model_dir / CONFIG_FILE)
    if "added_tokens_decoder" not in config:
        config = {**config, **_read(model_dir / "special_tokens_map.json")}
    further = config.get("extra_special_tokens")
    named = {**config, **further} if isinstance(further, dict) else config
    tokens = {}
    for name, value in named.items():
        text = value.get("content") if isinstance(value, dict) else value
        is_name = name.endswith("_token") or (isinstance(further, dict) and name in further)
        if is_name and isinstance(text, str):
            tokens[name] = text
    return tokens


def _read(path: Path) -> Mapping[str, Any]:
    return read_object(path) if path.is_file() else {}


def read_end_tokens(model_dir: Path, config: Mapping[str, Any]) -> frozenset[int]:
    """The ids of the tokens after which a model's answer is whole; `config` is what config.json holds.

    Raises ConfigError for ids that are no numbers, and for files that can't be read.
    """
    text_config = config.get("text_config")
    for source in (
        _read(model_dir / "generation_config.json"),
        config,
        text_config if isinstance(text_config, dict) else {},
    ):
        if source.get("eos_token_id") is not None:
            return _ids(model_dir, source["eos_token_id"]) | _of_tokenizer(model_dir)
    return _of_tokenizer(model_dir)


def _ids(model_dir: Path, value: Any) -> frozenset[int]:
    token_ids = value if isinstance(value, list) else [value]
    if not all(type(token_id) is int for token_id in token_ids):
        raise ConfigError(
            f"{model_dir} has eos_token_id {value!r:.80}, which is not a number or a list of numbers; copy it again"
        )
    return frozenset(token_ids)


def _of_tokenizer(model_dir: Path) -> frozenset[int]:
    """The id of the tokenizer's `eos_token`, if it has one."""
    text = find_special_tokens(model_dir).get("eos_token")
    return frozenset() if text is None else _id_of(text, _read(model_dir / "tokenizer.json"))


def _id_of(text: str, tokenizer: Mapping[str, Any]) -> frozenset[int]:
    """The id of a token in the content of tokenizer.json; none if it is not there."""
    added = tokenizer.get("added_tokens")
    for token in added if isinstance(added, list) else ():
        if isinstance(token, dict) and token.get("content") == text and type(token.get("id")) is int:
            return frozenset({token["id"]})
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    token_id = vocabulary.get(text) if isinstance(vocabulary, dict) else None
    return frozenset({token_id} if type(token_id) is int else ())
