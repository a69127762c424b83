"""The work of a step's attention on the device: dealt once for each kind of layer, or kept in place for a graph."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from baton.runner.backends.attention_work.dealing import FIELDS, SPLIT, Dealt, Int32Array, Launch, WorkKind, deal


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """A `Dealt` on the device."""

    launches: tuple[Launch, ...]
    items: tuple[torch.Tensor, ...]
    """int32, as in `Dealt`."""
    num_items: tuple[int, ...]
    """The most items that each may have."""
    members: torch.Tensor
    merges: torch.Tensor
    most_merges: int
    most_leaves: int
    is_kept: bool
    """Whether there may be fewer of all, which only the device is told."""


class StepWork:
    """The lengths of a step's sequences for one group of layers, and its work for each kind of them.

    Called from one thread.
    """

    def __init__(
        self,
        query_start: Int32Array,
        seq_lens: Int32Array,
        device: torch.device,
        sharing: Int32Array | None = None,
    ) -> None:
        """`sharing`: what `find_shared_splits` found."""
        self.query_start = query_start
        self.seq_lens = seq_lens
        self.sharing = sharing
        self._device = device
        self._dealt: dict[WorkKind, Dealt] = {}
        self._on_device: dict[WorkKind, DeviceWork] = {}

    @classmethod
    def read(cls, query_start: torch.Tensor, seq_lens: torch.Tensor) -> StepWork:
        """The work of a call whose caller has lengths on the device only: they are read from there."""
        return cls(query_start.cpu().numpy(), seq_lens.cpu().numpy(), seq_lens.device)

    def padded(self, size: int) -> StepWork:
        """The work with sequences of one key behind these, `size` in all; each has one row."""
        count = self.seq_lens.size
        sharing = self.sharing
        if sharing is not None:
            others = np.arange(count, size, dtype=np.int32)
            sharing = np.concatenate([sharing, np.tile(others, (sharing.shape[0], 1))], axis=1)
        lengths = np.concatenate([self.seq_lens, np.ones(size - count, np.int32)])
        return StepWork(np.arange(size + 1, dtype=np.int32), lengths, self._device, sharing)

    @property
    def num_rows(self) -> int:
        return int(self.query_start[-1])

    def dealt(self, kind: WorkKind) -> Dealt:
        found = self._dealt.get(kind)
        if found is None:
            sharing = self.sharing if kind.shares else None
            found = self._dealt[kind] = deal(self.query_start, self.seq_lens, kind, sharing)
        return found

    def on_device(self, kind: WorkKind) -> DeviceWork:
        """The work for layers of a kind."""
        found = self._on_device.get(kind)
        if found is None:
            dealt = self.dealt(kind)
            arrays = (*dealt.items, dealt.merges, np.ascontiguousarray(dealt.members))
            # One copy for all.
            flat = torch.from_numpy(np.concatenate([array.ravel() for array in arrays])).to(
                self._device, non_blocking=True
            )
            *items, merges, members = torch.split(flat, [array.size for array in arrays])
            found = self._on_device[kind] = DeviceWork(
                dealt.launches,
                tuple(items),
                tuple(array.shape[0] - 1 for array in dealt.items),
                members,
                merges,
                dealt.merges.shape[0] - 1,
                dealt.num_leaves,
                False,
            )
        return found


class KeptWork(StepWork):
    """The work of a graph's steps at fixed addresses, of sequences of at most `max_len` keys with a row each.

    The kinds of layers are those that ask while the graph is recorded. All of its steps have the same modes.
    """

    def __init__(self, first: StepWork, max_len: int, device: torch.device) -> None:
        super().__init__(first.query_start, first.seq_lens, device, first.sharing)
        self._step = first
        self._splits = -(-max_len // SPLIT)
        self._kept: dict[WorkKind, _Kept] = {}

    @property
    def kinds(self) -> tuple[WorkKind, ...]:
        return tuple(self._kept)

    def take(self, step: StepWork) -> None:
        """Put another step's work in the place of the last one's."""
        self._step, self.seq_lens, self.sharing = step, step.seq_lens, step.sharing
        for kind, kept in self._kept.items():
            kept.take(step.dealt(kind))

    def dealt(self, kind: WorkKind) -> Dealt:
        return self._step.dealt(kind)

    def on_device(self, kind: WorkKind) -> DeviceWork:
        kept = self._kept.get(kind)
        if kept is None:
            dealt = self.dealt(kind)
            kept = self._kept[kind] = _Kept(dealt, self.seq_lens.size, self._splits, kind, self._device)
            kept.take(dealt)
        return kept.work


class _Kept:
    """The buffers of one kind of layer."""

    def __init__(self, first: Dealt, size: int, splits: int, kind: WorkKind, device: torch.device) -> None:
        most = min(size * splits, kind.most_leaves + size)
        shapes = [1 + most if launch.divided else 1 + size for launch in first.launches]
        sizes = [*(shape * FIELDS for shape in shapes), (1 + size) * FIELDS, 2 * most]
        self._host = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self._hosts = [part.numpy() for part in torch.split(self._host, sizes)]
        self._parts = torch.split(self._device, sizes)
        *items, merges, members = self._parts
        is_divided = any(launch.divided for launch in first.launches)
        self.work = DeviceWork(
            first.launches,
            tuple(items),
            tuple(shape - 1 for shape in shapes),
            members,
            merges,
            size if is_divided else 0,
            min(most, kind.most_leaves) if is_divided else 0,
            True,
        )

    def take(self, dealt: Dealt) -> None:
        """Copy without waiting: the step's result is read before the host memory is written again."""
        for host, part, array in zip(
            self._hosts, self._parts, (*dealt.items, dealt.merges, dealt.members), strict=True
        ):
            host[: array.size] = array.ravel()
            part[: array.size].copy_(torch.from_numpy(host[: array.size]), non_blocking=True)
