"""What a model computes whose weights are packed, against a plain model that has the same numbers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from baton.errors import ConfigError
from baton.runner.backends.cpu import kernels
from baton.runner.backends.cpu.kernels import Packed
from baton.runner.backends.kernel_choice import CompiledOperations
from baton.runner.backends.torch_operations import TorchOperations
from baton.runner.backends.weight_rows import Weight
from baton.runner.model_runner import TorchModelRunner
from tests.support.load_with import load_with
from tests.support.runner_driver import RunnerDriver

PROMPT = [(7 * position) % 251 for position in range(40)]


class CountingOperations(CompiledOperations):
    """The kernels, which take a quarter of the time of torch's products, and count the quantised weights they pack."""

    def __init__(self) -> None:
        super().__init__(1, f"kernels-{kernels.available().numerics}")
        self.num_packed = 0

    def pack(self, *weights: Weight) -> Packed:
        self._count(*weights)
        return super().pack(*weights)

    def pack_gated(self, gate: Weight, up: Weight) -> Packed:
        self._count(gate, up)
        return super().pack_gated(gate, up)

    def _count(self, *weights: Weight) -> None:
        self.num_packed += sum(not isinstance(weight, torch.Tensor) for weight in weights)


class PlainOnly(TorchOperations):
    """torch's products on plain weights alone, as on a GPU."""

    packs_quantized = False


def load(directory: Path, **how: Any) -> TorchModelRunner:
    return load_with(directory, dtype="float32", num_blocks=48, **how)


def logits(runner: TorchModelRunner) -> npt.NDArray[np.float32]:
    """The logits of the token that follows the prompt."""
    seen: list[npt.NDArray[np.float32]] = []
    compute = runner._transformer.compute

    def watched(*arguments: Any) -> npt.NDArray[np.float32]:
        seen.append(compute(*arguments))
        return seen[-1]

    runner._transformer.compute = watched  # type: ignore[method-assign, assignment]
    driver = RunnerDriver(runner)
    driver.add("request", PROMPT)
    driver.step({"request": len(PROMPT)})
    return seen[0]


def error(found: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> float:
    """The root of the mean square error, as a share of what was expected."""
    return float(np.sqrt(np.square(found - expected).mean() / np.square(expected).mean()))


@dataclass(frozen=True)
class Sample:
    """A model, and the logits that its numbers give as plain weights."""

    directory: Path
    twin: Path
    """A plain model that has the same numbers; the model itself, if that is plain."""
    expected: npt.NDArray[np.float32]


def refuse(directory: Path, **how: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(directory, **how)
    message = str(caught.value)
    assert "\n" not in message
    assert str(directory) in message
    return message
