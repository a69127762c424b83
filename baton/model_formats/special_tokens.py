"""The named special tokens of a tokenizer, as transformers finds them in a model directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baton.model_formats.json_files import read_object

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
