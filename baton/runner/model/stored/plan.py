"""Decides for every weight of a checkpoint that stays in its file until it is packed which part of the model holds it.

Linear layers, experts and embeddings hold it as it is (stored/layers.py). For any other part, and for a weight that
has no packed form, transformers' loader gets it dequantised, one tensor after the other. The decision is made on a
module without memory (on torch's meta device), so a checkpoint that does not fit its config.json is refused before
anything is allocated. transformers' own quantizers play no part (docs/decisions/0027).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch import nn

from baton.runner.model.stored.layers import StoredEmbedding, StoredLinear, hold_experts, look_rows_up_in
from baton.runner.model.stored.weight import CheckpointTensor, StoredWeight, UnusableWeight

_STACKING = ("MergeModulelist", "Concatenate")
"""The conversions of the loader that stack the weights of experts, and change no number."""


class CheckpointNames:
    """The names that checkpoints of one model have."""

    def __init__(self, skeleton: Any) -> None:
        """`skeleton`: the model on the meta device."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        self._rename = rename_source_key
        conversions = get_model_conversion_mapping(skeleton)
        self._renamings = [conversion for conversion in conversions if isinstance(conversion, WeightRenaming)]
        self._converters = [conversion for conversion in conversions if isinstance(conversion, WeightConverter)]
        self._prefix = skeleton.base_model_prefix
        self.parameters: dict[str, Any] = skeleton.state_dict()
        """The model's parameters, without memory, by their names in the model."""

    def parameter_of(self, name: str) -> tuple[str, str | None]:
        """The name of the parameter, and the pattern of the conversion that makes it; None: the tensor is as it is."""
        key, pattern = self._rename(name, self._renamings, self._converters, self._prefix, self.parameters)
        if key not in self.parameters and name in self.parameters:
            return name, None
        return key, pattern

    def stacked_patterns(self, pattern: str) -> list[str]:
        """The patterns of all tensors that are stacked with those of `pattern`, in their order.

        Empty if the conversion does more than stacking.
        """
        converter = next(candidate for candidate in self._converters if pattern in candidate.source_patterns)
        if any(type(operation).__name__ not in _STACKING for operation in converter.operations):
            return []
        return list(converter.source_patterns)


def in_natural_order(name: str) -> list[tuple[int, str]]:
    """A key that sorts names as people do: expert 2 before expert 10."""
    return [(int(piece), "") if piece.isdigit() else (-1, piece) for piece in re.split(r"(\d+)", name)]


_MOST_LACKING = 1 << 27
"""How many numbers a checkpoint may lack until the loader, which allocates them first, names what is missing."""


class DequantizedTensor:
    """A weight as transformers' loader takes it: read and dequantised when it is sliced."""

    def __init__(self, stored: StoredWeight, is_transposed: bool = False) -> None:
        self._stored = stored
        self._is_transposed = is_transposed

    def __getitem__(self, index: Any) -> torch.Tensor:
        weight = self._stored.dequantized()
        return (weight.T.contiguous() if self._is_transposed else weight)[index]


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """Which parts of a module hold which weights, by the parts' paths, and what the loader gets."""

    linears: dict[str, StoredWeight] = field(default_factory=dict)
    embeddings: dict[str, StoredWeight] = field(default_factory=dict)
    experts: dict[str, dict[str, list[list[StoredWeight]]]] = field(default_factory=dict)
    loaded: dict[str, Any] = field(default_factory=dict)
    """Plain and dequantised tensors by their names in the checkpoint."""
    plain_dtypes: set[str] = field(default_factory=set)
    """The dtypes of plain tensors, as safetensors names them."""

    @property
    def held(self) -> list[StoredWeight]:
        """All weights that are packed, each once."""
        experts = [
            stored
            for parameters in self.experts.values()
            for experts in parameters.values()
            for expert in experts
            for stored in expert
        ]
        held = [*self.linears.values(), *self.embeddings.values(), *experts]
        return list({id(stored): stored for stored in held}.values())

    def install(self, module: Any, dtype: torch.dtype, device: torch.device) -> None:
        """Put the parts that hold weights into a module that has no memory yet; they compute on this device."""
        for path, stored in self.linears.items():
            linear = module.get_submodule(path)
            module.set_submodule(path, StoredLinear(stored, linear.bias, dtype, device))
        for path, stored in self.embeddings.items():
            look_rows_up_in(module, path, StoredEmbedding(stored, dtype))
        for path, weights in self.experts.items():
            part = module.get_submodule(path)
            hold_experts(part, weights, are_transposed=any(expert_parameters(part).values()))
        held = {f"{path}.weight" for path in (*self.linears, *self.embeddings)}
        ties = module.all_tied_weights_keys
        # transformers would look for a parameter that is not there.
        module.all_tied_weights_keys = {key: ties[key] for key in ties if not held & {key, ties[key]}}


def plan_weights(
    skeleton: Any,
    names: CheckpointNames,
    weights: Mapping[str, StoredWeight],
    experts: Mapping[str, list[list[StoredWeight]]],
    plain: Mapping[str, CheckpointTensor],
) -> WeightPlan:
    """Decide where `weights` and `experts` that stay in their files and the `plain` tensors of a checkpoint belong.

    `skeleton` is the model on the meta device. `experts`: by the name of the parameter that they are stacked in. Raises
    UnusableWeight for weights that don't fit it.
    """
    plan = _Planner(skeleton, names, weights, plain).plan()
    for key, of_experts in experts.items():
        path, _, leaf = key.rpartition(".")
        plan.experts.setdefault(path, {})[leaf] = of_experts
    return plan


def check_shapes(names: CheckpointNames, plain: Mapping[str, CheckpointTensor]) -> None:
    """Raise UnusableWeight for a plain tensor of another shape than config.json asks for."""
    for name, tensor in plain.items():
        key, pattern = names.parameter_of(name)
        parameter = names.parameters.get(key)
        if parameter is not None and pattern is None and tuple(parameter.shape) != tensor.shape:
            raise UnusableWeight(
                f"{name} has the shape {list(tensor.shape)}, and config.json asks for {list(parameter.shape)}"
            )


def check_size(skeleton: Any, shapes: Iterable[tuple[int, ...]]) -> None:
    """Raise UnusableWeight for a config.json that asks for far more numbers than weights of these shapes have.

    transformers' loader would allocate whatever a checkpoint lacks before it reports it.
    """
    asked, held = sum(parameter.numel() for parameter in skeleton.parameters()), sum(map(math.prod, shapes))
    # A tied weight may be counted twice.
    if asked > 2 * held + _MOST_LACKING:
        raise UnusableWeight(f"config.json asks for {asked} numbers, and there are {held}; copy all files again")


class _Planner:
    def __init__(
        self,
        skeleton: Any,
        names: CheckpointNames,
        weights: Mapping[str, StoredWeight],
        plain: Mapping[str, CheckpointTensor],
    ) -> None:
        self._skeleton = skeleton
        self._names = names
        self._weights = weights
        self._plan = WeightPlan(loaded=dict(plain))
        self._stored_keys = {names.parameter_of(name)[0] for name in (*weights, *plain)}
        """The parameters that have a tensor in the checkpoint."""

    def plan(self) -> WeightPlan:
        stacked: dict[str, dict[str, list[str]]] = {}
        for name, stored in self._weights.items():
            key, pattern = self._names.parameter_of(name)
            if pattern is not None:
                stacked.setdefault(key, {}).setdefault(pattern, []).append(name)
            else:
                self._place(name, key, stored)
        for key, sources in stacked.items():
            if not self._hold_experts(key, sources):
                for name in (name for names in sources.values() for name in names):
                    self._plan.loaded[name] = DequantizedTensor(self._weights[name])
        return self._plan

    def _place(self, name: str, key: str, stored: StoredWeight) -> None:
        """Let the part with this parameter hold the weight, or the loader get the weight dequantised."""
        from transformers.pytorch_utils import Conv1D

        path = key.removesuffix(".weight")
        part = self._skeleton.get_submodule(path) if key in self._names.parameters and path != key else None
        is_transposed = isinstance(part, Conv1D)
        if isinstance(part, nn.Linear | nn.Embedding | Conv1D):
            shape = tuple(part.weight.shape)
            if stored.shape != (shape[::-1] if is_transposed else shape):
                raise UnusableWeight(
                    f"{key} is {' x '.join(map(str, stored.shape))}, not {' x '.join(map(str, shape))}"
                )
        if stored.packed_bytes is not None and is_linear(part):
            self._plan.linears[path] = stored
            self._hold_tied_linears(key, stored)
            source = self._ties.get(key)
            if source is not None and source not in self._stored_keys:
                self._plan.embeddings[source.removesuffix(".weight")] = stored
            return
        if stored.packed_bytes is not None and isinstance(part, nn.Embedding):
            self._hold_tied_linears(key, stored)
            self._plan.embeddings[path] = stored
            return
        self._plan.loaded[name] = DequantizedTensor(stored, is_transposed)

    def _hold_tied_linears(self, key: str, stored: StoredWeight) -> None:
        """Let the linear layers that share a parameter hold its weight, too: a head, or those of zamba2's layers."""
        for target, source in self._ties.items():
            path = target.removesuffix(".weight")
            if source == key and target not in self._stored_keys and is_linear(self._skeleton.get_submodule(path)):
                self._plan.linears[path] = stored

    @property
    def _ties(self) -> Mapping[str, str]:
        """For the name of a tied parameter that of the parameter whose weight it shares."""
        ties: Mapping[str, str] = self._skeleton.all_tied_weights_keys
        return ties

    def _hold_experts(self, key: str, sources: Mapping[str, list[str]]) -> bool:
        """Let an experts module hold the weights of all experts; False: the loader must get them dequantised."""
        path, _, leaf = key.rpartition(".")
        patterns = self._names.stacked_patterns(next(iter(sources)))
        if key not in self._names.parameters or set(patterns) != set(sources):
            return False
        part, parameter = self._skeleton.get_submodule(path), self._names.parameters[key]
        of_pattern = [
            [self._weights[name] for name in sorted(sources[pattern], key=in_natural_order)] for pattern in patterns
        ]
        experts = [list(expert) for expert in zip(*of_pattern, strict=False)]
        if leaf not in expert_parameters(part):
            return False
        if {len(names) for names in of_pattern} != {len(parameter)}:
            raise UnusableWeight(f"{key} needs the weights of {len(parameter)} experts, and there are {len(experts)}")
        if any(stored.packed_bytes is None for expert in experts for stored in expert):
            return False
        for number, expert in enumerate(experts):
            shape = (sum(stored.shape[0] for stored in expert), expert[0].shape[1])
            if shape != tuple(parameter.shape[1:]) or len({stored.shape for stored in expert}) > 1:
                raise UnusableWeight(
                    f"expert {number} of {key} is {shape[0]} x {shape[1]}, not {list(parameter.shape[1:])}"
                )
        self._plan.experts.setdefault(path, {})[leaf] = experts
        return True


def is_linear(part: object) -> TypeGuard[nn.Linear]:
    """Whether a module is a linear layer, and computes nothing else: a router may be one that also chooses experts."""
    from transformers.pytorch_utils import Conv1D

    forwards = (nn.Linear.forward, Conv1D.forward, StoredLinear.forward)
    return isinstance(part, nn.Linear | Conv1D) and type(part).forward in forwards


def expert_parameters(part: nn.Module) -> dict[str, bool]:
    """The parameters of a module in which the weights [N, K] of experts are stacked, and whether each is transposed.

    They are those of experts that transformers' ExpertsInterface computes, and of others that Baton knows by their
    names and shapes (mixtures/stacked.py, mixtures/separate.py).
    """
    own = {name: parameter for name, parameter in part.named_parameters(recurse=False) if parameter.dim() == 3}
    if is_experts(part):
        return dict.fromkeys(own, bool(part.is_transposed))
    if set(own) == {"gate_up_proj", "down_proj"}:
        (_, *up), (_, *down) = (own[name].shape for name in ("gate_up_proj", "down_proj"))
        if up == [2 * down[1], down[0]]:
            return dict.fromkeys(own, False)
        return dict.fromkeys(own, True) if up == [down[1], 2 * down[0]] else {}
    sizes = tuple(getattr(part, name, None) for name in ("num_experts", "output_size", "input_size"))
    return {"weight": False} if set(own) == {"weight"} and tuple(own["weight"].shape) == sizes else {}


def is_experts(part: nn.Module) -> bool:
    """Whether a module holds experts that transformers' ExpertsInterface can compute."""
    # transformers' decorator gives every such module these; what else it gives depends on its release.
    return all(hasattr(part, name) for name in ("has_gate", "has_bias", "is_transposed"))
