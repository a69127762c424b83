"""What recognition compares: random input of a module's parts, what it passes to attention, and results that agree."""

from __future__ import annotations

import inspect
from collections import UserDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn

from baton.runner.model.attention import LAYER_ARGUMENT
from baton.runner.model.fused.rotation import AngleLayout, Angles
from baton.runner.model.probe_attention import EchoAttention
from baton.runner.model.row_positions import TokensBefore
from baton.runner.model.stored.layers import StoredLinear

NUM_ROWS = 5
"""So many rows are compared."""
_LARGE = 1000.0
"""So many times as large as others are rows that show where a module cuts numbers off."""
LAYOUTS: tuple[AngleLayout, ...] = ("halves", "half", "pairs")
KINDS: tuple[Literal["halves", "pairs", "none"], ...] = ("halves", "pairs", "none")
_TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 4e-2}
"""The largest difference, as a share of the largest number, that another order of rounding explains."""


def children_of(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Every parent module in `module`, with each child and its name. The caller may replace children meanwhile.

    Parents are remembered by their paths, since a list of modules would keep replaced modules and their weights.
    """
    for path in [path for path, _ in module.named_modules()]:
        try:
            parent = module.get_submodule(path)
        except AttributeError:
            continue  # a part above this module was replaced
        for name in [name for name, _ in parent.named_children()]:
            yield parent, name, parent.get_submodule(name)


def like_input(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """Input x in the dtype and on the device of a layer's weight, which is not read for that."""
    return x.to(linear.device, linear.dtype) if isinstance(linear, StoredLinear) else x.to(linear.weight)


def like_weights(module: nn.Module) -> torch.Tensor:
    """An empty tensor in the dtype and on the device of the weights of products."""
    for part in module.modules():
        if isinstance(part, StoredLinear):
            return torch.empty(0, dtype=part.dtype, device=part.device)
        if isinstance(part, nn.Linear):
            return part.weight.detach().new_empty(0)
    return torch.empty(0, dtype=torch.float32)


def linears_of(child: Any, known_names: Sequence[Sequence[str]]) -> dict[str, nn.Linear] | None:
    """The linear layers of a part that have names which are known together."""
    for names in known_names:
        found = {name: getattr(child, name, None) for name in names}
        if all(isinstance(part, nn.Linear) for part in found.values()):
            return found  # type: ignore[return-value]
    return None


def factors_of(child: Any) -> list[float]:
    """What a module may multiply its rows with: 1.0, which changes nothing, and its positive numbers."""
    own = (value for value in vars(child).values() if isinstance(value, float) and value > 0.0)
    return [*dict.fromkeys((1.0, *own))]


def random_angles(
    width: int, layout: AngleLayout, generator: torch.Generator, num_rows: int = NUM_ROWS
) -> torch.Tensor:
    """Random angles [1, num_rows, width] in a layout of real models."""
    few = width if layout == "half" else width // 2
    angles = torch.rand(1, num_rows, few, dtype=torch.float32, generator=generator) * 6
    if layout == "pairs":
        return angles.repeat_interleave(2, dim=-1)
    return angles if layout == "half" else torch.cat((angles, angles), dim=-1)


class SharedKeys(UserDict[str, tuple[torch.Tensor, torch.Tensor]]):
    """What attention is given keys and values in that layers share, by name: each [1, KH, T, D]."""

    def __init__(self, num_rows: int, like: torch.Tensor, heads: Mapping[str, tuple[int, int]]) -> None:
        """`heads`: KH and D of the keys and values that layers have shared so far; here they are random numbers."""
        super().__init__()
        self.taken: set[str] = set()
        """The names under which keys and values were asked for."""
        self._num_rows, self._like, self._heads = num_rows, like, heads

    def __missing__(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        num_heads, width = self._heads[name]
        generator = torch.Generator().manual_seed(len(name))
        both = torch.randn(2, 1, num_heads, self._num_rows, width, dtype=torch.float32, generator=generator)
        self.taken.add(name)
        key, value = both.to(self._like)
        return key, value

    @property
    def given(self) -> str | None:
        """The name under which an attention has given keys and values; None: it has given none."""
        return next(iter(self.data), None)


def echoed(
    child: nn.Module, x: torch.Tensor, given: Angles, shared: SharedKeys | None = None
) -> tuple[EchoAttention, torch.Tensor]:
    """What a module passes to attention for the rows x [1, T, K], and what it computes of the echo.

    `shared`: keys and values that layers share, for a module that takes them.
    """
    echo = EchoAttention()
    object.__setattr__(child, "baton_attend", echo)
    # Layers without any rotation hand on to attention what they don't know.
    takes_angles = "position_embeddings" in inspect.signature(type(child).forward).parameters
    angles: dict[str, Any] = {"position_embeddings": given} if takes_angles else {}
    places = probe_places(x.shape[1]).to(x.device)
    if "position_ids" in inspect.signature(type(child).forward).parameters:
        angles["position_ids"] = places[None]
    elif "past_key_values" in inspect.signature(type(child).forward).parameters:  # by which some count tokens
        angles["past_key_values"] = TokensBefore().begin(places)
    angles |= told_layer(child)
    if takes_shared(child):
        angles["shared_kv_states"] = shared
    return echo, child(hidden_states=x, attention_mask=None, **angles)[0]


def told_layer(child: nn.Module) -> dict[str, int]:
    """The number of its layer as a part is told it with each call (`number_layers`), by the argument's name; or none.

    Some parts are told nothing, and others may be left without it.
    """
    number: int | None = getattr(child, "baton_layer", None)
    return {} if number is None else {LAYER_ARGUMENT: number}


def takes_shared(child: nn.Module) -> bool:
    """Whether a module takes keys and values that layers share."""
    return "shared_kv_states" in inspect.signature(type(child).forward).parameters


def agree(expected: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether two results of one dtype differ by no more than another order of rounding explains."""
    if expected.shape != out.shape or expected.dtype != out.dtype:
        return False
    difference = (expected.float() - out.float()).abs().max()
    return bool(difference <= _TOLERANCE[expected.dtype] * expected.float().abs().max())


def small_and_large_rows(width: int, generator: torch.Generator) -> torch.Tensor:
    """Random rows [1, 2 NUM_ROWS, width], float32; the second half is so large that it shows limits of a module."""
    rows = torch.randn(1, 2 * NUM_ROWS, width, dtype=torch.float32, generator=generator)
    rows[:, NUM_ROWS:] *= _LARGE
    return rows


def agree_in_parts(expected: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether both the small rows and the large ones of two results [2 NUM_ROWS, ...] agree."""
    same = expected.shape == out.shape
    return same and all(
        agree(*parts) for parts in zip(*(torch.split(rows, NUM_ROWS) for rows in (expected, out)), strict=True)
    )


def angle_widths(module: nn.Module) -> list[int]:
    """The numbers of angles that a position may have: two for each inverse frequency, or one."""
    sizes = {buffer.numel() for name, buffer in module.named_buffers() if name.endswith("inv_freq")}
    return [2 * size for size in sorted(sizes)] + sorted(sizes)


def angle_dtypes_of(module: nn.Module) -> set[torch.dtype]:
    """The dtypes of the cosines and sines that rotary modules give for rows in the dtype of the weights."""
    like = like_weights(module).new_zeros(1, 1, 1)
    dtypes = set()
    for rotary in module.modules():
        if not any(name.endswith("inv_freq") for name, _ in rotary.named_buffers(recurse=False)):
            continue
        device = next(rotary.buffers()).device
        try:
            angles = rotary(like.to(device), torch.zeros(1, 1, dtype=torch.int64, device=device))
        except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):
            continue  # It takes other arguments, so its angles are not known before a step.
        dtypes |= {part.dtype for part in angles}
    return dtypes


def probe_places(num_rows: int) -> torch.Tensor:
    """The positions of compared rows, int64 [num_rows], some of them behind the lengths of most models' training."""
    return torch.arange(num_rows) * 8000
