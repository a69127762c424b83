"""What a model directory has beside its weights, from the header of a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from baton.model_formats.gguf.architectures import configuration
from baton.model_formats.gguf.container import open_gguf
from baton.model_formats.gguf.facts import Facts
from baton.model_formats.gguf.tokenizer import generation_config_json, tokenizer_config_json, tokenizer_json


def directory_files(facts: Facts) -> dict[str, dict[str, Any]]:
    """The contents of the JSON files by their names. Raises ConfigError for a header that does not give them."""
    return {
        "config.json": configuration(facts),
        "generation_config.json": generation_config_json(facts),
        "tokenizer_config.json": tokenizer_config_json(facts),
        "tokenizer.json": tokenizer_json(facts),
    }


def check_header(source: Path) -> None:
    """Read all of a file but its weights; raises ConfigError for what is wrong with it. Takes half a second."""
    with open_gguf(source) as file:
        directory_files(Facts(file))
