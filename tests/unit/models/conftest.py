"""What tests of several modules of `baton.models` use."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.gguf_models import random_module, write_module


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    module = random_module("llama", num_hidden_layers=1)
    return write_module(tmp_path_factory.mktemp("gguf") / "tiny model.Q8_0.gguf", module, "Q8_0")
