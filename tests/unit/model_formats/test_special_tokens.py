"""Which tokens end an answer: those of generate(), and the tokenizer's own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers

import baton
from baton.errors import ConfigError
from baton.model_formats.special_tokens import read_end_tokens
from baton.runner.model.checkpoint import open_checkpoint
from baton.text.model_files import read_model_files

DEMO_MODEL = Path(baton.__file__).parent / "demo_model"
LLAMA = {"model_type": "llama", "eos_token_id": [3, 7]}
IDEFICS3 = {"model_type": "idefics3", "text_config": {"model_type": "llama", "eos_token_id": 5}}


def write(directory: Path, **files: Any) -> Path:
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


def ends_of_generate(directory: Path) -> set[int]:
    """The tokens at which generate() of transformers ends."""
    config = transformers.AutoConfig.from_pretrained(directory)
    if (directory / "generation_config.json").is_file():
        found = transformers.GenerationConfig.from_pretrained(directory).eos_token_id
    else:
        found = transformers.GenerationConfig.from_model_config(config).eos_token_id
    return set(found if isinstance(found, list) else [found])


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"config": LLAMA}, {3, 7}),
        ({"config": LLAMA, "generation_config": {"eos_token_id": 9}}, {9}),
        ({"config": IDEFICS3}, {5}),
        ({"config": {**IDEFICS3, "eos_token_id": 6}}, {6}),
        ({"config": IDEFICS3, "generation_config": {"eos_token_id": [8, 9]}}, {8, 9}),
    ],
)
def test_answers_end_where_generate_ends(tmp_path: Path, files: dict[str, Any], expected: set[int]) -> None:
    write(tmp_path, **files)
    assert read_end_tokens(tmp_path, files["config"]) == expected == ends_of_generate(tmp_path)


@pytest.mark.parametrize("place", ["tokenizer_config", "special_tokens_map"])
@pytest.mark.parametrize("eos", ["<end>", {"content": "<end>", "lstrip": False}])
@pytest.mark.parametrize(
    "tokenizer", [{"added_tokens": [{"id": 4, "content": "<end>"}]}, {"model": {"vocab": {"<end>": 4, "a": 5}}}]
)
def test_the_tokenizers_own_end_is_one_more(tmp_path: Path, place: str, eos: Any, tokenizer: dict[str, Any]) -> None:
    write(tmp_path, **{place: {"eos_token": eos}}, tokenizer=tokenizer)
    assert read_end_tokens(tmp_path, LLAMA) == {3, 4, 7}
    assert read_end_tokens(tmp_path, {}) == {4}


@pytest.mark.parametrize(("more", "expected"), [({}, 2), ({"added_tokens_decoder": {}}, 1)])
def test_the_end_is_the_one_that_chat_templates_know(tmp_path: Path, more: dict[str, Any], expected: int) -> None:
    """As in transformers, special_tokens_map.json comes first where the other file is of an older version."""
    config, tokenizer = {"eos_token": "<new>", **more}, {"model": {"vocab": {"<new>": 1, "<map>": 2}}}
    write(tmp_path, tokenizer_config=config, special_tokens_map={"eos_token": "<map>"}, tokenizer=tokenizer)
    assert read_end_tokens(tmp_path, {}) == {expected}


@pytest.mark.parametrize("files", [{}, {"tokenizer_config": {"eos_token": "<absent>"}, "tokenizer": {"model": {}}}])
def test_a_model_may_name_no_end(tmp_path: Path, files: dict[str, Any]) -> None:
    assert read_end_tokens(write(tmp_path, **files), {"text_config": None}) == frozenset()


@pytest.mark.parametrize("wrong", ["</s>", True, [2, None], {"a": 1}])
def test_an_end_that_is_no_number_is_refused(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"has eos_token_id .*, which is not a number or a list of numbers"):
        read_end_tokens(tmp_path, {"eos_token_id": wrong})


def test_routers_and_nodes_know_the_same_ends(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, model)
    write(model, generation_config={"eos_token_id": [7]})
    assert read_model_files(model).eos_token_ids == open_checkpoint(model).eos_token_ids == {1, 7}
