"""The sampling parameters that a model directory suggests are read, bounded and refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton.errors import ConfigError
from baton.messages.sampling import SamplingDefaults
from baton.text.model_files import read_sampling_defaults


def read(directory: Path, **fields: Any) -> SamplingDefaults:
    (directory / "generation_config.json").write_text(json.dumps(fields))
    return read_sampling_defaults(directory)


def test_the_five_fields_are_read_and_no_others(tmp_path: Path) -> None:
    assert read_sampling_defaults(tmp_path) == SamplingDefaults(), "without a file"
    found = read(
        tmp_path,
        temperature=0.7,
        top_p=0.8,
        top_k=20,
        min_p=0.1,
        repetition_penalty=1.05,
        do_sample=True,
        eos_token_id=1,
    )
    assert found == SamplingDefaults(0.7, 0.8, 20, 0.1, 1.05)
    assert found.given()["top_k"] == 20
    assert read(tmp_path, temperature=None, top_k=0) == SamplingDefaults(top_k=-1), "transformers writes 0 for off"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 2.5),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_k", 1.5),
        ("top_k", -2),
        ("min_p", True),
        ("repetition_penalty", float("nan")),
    ],
)
def test_a_number_that_no_request_could_have_is_refused(tmp_path: Path, field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"generation_config.json: {field} must be .* --generation-config none"):
        read(tmp_path, **{field: value})
