"""What modules find in the place of a weight that is packed, in its file, or divided among ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.nn import functional

_ASKED = frozenset(
    getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad")
)
"""What needs no numbers."""


def of_products(linear: Callable[..., torch.Tensor]) -> dict[Callable[..., Any], Callable[..., Any]]:
    """What answers the products with a weight [N, K], by torch's function: of rows, which `linear` computes as
    `F.linear` does, and of columns, [..., K, T] to [..., N, T]."""

    def of_columns(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if not isinstance(weight, AbsentWeight):
            raise TypeError("rows are multiplied with a weight that is not transposed")
        return linear(x.transpose(-1, -2), weight).transpose(-1, -2)

    return {functional.linear: linear, torch.matmul: of_columns, torch.Tensor.matmul: of_columns}


class AbsentWeight(torch.Tensor):
    """Stands for a weight that is held otherwise: modules may ask what they ask of a weight, but it has no numbers."""

    answers: Mapping[Callable[..., Any], Callable[..., Any]]
    """What computes the calls that need numbers, by torch's function. Any other raises TypeError."""

    @staticmethod
    def of(like: torch.Tensor, answers: Mapping[Callable[..., Any], Callable[..., Any]]) -> AbsentWeight:
        """`like`: one number, expanded to the shape of the weight."""
        absent = like.as_subclass(AbsentWeight)
        absent.answers = answers
        return absent

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            absent = next((arg for arg in args if isinstance(arg, AbsentWeight)), None)
            if absent is not None and func in absent.answers:
                return absent.answers[func](*args, **(kwargs or {}))
            if func not in _ASKED:
                raise TypeError(f"{func.__name__} needs the numbers of a weight that Baton holds in its own form")
            return func(*args, **(kwargs or {}))
