"""What leads the processes that compute beside a runner's own, and these processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from baton.engine.batch import SchedulerOutput
from baton.engine.runner import RemotePart
from baton.messages.node_report import RankReport
from baton.runner.adapters.commands import AdapterPart
from baton.runner.adapters.in_parts import AdaptersInParts
from baton.runner.adapters.model_adapters import ModelAdapters


class FollowingRanks(Protocol):
    """The ranks behind the first one, as `RankGroup` runs them in processes."""

    @property
    def pids(self) -> Sequence[int]:
        """Their process ids, in order; empty if they are no processes."""
        ...

    @property
    def why_lost(self) -> str:
        """Why the ranks are lost; empty while they are not."""
        ...

    @property
    def adapter_parts(self) -> Sequence[AdapterPart]:
        """The ranks, or the other stages, which load adapters with this process."""
        ...

    def on_lost(self, callback: Callable[[str], None]) -> None:
        """Call `callback` with the reason once the ranks are lost, from any thread, or now if they are lost.

        It replaces the callback that was given before.
        """
        ...

    def declare_lost(self, reason: str) -> None:
        """Declare the ranks lost: no step can be computed any more. Only the first reason counts."""
        ...

    def close(self) -> None:
        """End the ranks, and wait for them; idempotent."""
        ...


class RankLeader(Protocol):
    """Leads the other ranks or stages of a model until `close`."""

    @property
    def followers(self) -> FollowingRanks:
        """The ranks or stages that it leads."""
        ...

    @property
    def remote_parts(self) -> Sequence[RemotePart]:
        """The parts of the KV cache that the others have; empty if all share one."""
        ...

    def rank_reports(self) -> Sequence[RankReport]:
        """Reports on this process and the others, in order; empty if they are no processes."""
        ...

    def adapters_of(self, own: ModelAdapters) -> AdaptersInParts:
        """The adapters of the whole model, of which this process has `own`."""
        ...

    def announce_copies(self, decided: SchedulerOutput) -> None:
        """Make those with parts of the KV cache copy the blocks that a step copies. None may be computing."""
        ...

    def await_copies(self) -> None:
        """Wait until they have made the copies that were announced last: then blocks may be used otherwise."""
        ...

    def end_ranks(self) -> None:
        """End the others, and with RankLost a step that is being computed; idempotent."""
        ...

    def close(self) -> None:
        """End the others, and close what they shared; idempotent. No step may be computed now."""
        ...
