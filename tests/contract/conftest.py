"""The implementations of the operations, which tests of several files compare."""

from __future__ import annotations

from typing import Any

import pytest

from baton.runner.backends.cpu import kernels
from baton.runner.backends.cuda.cuda_operations import CudaOperations
from baton.runner.backends.cuda.kernels import Kernels
from baton.runner.backends.device import CPU
from baton.runner.backends.kernel_choice import CompiledOperations
from baton.runner.backends.torch_operations import TorchOperations
from tests.doubles.fake_attention import fake_paged_attention
from tests.support import reference_operations as reference


@pytest.fixture(params=["compiled", "torch", "gpu", "reference"])
def operations(request: pytest.FixtureRequest) -> Any:
    if request.param == "compiled" and not kernels.available():
        pytest.skip(kernels.available().reason)
    made: dict[str, Any] = {
        "compiled": CompiledOperations(2, ""),
        "torch": TorchOperations(1),
        "gpu": CudaOperations(CPU, Kernels(fake_paged_attention)),
        "reference": reference,
    }
    return made[request.param]
