"""Without the C kernels a model runs on torch's products, bit-exact or with a reason why not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from baton.messages.node_model import Capability
from baton.runner.backends.cpu import kernels
from baton.runner.backends.cpu.kernels import KernelInfo
from baton.runner.backends.low_rank import RowAdapters
from baton.runner.backends.torch_operations import ROWS_PER_CALL, TorchOperations, TorchStack, TorchWeight
from tests.support.load_with import load_tiny
from tests.support.runner_driver import RunnerDriver

PROMPT = [(position * 37 + 5) % 256 for position in range(30)]


@pytest.mark.parametrize("name", ["qwen2", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_without_kernels_the_tokens_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    with_kernels = load_tiny(tmp_path, name, seed=1)
    absent = KernelInfo(isa=None, isas=(), numerics="", threads=False, reason="not built")
    monkeypatch.setattr(kernels, "available", lambda: absent)
    without = load_tiny(tmp_path, name, seed=1)
    assert without.model.bit_exact
    assert without.model.numerics.startswith("torch-4-rows-8-threads-1/")
    assert without.model.numerics != with_kernels.model.numerics
    outputs = []
    for runner in (with_kernels, without):
        request = (driver := RunnerDriver(runner)).add("one", PROMPT)
        driver.finish(chunk=13)
        outputs.append(request.output)
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) == 16


class Careless(TorchOperations):
    """Products that depend on the number of rows, unless calls have at least `enough` of them."""

    enough = 0

    def linear(
        self,
        x: torch.Tensor,
        weight: TorchWeight | TorchStack,
        bias: torch.Tensor | None = None,
        *,
        out_dtype: torch.dtype | None = None,
        adapters: RowAdapters | None = None,
    ) -> torch.Tensor:
        exact = super().linear(x, weight, bias, out_dtype=out_dtype, adapters=adapters)
        return exact if self.rows_per_call >= self.enough else exact * (1 + x.shape[0] / 1000)


class CarelessAdapters(Careless):
    """Products with the factors of adapters that depend on a row's place, unless calls have `enough` rows."""

    def linear(self, *args: Any, **how: Any) -> torch.Tensor:
        return TorchOperations.linear(self, *args, **how)

    def factor_product(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        exact = super().factor_product(x, factor)
        if self.rows_per_call >= self.enough or factor.shape[0] > 3:
            return exact
        return exact * (1 + torch.arange(x.shape[0])[:, None] / 1000)


def load_careless(directory: Path, enough: int, careless: type[Careless] = Careless) -> Any:
    operations = careless(1)
    operations.enough = enough
    return load_tiny(directory, "llama", seed=1, operations=operations, allow_unverified=True).model


def test_the_smallest_padding_that_is_exact_is_taken(tmp_path: Path) -> None:
    model = load_careless(tmp_path, enough=32)
    assert model.bit_exact
    assert model.numerics.startswith("torch-4-rows-32-")


def test_the_smallest_padding_with_which_adapters_are_exact_is_taken(tmp_path: Path) -> None:
    assert load_careless(tmp_path, 16, CarelessAdapters).numerics.startswith("torch-4-rows-16-")
    unfit = load_careless(tmp_path, ROWS_PER_CALL[-1] + 1, CarelessAdapters)
    assert (unfit.bit_exact, Capability.LORA in unfit.capabilities) == (True, False)
    assert unfit.numerics.startswith(f"torch-4-rows-{ROWS_PER_CALL[0]}-")
    why_none = unfit.compute_paths[-1].why_not_faster
    assert "different bits of a row in adapters' products with a factor of (1, " in why_none


def test_a_model_is_not_bit_exact_if_no_padding_suffices(tmp_path: Path) -> None:
    model = load_careless(tmp_path, enough=ROWS_PER_CALL[-1] + 1)
    assert not model.bit_exact
    assert "different bits" in model.bit_exact_reason


def test_take_rows_returns_rows_of_the_weight() -> None:
    weight = torch.randn(70, 24)
    index = torch.tensor([3, 69, 3, 0])
    operations = TorchOperations(1)
    assert torch.equal(operations.take_rows(operations.pack(weight[:40], weight[40:]), index), weight[index])
