"""From block tables to attention on a GPU: which steps have sharers, with and without graphs, and the same tokens."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.messages.sampling import SamplingParams
from baton.runner.backends.cuda import shared_splits
from baton.runner.backends.cuda.cuda_operations import CudaOperations
from baton.runner.backends.device import CPU
from baton.runner.loading import load_runner
from baton.runner.model import decode_graphs
from baton.runner.model.random_model import write_random_model
from baton.runner.model_runner import TorchModelRunner
from baton.runner.spec import TorchSpec
from tests.doubles.fake_attention import fake_paged_attention
from tests.doubles.fake_graph import FakeRecorder
from tests.support.runner_driver import RunnerDriver
from tests.support.tiny_models import TINY_MODELS

SPLIT = 32
PREFIX = [(7 * place + 1) % 250 for place in range(2 * SPLIT)]
PROMPTS = {
    "whole": [*PREFIX, 1, 2, 3],
    "lone": [(11 * place + 5) % 250 for place in range(2 * SPLIT)],
    "half": [*PREFIX[:SPLIT], 4, 5],
    "again": [*PREFIX, 6],
    "short": [8],
}
TOKENS = {"whole": 5, "lone": 9, "half": 4, "again": 8, "short": 9}


@pytest.fixture(autouse=True)
def _short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_splits, "SPLIT", SPLIT)
    monkeypatch.setattr(decode_graphs, "SPLIT", SPLIT)


class CheckingAttention:
    """A fake kernel that checks what it is told of sharers against the tables on the device."""

    def __init__(self) -> None:
        self.sharers: list[int] = []
        """For each call with sharers how many of its sequences have any split in common."""

    def __call__(
        self,
        query: torch.Tensor,
        cache: Any,
        query_start: torch.Tensor,
        seq_lens: torch.Tensor,
        block_tables: torch.Tensor,
        *,
        sharing: torch.Tensor | None = None,
        **features: Any,
    ) -> torch.Tensor:
        with torch._C.DisableTorchFunction():
            if sharing is not None:
                assert features["window"] is None
                self._check(sharing, seq_lens, block_tables, cache.block_size)
        return fake_paged_attention(query, cache, query_start, seq_lens, block_tables, **features)

    def _check(self, sharing: torch.Tensor, lengths: torch.Tensor, tables: torch.Tensor, block_size: int) -> None:
        order, *splits = sharing.tolist()
        assert sorted(order) == list(range(lengths.numel()))
        found = set()
        for split, firsts in enumerate(splits):
            stop = (split + 1) * SPLIT
            for place, first in enumerate(firsts):
                one, other = order[place], order[first]
                if one != other:
                    found |= {one, other}
                    assert min(lengths[one], lengths[other]) >= stop
                    blocks = -(-stop // block_size)
                    assert torch.equal(tables[one, :blocks], tables[other, :blocks])
        self.sharers.append(len(found))


def runner_of(directory: Path, attend: Any, record: Any = None) -> TorchModelRunner:
    return load_runner(
        TorchSpec(directory, dtype="float32", num_blocks=64), operations=CudaOperations(CPU, attend, record)
    )


def tokens_of(runner: TorchModelRunner) -> dict[str, list[int]]:
    """All prompts together; those that begin alike have the same blocks there."""
    driver = RunnerDriver(runner)
    groups, size = len(runner.layout.groups), runner.layout.block_size
    for name, prompt in PROMPTS.items():
        shared = {"half": SPLIT, "again": 2 * SPLIT}.get(name, 0)
        blocks = driver.requests["whole"].block_ids[: shared // size * groups] if shared else ()
        params = SamplingParams(temperature=0.0, max_tokens=TOKENS[name])
        driver.add(name, prompt, params, num_computed=shared, shared=blocks)
        driver.step({name: len(prompt) - shared})
    driver.finish()
    return {name: request.output for name, request in driver.requests.items()}


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "mistral"])
@pytest.mark.parametrize("record", [None, FakeRecorder], ids=["kernel by kernel", "graphs"])
def test_steps_tell_the_kernel_who_shares(tmp_path: Path, architecture: str, record: type[FakeRecorder] | None) -> None:
    write_random_model(tmp_path, TINY_MODELS[architecture], 0)
    attend = CheckingAttention()
    runner = runner_of(tmp_path, attend, record and record())
    attend.sharers.clear()
    assert tokens_of(runner) == tokens_of(runner_of(tmp_path, fake_paged_attention))
    if architecture == "mistral":  # all of its layers have a window
        assert not attend.sharers
        return
    # First three share, and at last nobody: one of two has ended.
    assert set(attend.sharers) == {2, 3}
    graphs = runner._transformer.decode_graphs
    if graphs is not None and architecture == "llama":
        assert graphs.sizes_with_sharers == [4, 8]
        assert graphs.sizes == [1, 2, 4, 8]


def test_prompts_are_computed_without_sharers(tmp_path: Path) -> None:
    write_random_model(tmp_path, TINY_MODELS["llama"], 0)
    attend = CheckingAttention()
    runner = runner_of(tmp_path, attend)
    driver = RunnerDriver(runner)
    whole = driver.add("whole", PROMPTS["whole"])
    driver.step({"whole": len(PROMPTS["whole"])})
    for name in ("again", "another"):
        driver.add(name, [*PREFIX, 6, 7], num_computed=2 * SPLIT, shared=whole.block_ids[: 2 * SPLIT // 16])
    attend.sharers.clear()
    driver.step({"whole": 1, "again": 2, "another": 2})
    assert not attend.sharers
    driver.step({"whole": 1, "again": 1, "another": 1})
    assert set(attend.sharers) == {3}


def other_bits(*arguments: Any, sharing: Any = None, **keywords: Any) -> torch.Tensor:
    """A fake kernel that rounds differently where rows share."""
    return fake_paged_attention(*arguments, **keywords) * (1.0 if sharing is None else 1.0 + 1e-6)


def no_sharing(*arguments: Any, sharing: Any = None, **keywords: Any) -> torch.Tensor:
    if sharing is not None:
        raise NotImplementedError("out of shared memory")
    return fake_paged_attention(*arguments, **keywords)


@pytest.mark.parametrize(
    ("attend", "reason"),
    [(other_bits, "a row gets other bits"), (no_sharing, "NotImplementedError: out of shared memory")],
    ids=["other bits", "fails"],
)
def test_a_kernel_that_can_not_share_is_used_without(
    tmp_path: Path, attend: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    write_random_model(tmp_path, TINY_MODELS["llama"], 0)
    with caplog.at_level(logging.WARNING):
        runner = runner_of(tmp_path, attend)
    assert runner.model.bit_exact
    assert reason in caplog.text
    assert tokens_of(runner) == tokens_of(runner_of(tmp_path, fake_paged_attention))
