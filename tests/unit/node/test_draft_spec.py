"""A draft model must have the tokens of the model that it drafts for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import baton
from baton.errors import ConfigError
from baton.messages.speculation import SpeculationConfig
from baton.node.runner_spec import draft_spec
from baton.runner import DraftSpec

MODEL = Path(baton.__file__).parent / "demo_model"


def drafting_with(directory: Path, quantization: str = "off") -> SpeculationConfig:
    return SpeculationConfig.from_json(json.dumps({"model": str(directory), "quantization": quantization}))


def test_only_a_draft_model_is_loaded() -> None:
    assert draft_spec(None, MODEL) is None
    assert draft_spec(SpeculationConfig("ngram"), MODEL) is None
    assert draft_spec(drafting_with(MODEL), MODEL) == DraftSpec(MODEL, 16)
    assert draft_spec(drafting_with(MODEL, "int4"), MODEL) == DraftSpec(MODEL, 16, "int4")


@pytest.mark.parametrize("change", ["other text", "one more"])
def test_a_model_with_other_tokens_is_refused(change: str, tmp_path: Path) -> None:
    shutil.copytree(MODEL, tmp_path / "other")
    file = tmp_path / "other" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    added = {"id": 0, "content": "", "special": True} | dict.fromkeys(
        ("single_word", "lstrip", "rstrip", "normalized"), False
    )
    vocabulary = tokenizer["model"]["vocab"]
    highest = max([*vocabulary.values(), *(entry["id"] for entry in tokenizer["added_tokens"])])
    if change == "other text":
        entry = tokenizer["added_tokens"][0]
        vocabulary.pop(entry["content"], None)
        entry["content"] = "<|changed|>"
    else:
        tokenizer["added_tokens"].append(added | {"id": highest + 1, "content": "<|new|>"})
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(
        ConfigError, match=r"has other tokens than the model .*token \d+ is .* there and .* here.*same tokenizer"
    ):
        draft_spec(drafting_with(tmp_path / "other"), MODEL)


def test_a_missing_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        draft_spec(drafting_with(tmp_path / "nothing"), MODEL)
