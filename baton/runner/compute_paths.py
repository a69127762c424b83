"""A report for operators: what computes each part of a model's steps here, and why nothing faster does."""

from __future__ import annotations

from baton.messages.node_report import ComputePath
from baton.runner.backends.cpu import kernels
from baton.runner.backends.cuda.cuda_operations import CudaOperations
from baton.runner.backends.kernel_choice import CompiledOperations
from baton.runner.backends.operations import Operations
from baton.runner.backends.timed_operations import TimedOperations
from baton.runner.execution.sampler import Sampler
from baton.runner.model.transformer import Transformer
from baton.runner.model.weights import ModelWeights


def compute_paths(
    operations: Operations, transformer: Transformer, weights: ModelWeights, dtype: str
) -> tuple[ComputePath, ...]:
    """The compute paths of a model that has run a step: by then every layer has chosen its attention."""
    if isinstance(operations, TimedOperations):
        operations = operations.timed
    return (
        ComputePath("weights", f"{weights.description or dtype}, {weights.num_bytes >> 20} MiB"),
        products_path(operations),
        _attention(operations),
        ComputePath(
            "decoder",
            "Baton's loop over the layers" if transformer.has_own_loop else "transformers' loop over the layers",
            transformer.why_no_own_loop,
        ),
        _step(operations, transformer),
    )


def products_path(operations: Operations) -> ComputePath:
    """What computes the products."""
    if isinstance(operations, CudaOperations):
        why_not = operations.why_products_by_torch
        return ComputePath("products", f"{'torch' if why_not else 'Triton'} on {operations.device_name}", why_not)
    info = kernels.available()
    if not isinstance(operations, CompiledOperations):
        return ComputePath("products", type(operations).__name__, info.reason or "they were asked for")
    why_not = "" if info.threads else "torch's OpenMP runtime was not found, so one thread computes everything"
    if info.isas and info.isa != info.isas[0]:
        why_not = f"{info.isas[0]} would run too, and {info.isa} was asked for"
    return ComputePath("products", f"C kernels, {info.isa}", why_not)


def sampler_path(sampler: Sampler) -> ComputePath:
    """What draws the tokens of a model on a GPU."""
    if sampler.is_on_device:
        return ComputePath("sampler", "Triton's kernels")
    return ComputePath("sampler", "numpy on one thread", "Triton's kernels can't be used, as the log says")


def _attention(operations: Operations) -> ComputePath:
    if isinstance(operations, CudaOperations):
        return ComputePath("attention", " and ".join(sorted(operations.ways)), operations.why_plain)
    products = products_path(operations)
    return ComputePath("attention", f"{products.runs} on the paged cache", products.why_not_faster)


def _step(operations: Operations, transformer: Transformer) -> ComputePath:
    if isinstance(operations, CudaOperations):
        graphs = transformer.decode_graphs
        why_not = transformer.why_no_own_loop if graphs is None else graphs.why_not
        runs = "one launch for each operation" if why_not else "one CUDA graph for a decode step"
        return ComputePath("step", runs, why_not)
    why_not = transformer.why_no_programs
    return ComputePath("step", "one call for each operation" if why_not else "one call for all layers", why_not)
