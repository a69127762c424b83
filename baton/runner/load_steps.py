"""Steps that all loaders share: naming errors, naming what decides the bits, making torch's products bit-exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from baton.engine.runner import KVLayout
from baton.errors import ConfigError
from baton.runner.backends.cpu.kernels import KernelArgumentError
from baton.runner.backends.operations import Operations
from baton.runner.backends.torch_operations import TorchOperations
from baton.runner.model.attention import UnsupportedAttention
from baton.runner.model.quantization.stored_weight import UnusableWeight


@contextmanager
def named_errors(model_dir: Path) -> Iterator[None]:
    """Raise what can go wrong while a loaded model is prepared as a ConfigError that names its directory."""
    try:
        yield
    except UnusableWeight as error:
        raise ConfigError(f"the weights in {model_dir} can't be used: {error}") from error
    except UnsupportedAttention as error:
        raise UnsupportedAttention(f"{model_dir} can't be served: {error}; choose another model") from error
    except KernelArgumentError as error:
        raise ConfigError(f"{model_dir} has a shape that Baton's kernels can't compute ({error})") from error


def settle(
    operations: Operations, set_rows_per_call: Callable[[int], None], why_not_bit_exact: Callable[[], str | None]
) -> str | None:
    """Choose the smallest number of rows per call with which torch's products are bit-exact on this machine.

    Returns None, or why the model is not bit-exact.
    """
    if not isinstance(operations, TorchOperations):
        return why_not_bit_exact()
    reason: str | None = None
    for rows in operations.rows_to_try:
        set_rows_per_call(rows)
        reason = why_not_bit_exact()
        if reason is None:
            break
    return reason


def numerics_of(treatment: str, operations: Operations, layout: KVLayout) -> str:
    """A name for everything that decides the bits, beside the files of the model.

    `treatment`: what was made of the weights (`ModelWeights`). Operations may name more once a step was computed.
    """
    numerics = f"{operations.numerics()}/torch-{torch.__version__}-{torch.backends.cpu.get_cpu_capability()}"
    if treatment:
        numerics += f"/{treatment}"
    if layout.has_scales:
        # A stream must not move between decode nodes whose caches round differently.
        numerics += f"/kv-{layout.dtype}"
    return numerics
