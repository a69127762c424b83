"""Rotary angles that depend on the length of a sequence: found by asking, and computed for each row of a step alone.

transformers derives them from the longest position in a call, and a step has rows of many sequences. So a rotary module
that gives other angles for a longer call is replaced by one that computes both kinds and takes each row's own.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

from baton.engine.scheduler_config import LongSequences
from baton.runner.model.attention import UnsupportedAttention


class LongAngles(nn.Module):
    """Stands for a rotary module whose angles are of one kind up to a length, and of another one beyond it."""

    def __init__(self, rotary: nn.Module, most_short: int) -> None:
        super().__init__()
        self.rotary = rotary
        self.most_short = most_short
        self.is_long: torch.Tensor | None = None
        """Bool [T], of the step that is computed: the rows with the angles of long sequences; None: there are none."""

    def __getattr__(self, name: str) -> Any:
        # Some models look at the configuration of their rotary module.
        return super().__getattr__(name) if name == "rotary" else getattr(self.rotary, name)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """What the rotary module gives for positions [1, T], for each row alone: cosines and sines [1, T, R], or one
        tensor of complex numbers."""
        short = self.short(x, position_ids, *args, **kwargs)
        if self.is_long is None:
            return short
        long = self.long(x, position_ids, *args, **kwargs)
        if isinstance(short, torch.Tensor):
            return torch.where(self.is_long[:, None], long, short)
        return tuple(torch.where(self.is_long[:, None], *both) for both in zip(long, short, strict=True))

    def short(self, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """The angles of short sequences for positions [1, T]; those behind them are no positions of such sequences."""
        return self.rotary(x, position_ids.clamp(max=self.most_short - 1), *args, **kwargs)

    def long(self, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """The angles of long sequences for positions [1, T]."""
        # As many rows again keep every row's place in the vectors of torch's kernels.
        both = torch.cat((position_ids, torch.full_like(position_ids, self.most_short)), dim=-1)
        given, count = self.rotary(x, both, *args, **kwargs), position_ids.shape[-1]
        return given[:, :count] if isinstance(given, torch.Tensor) else tuple(angles[:, :count] for angles in given)


def replace_rotary(module: Any, longest: int) -> LongSequences | None:
    """Replace the rotary modules whose angles depend on a length, and say on which; None: there are none.

    `longest`: the most tokens of a sequence. Raises UnsupportedAttention for angles of more than two kinds.
    """
    replaced = {}
    for name, part in module.named_modules():
        if is_rotary(part) and (most_short := _most_short(part, name, longest)) is not None:
            replaced[name] = most_short
    if not replaced:
        return None
    borders = sorted(set(replaced.values()))
    if len(borders) > 1 or "mrope_section" in (getattr(module.config, "rope_parameters", None) or {}):
        raise UnsupportedAttention(
            f"rotary angles of {', '.join(replaced)} change with the length of a sequence at {borders} tokens, and "
            "in three dimensions or at several lengths that is not supported"
        )
    for name, most_short in replaced.items():
        parent, _, own_name = name.rpartition(".")
        setattr(module.get_submodule(parent), own_name, LongAngles(module.get_submodule(name), most_short))
    return LongSequences(borders[0], _starts_over(module, borders[0]))


def refuse_long_angles(module: nn.Module, longest: int) -> None:
    """Raise UnsupportedAttention if a rotary module's angles depend on a length, where all rows of a step need one."""
    for name, part in module.named_modules():
        if is_rotary(part) and (most_short := _most_short(part, name, longest)) is not None:
            raise UnsupportedAttention(
                f"rotary angles of {name} change with the length of a text, behind {most_short} tokens, so that texts "
                "can't be computed together"
            )


def is_rotary(part: nn.Module) -> bool:
    """Whether a module gives the angles of positions, as layers of a decoder take them."""
    if isinstance(part, LongAngles):
        return True
    if not any(name.endswith("inv_freq") for name, _ in part.named_buffers(recurse=False)):
        return False
    taken = [*inspect.signature(type(part).forward).parameters.values()][2:]
    needed = {parameter.name for parameter in taken if parameter.default is parameter.empty}
    # The rotary modules of encoders of images may be called otherwise, with sizes of a grid.
    names = {parameter.name for parameter in taken}
    return "position_ids" in names and needed <= {"position_ids", "layer_type"}


def _most_short(rotary: nn.Module, name: str, longest: int) -> int | None:
    """The longest sequence with the angles of the shortest one; None if all have them, up to `longest`."""
    short, long = _angles_at_length(rotary, 2), _angles_at_length(rotary, longest)
    if short == long:
        return None
    low, high = 2, longest
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _angles_at_length(rotary, middle) == short else (low, middle)
    between = (high, (high + longest) // 2, longest - 1)
    if any(_angles_at_length(rotary, length) != long for length in between if length >= high):
        raise UnsupportedAttention(
            f"rotary angles of {name} change with every length of a sequence from {high} tokens on, which is not "
            "supported"
        )
    return low


def _angles_at_length(rotary: nn.Module, length: int) -> list[bytes]:
    """The angles at position 1 in a call with so many positions, by a copy that has seen no other call."""
    asked: Any = copy.deepcopy(rotary)
    buffer = next(asked.buffers())
    at = torch.tensor([[1, length - 1]], device=buffer.device)
    like = torch.zeros(1, dtype=torch.float32, device=buffer.device)
    angles: list[bytes] = []
    for kwargs in _calls(asked):
        given = asked(like, at, **kwargs)
        parts = given if isinstance(given, tuple) else (torch.view_as_real(given),)
        angles += [part[0, 0].cpu().numpy().tobytes() for part in parts]
    return angles


def _calls(rotary: Any) -> Sequence[dict[str, str]]:
    """The further arguments with which layers call a rotary module: none, or the kind of the layer."""
    if "layer_type" not in inspect.signature(type(rotary).forward).parameters:
        return ({},)
    kinds = rotary.rope_type if isinstance(getattr(rotary, "rope_type", None), dict) else rotary.config.layer_types
    return [{"layer_type": kind} for kind in sorted(set(kinds))]


def _starts_over(module: Any, most_short: int) -> bool:
    """Whether the model's `generate()` drops the cache of a short sequence with one token more, to compute it again."""
    prepare = getattr(module, "prepare_inputs_for_generation", None)
    if prepare is None:
        return False
    cache, nothing = DynamicCache(), torch.zeros(1, 1, most_short, 1)
    cache.update(nothing, nothing, 0)
    token_ids = torch.zeros(1, most_short + 1, dtype=torch.int64)
    return prepare(token_ids, past_key_values=cache, use_cache=True).get("past_key_values") is None
