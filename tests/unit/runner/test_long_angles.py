"""Which rotary angles depend on a length is found by asking the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from baton.engine.scheduler_config import LongSequences
from baton.runner.model.attention import UnsupportedAttention
from baton.runner.model.long_angles import refuse_long_angles, replace_rotary
from tests.support.listed_types import LISTED_TYPES
from tests.support.rotary_models import MOST_SHORT, PHI3_LONGROPE, ROPE_TYPES
from tests.support.tiny_models import TINY_MODELS

LONGEST = 512
_LONGROPE = ROPE_TYPES["longrope"]
PHIMOE = {
    "model_type": "phimoe",
    "rope_parameters": {**_LONGROPE["rope_parameters"], "short_mscale": 1.0, "long_mscale": 1.2},
}
"""Its rotary module may be called without positions."""
_FACTORS = {"short_factor": [1.0] * 8, "long_factor": [1.0 + place for place in range(8)]}
COMPLEX = {
    **LISTED_TYPES["llama4_text"],
    "model_type": "llama4_text",
    "rope_parameters": {**_LONGROPE["rope_parameters"], **_FACTORS},
}


def module_of(config: Mapping[str, Any]) -> Any:
    values = dict(config)
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[values.pop("model_type")](**values))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (PHI3_LONGROPE, LongSequences(MOST_SHORT, starts_over=True)),
        (_LONGROPE, LongSequences(MOST_SHORT, starts_over=False)),
        ({**_LONGROPE, **PHIMOE}, LongSequences(MOST_SHORT, starts_over=True)),
        (ROPE_TYPES["dynamic"], None),
        (TINY_MODELS["gemma3_text"], None),
        (TINY_MODELS["gpt2"], None),
    ],
    ids=["phi3", "longrope", "phimoe", "dynamic", "gemma3", "gpt2"],
)
def test_the_border_and_what_happens_there_are_found(config: Mapping[str, Any], expected: LongSequences | None) -> None:
    assert replace_rotary(module_of(config), LONGEST) == expected


@pytest.mark.parametrize("config", [_LONGROPE, COMPLEX], ids=["cosines and sines", "complex"])
def test_each_row_has_the_angles_of_its_own_sequence(config: Mapping[str, Any]) -> None:
    module, plain = module_of(config), module_of(config).model.rotary_emb
    replace_rotary(module, LONGEST)
    like, at = torch.zeros(1), torch.arange(MOST_SHORT)[None]
    rotary = module.model.rotary_emb
    rotary.is_long = torch.arange(MOST_SHORT) % 2 == 1
    short, long = plain(like, at), plain(like, torch.cat((at, at + MOST_SHORT), dim=1))
    every = rotary(like, at), short, long
    parts = [given if isinstance(given, tuple) else (given,) for given in every]
    for found, of_short, of_long in zip(*parts, strict=True):
        assert torch.equal(found[0, ::2], of_short[0, ::2])
        assert torch.equal(found[0, 1::2], of_long[0, 1:MOST_SHORT:2])
        assert not torch.equal(of_short[0, 1::2], of_long[0, 1:MOST_SHORT:2])


def test_angles_that_change_with_every_length_are_refused() -> None:
    with pytest.raises(UnsupportedAttention, match="change with every length of a sequence from 513 tokens on"):
        replace_rotary(module_of(ROPE_TYPES["dynamic"]), 2 * LONGEST)


def test_an_encoder_whose_angles_depend_on_a_length_is_refused() -> None:
    refuse_long_angles(module_of(_LONGROPE), MOST_SHORT)
    with pytest.raises(UnsupportedAttention, match="behind 64 tokens"):
        refuse_long_angles(module_of(_LONGROPE), LONGEST)
