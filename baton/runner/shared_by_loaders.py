"""Steps that all loaders of models share, from the specification to what a node publishes of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from baton.engine.runner import KVLayout, ModelInfo, RunnerLost
from baton.errors import ConfigError
from baton.model_formats.files import read_object
from baton.model_formats.model_types import what_instead
from baton.runner.backends.cpu.kernels import KernelArgumentError
from baton.runner.backends.cuda.cuda_operations import CudaOperations
from baton.runner.backends.cuda.numerics import host_numerics
from baton.runner.backends.kernel_choice import choose_operations
from baton.runner.backends.operations import Operations
from baton.runner.backends.torch_operations import TorchOperations
from baton.runner.gpu_facts import facts_of
from baton.runner.gpu_limits import check_gpu
from baton.runner.model import attention
from baton.runner.model.attention import UnsupportedAttention
from baton.runner.model.checkpoint import least_weight_bytes, weight_files_of
from baton.runner.model.mixtures import experts
from baton.runner.model.stored.weight import UnusableWeight
from baton.runner.model.weights import DTYPES, LoadedModel, resolve_dtype
from baton.runner.spec import TorchSpec
from baton.runner.torch_threads import elementwise_threads


def refuse_settings(spec: TorchSpec, why: str, settings: Mapping[str, bool]) -> None:
    """Raise ConfigError for the first of these settings that is set: a model of this kind does not go with it.

    `why`: what the model is, with `{}` for the setting.
    """
    for setting, is_set in settings.items():
        if is_set:
            raise ConfigError(f"{spec.model_dir} {why.format(setting)}")


def prepare(num_threads: int) -> None:
    """Let torch compute with so many threads, and transformers call Baton's attention and experts."""
    torch.set_num_threads(elementwise_threads(num_threads))
    attention.register()
    experts.register()


def prepared_operations(spec: TorchSpec, device: torch.device, operations: Operations | None) -> Operations:
    """Prepare this process for a model, and return what computes it: `operations`, or None: the machine's kernels.

    Raises ConfigError for a GPU that has no room for it, before anything is allocated.
    """
    prepare(spec.num_threads)
    if device.type == "cuda":
        _check_gpu(spec, device)
    return choose_operations(spec.num_threads, device) if operations is None else operations


def _check_gpu(spec: TorchSpec, device: torch.device) -> None:
    facts = facts_of(device)
    if facts is not None:
        itemsize = DTYPES[resolve_dtype(spec.dtype, device)].itemsize
        weights = least_weight_bytes(weight_files_of(spec.model_dir), itemsize) // spec.pipeline_parallel
        check_gpu(facts, str(device), weights, spec.cache_bytes or 0)


@contextmanager
def named_errors(model_dir: Path) -> Iterator[None]:
    """Raise what can go wrong while a loaded model is prepared as a ConfigError that names its directory."""
    try:
        yield
    except UnusableWeight as error:
        raise ConfigError(f"the weights in {model_dir} can't be used: {error}") from error
    except UnsupportedAttention as error:
        instead = what_instead(str(read_object(model_dir / "config.json").get("model_type")))
        raise UnsupportedAttention(f"{model_dir} can't be served: {error}; {instead}") from error
    except KernelArgumentError as error:
        raise ConfigError(f"{model_dir} has a shape that Baton's kernels can't compute ({error})") from error
    except torch.OutOfMemoryError as error:
        reason = (str(error).splitlines() or [""])[0]
        raise ConfigError(
            f"{model_dir} does not fit into what the GPU has left, which another process may have taken meanwhile "
            f"({reason}): give the node another GPU (--device), or end what uses this one"
        ) from error
    except RunnerLost as error:
        raise ConfigError(f"{model_dir} can't be divided among ranks: {error}") from error


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


_PARTS = 4
"""Counted up whenever Baton's parts of models compute other bits or keep something else in the cache, though kernels
are as before: when a recognised factor is folded elsewhere, say."""


def numerics_of(treatment: str, operations: Operations, layout: KVLayout) -> str:
    """A name for everything that decides the bits, beside the files of the model.

    `treatment`: what was made of the weights (`ModelWeights`). Operations may name more once a step was computed.
    """
    numerics = f"{operations.numerics()}/{_what_all_models_share(operations, treatment)}"
    if layout.has_scales:
        # A stream must not move between decode nodes whose caches round differently.
        numerics += f"/kv-{layout.dtype}"
    if layout.keeps_states:
        # The bits are the same with any block size, but states are there at the ends of blocks alone.
        numerics += f"/states-of-{layout.block_size}"
    return numerics


def row_numerics_of(treatment: str, operations: Operations) -> str:
    """A name for everything that decides the rows of an encoder, beside the model's files and what prepares an input.

    It has nothing of the decoder's, so that an encoder that was loaded alone has the same.
    """
    of_products = operations.product_numerics() if isinstance(operations, TorchOperations) else operations.numerics()
    return f"{of_products}/{_what_all_models_share(operations, treatment)}"


def _what_all_models_share(operations: Operations, treatment: str) -> str:
    by_torch = f"torch-{torch.__version__}"
    if isinstance(operations, CudaOperations):
        by_torch += f"-{host_numerics()}"
    else:
        by_torch += f"-{torch.backends.cpu.get_cpu_capability()}"
    return f"{by_torch}/parts-{_PARTS}" + (f"/{treatment}" if treatment else "")


def model_info(
    spec: TorchSpec,
    loaded: LoadedModel,
    operations: Operations,
    layout: KVLayout,
    max_model_len: int,
    why_not_bit_exact: str | None,
) -> ModelInfo:
    """What a node publishes of any model that has computed a step; its loader adds what else the model can do."""
    return ModelInfo(
        name=spec.name or spec.model_dir.resolve().name,
        fingerprint=loaded.fingerprint,
        model_type=loaded.checkpoint.model_type,
        dtype=loaded.dtype,
        numerics=numerics_of(loaded.weights.treatment, operations, layout),
        vocab_size=loaded.config.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=loaded.checkpoint.eos_token_ids,
        bit_exact=why_not_bit_exact is None,
        bit_exact_reason=why_not_bit_exact or "",
        weight_bytes=loaded.weights.num_bytes,
        table_bytes=loaded.weights.table_bytes,
    )
