"""Finds for the name of a tensor in a checkpoint the parameter of the model that it becomes.

transformers' loader renames tensors and stacks those of experts by tables of its own, which are asked here.
"""

from __future__ import annotations

import re
from typing import Any

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
        self._renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
        self._converters = [each for each in conversions if isinstance(each, WeightConverter)]
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
        converter = next(each for each in self._converters if pattern in each.source_patterns)
        if any(type(operation).__name__ not in _STACKING for operation in converter.operations):
            return []
        return list(converter.source_patterns)


def in_natural_order(name: str) -> list[tuple[int, str]]:
    """A key that sorts names as people do: expert 2 before expert 10."""
    return [(int(piece), "") if piece.isdigit() else (-1, piece) for piece in re.split(r"(\d+)", name)]
