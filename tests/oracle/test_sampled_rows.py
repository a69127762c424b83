"""The last layer computes only rows that sample. Their logits have the bits that they have beside all rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.engine.batch import NewRequestData
from baton.messages.sampling import SamplingParams
from baton.runner.execution.input_batch import flatten
from baton.runner.execution.request_table import RequestState
from baton.runner.loading import load_runner
from baton.runner.model.random_model import write_random_model
from baton.runner.spec import TorchSpec
from tests.support.tiny_models import TINY_MODELS

_ROUTED_BY_SIGMOID: Mapping[str, Mapping[str, Any]] = {
    "dots1": {**TINY_MODELS["deepseek_v3"], "model_type": "dots1", "head_dim": 16},
    "glm4_moe": {**TINY_MODELS["deepseek_v3"], "model_type": "glm4_moe", "head_dim": 16},
}
"""Mixtures whose router computes an elementwise function, which torch rounds otherwise in a short last vector."""
MODELS = {**_ROUTED_BY_SIGMOID, **{name: TINY_MODELS[name] for name in ("llama", "mixtral", "qwen3_moe", "gpt_oss")}}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_rows_that_sample_have_the_bits_that_they_have_beside_all_rows(tmp_path: Path, name: str, dtype: str) -> None:
    write_random_model(tmp_path, MODELS[name], seed=5)
    runner = load_runner(TorchSpec(tmp_path, dtype=dtype, num_blocks=48))
    assert runner.model.bit_exact
    transformer = runner._transformer
    groups = len(runner.layout.groups)
    for num_requests in range(1, 10):
        shares = []
        for index in range(num_requests):
            blocks = range(1 + index * groups, 1 + (index + 1) * groups)
            state = RequestState(NewRequestData(f"r{index}", [5 + index, 7, 9], (), SamplingParams(), blocks, 0))
            shares.append(state.share(3))
        batch = flatten(shares, runner.layout, transformer.row_quantum)
        sampled = transformer.compute(batch)
        assert np.array_equal(sampled.view(np.uint32), transformer.compute(batch, batch.logits_rows).view(np.uint32))
