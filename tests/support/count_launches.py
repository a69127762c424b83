"""Counts what a step starts on a GPU, on any machine: kernels of Triton's interpreter, and torch's operations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

_STARTS_NOTHING = frozenset(
    {
        *("alias", "as_strided", "chunk", "detach", "expand", "lift_fresh", "narrow", "permute", "reshape", "resize_"),
        *("resolve_conj", "resolve_neg", "select", "slice", "split", "squeeze", "t", "transpose", "unbind", "unfold"),
        *("unsqueeze", "view", "view_as", "_reshape_alias", "_unsafe_view"),
        *("empty", "empty_like", "empty_strided", "new_empty"),
    }
)


class _Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()
        self.is_inside_kernel = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not self.is_inside_kernel and name not in _STARTS_NOTHING:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counted_launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Count launches by name in the body; what a step copies to the device is among them."""
    from triton.runtime.interpreter import GridExecutor

    launches, start = _Launches(), GridExecutor.__call__

    def counted(self: Any, *arguments: Any, **named: Any) -> Any:
        launches.counts[self.fn.__name__] += 1
        launches.is_inside_kernel = True
        try:
            return start(self, *arguments, **named)
        finally:
            launches.is_inside_kernel = False

    with monkeypatch.context() as patch, launches:
        patch.setattr(GridExecutor, "__call__", counted)
        yield launches.counts
