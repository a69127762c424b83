"""An encoder that was loaded without the language model makes the same rows as the whole model, bit by bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from baton.config.cluster import bundled_model_dir
from baton.errors import ConfigError
from baton.messages.spans import EncoderContent
from baton.runner.encoder_alone import load_encoder_alone
from baton.runner.loading import load_runner
from baton.runner.spec import TorchSpec
from tests.support.image_models import IMAGE_MODELS, random_image, write_image_model

ROWS = {"idefics3": 28, "smolvlm": 28, "qwen2_vl": 24, "qwen2_5_vl": 24}
"""Rows that each model has of the image."""


@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_rows_of_an_encoder_alone_are_those_of_the_whole_model(name: str, tmp_path: Path) -> None:
    write_image_model(tmp_path, name)
    content = EncoderContent.of(random_image(7, 90, 60))
    for quantization in (None, "int8"):
        spec = TorchSpec(tmp_path, dtype="float32", num_blocks=160, quantization=quantization)
        # How the language model keeps its KV decides nothing here.
        whole, alone = load_runner(replace(spec, cache_dtype="int8")), load_encoder_alone(spec)
        # Nodes compare these three before they take each other's rows.
        for field in ("fingerprint", "dtype", "row_numerics"):
            assert getattr(alone.model, field) == getattr(whole.model, field)
        assert alone.model.weight_bytes < whole.model.weight_bytes * 0.6
        made = []
        for runner in (whole, alone):
            runner.encoder.encode(content, ROWS[name])
            made.append(bytes(runner.encoder.bytes_of(content.digest) or b""))
        assert made[0] == made[1] != b""


def test_a_model_of_texts_alone_is_refused() -> None:
    with pytest.raises(ConfigError, match="takes neither images nor speech"):
        load_encoder_alone(TorchSpec(bundled_model_dir(), num_blocks=8))
