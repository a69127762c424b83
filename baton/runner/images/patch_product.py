"""Convolutions whose windows touch but do not overlap: cutting an image into patches, and one product for each."""

from __future__ import annotations

import torch
from torch import nn

from baton.runner.backends.operations import Operations
from baton.runner.model.layers import PackedLinear
from baton.runner.model.recognition import children_of


class PatchProduct(nn.Module):
    """A convolution as a product on a packed weight: x [B, C, …] to [B, N, …], with one output for each window."""

    def __init__(self, operations: Operations, convolution: nn.Conv2d | nn.Conv3d) -> None:
        super().__init__()
        weight = convolution.weight.detach()
        self._window = tuple(convolution.kernel_size)
        self._product = PackedLinear(operations, weight.flatten(1).contiguous(), convolution.bias, weight.dtype)
        self._dtype = weight.dtype

    @property
    def weight(self) -> torch.Tensor:
        """A tensor without numbers, by whose dtype callers convert their input."""
        return torch.empty(0, dtype=self._dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        num_axes = len(self._window)
        patches = x
        for axis, size in enumerate(self._window):
            patches = patches.unfold(2 + axis, size, size)
        # [B, C, windows…, window…] to [B, windows…, C, window…]
        patches = patches.movedim(1, 1 + num_axes)
        out: torch.Tensor = self._product(patches.flatten(1 + num_axes).contiguous())
        return out.movedim(-1, 1).contiguous()


def replace_patch_convolutions(module: nn.Module, operations: Operations) -> None:
    """Replace every convolution of this kind in place."""
    for parent, name, child in children_of(module):
        if isinstance(child, nn.Conv2d | nn.Conv3d) and _cuts_into_patches(child):
            setattr(parent, name, PatchProduct(operations, child))


def _cuts_into_patches(convolution: nn.Conv2d | nn.Conv3d) -> bool:
    no_padding = convolution.padding == "valid" or not any(convolution.padding)
    dense = convolution.groups == 1 and all(each == 1 for each in convolution.dilation)
    return bool(no_padding and dense and convolution.stride == convolution.kernel_size)
