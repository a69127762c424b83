"""From block tables to attention on a GPU: which steps have sharers, with and without graphs, and the same tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.messages.sampling import SamplingParams
from baton.runner.backends.attention_call import AttentionCall
from baton.runner.backends.attention_work.dealing import Int32Array
from baton.runner.backends.cuda import shared_splits
from baton.runner.model.random_model import write_random_model
from baton.runner.model_runner import TorchModelRunner
from tests.doubles.fake_attention import fake_paged_attention
from tests.doubles.fake_graph import FakeRecorder
from tests.support.load_with import load_as_on_a_gpu
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


@pytest.fixture(autouse=True, scope="module")
def _short_splits() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(shared_splits, "SPLIT", SPLIT)
        yield


Model = Callable[[str], tuple[Path, dict[str, list[int]]]]


def sharing_of(call: AttentionCall) -> Int32Array | None:
    return call.work.sharing if call.work is not None and call.shares else None


class CheckingAttention:
    """A fake kernel that checks what it is told of sharers against the tables on the device."""

    def __init__(self) -> None:
        self.sharers: list[int] = []
        """For each call with sharers how many of its sequences have any split in common."""

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        with torch._C.DisableTorchFunction():
            if (sharing := sharing_of(call)) is not None:
                assert call.how.window is None
                self._check(sharing, call.seq_lens, call.block_tables, call.cache.block_size)
        return fake_paged_attention(call)

    def _check(self, sharing: Int32Array, lengths: torch.Tensor, tables: torch.Tensor, block_size: int) -> None:
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


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The directory of an architecture's tiny model, and the tokens of its prompts, computed once."""

    @cache
    def written(architecture: str) -> tuple[Path, dict[str, list[int]]]:
        directory = tmp_path_factory.mktemp(architecture)
        write_random_model(directory, TINY_MODELS[architecture], 0)
        return directory, tokens_of(load_as_on_a_gpu(directory))

    return written


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
def test_steps_tell_the_kernel_who_shares(model: Model, architecture: str, record: type[FakeRecorder] | None) -> None:
    (directory, expected), attend = model(architecture), CheckingAttention()
    runner = load_as_on_a_gpu(directory, attend, record and record())
    attend.sharers.clear()
    assert tokens_of(runner) == expected
    if architecture == "mistral":  # all of its layers have a window
        assert not attend.sharers
        return
    # First three share, and at last nobody: one of two has ended.
    assert set(attend.sharers) == {2, 3}


def test_prompts_are_computed_without_sharers(model: Model) -> None:
    (directory, _), attend = model("llama"), CheckingAttention()
    runner = load_as_on_a_gpu(directory, attend)
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


def other_bits(call: AttentionCall) -> torch.Tensor:
    """A fake kernel that rounds differently where rows share."""
    return fake_paged_attention(call) * (1.0 if sharing_of(call) is None else 1.0 + 1e-6)


def no_sharing(call: AttentionCall) -> torch.Tensor:
    if sharing_of(call) is not None:
        raise NotImplementedError("out of shared memory")
    return fake_paged_attention(call)


@pytest.mark.parametrize(
    ("attend", "reason"),
    [(other_bits, "a row gets other bits"), (no_sharing, "NotImplementedError (out of shared memory)")],
    ids=["other bits", "fails"],
)
def test_a_kernel_that_can_not_share_is_used_without(
    model: Model, attend: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    directory, expected = model("llama")
    with caplog.at_level(logging.WARNING):
        runner = load_as_on_a_gpu(directory, attend)
    assert runner.model.bit_exact
    assert reason in caplog.text
    assert tokens_of(runner) == expected
