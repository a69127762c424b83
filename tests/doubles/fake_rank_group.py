"""Ranks in threads of this process: they load their model one after the other, and compute at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue

from baton.runner.adapters.commands import AdapterAnswer, AdapterCommand, AdapterPart, done
from baton.runner.adapters.model_adapters import ModelAdapters
from baton.runner.backends.cpu.kernels.barrier import sleep_at_once
from baton.runner.backends.cpu.kernels.errors import RankLost
from baton.runner.backends.ranks.host_ranks import SharedFiles
from baton.runner.ranks.rank import FollowingRank
from baton.runner.stage_spec import StageSpec


class _LoadedRank:
    """A rank that does what it is asked of adapters before `ask` returns."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.adapters = SimpleQueue[ModelAdapters]()
        """Gets those of the rank once it has loaded its part of the model."""
        self.known: ModelAdapters | None = None

    def ask(self, command: AdapterCommand) -> Future[AdapterAnswer]:
        if self.known is None:
            self.known = self.adapters.get()
        answer: Future[AdapterAnswer] = Future()
        answer.set_result(done(self.known, command))
        return answer


class FakeRankGroup:
    """Stands for `RankGroup`: its ranks are threads, which can be lost only by `declare_lost`."""

    def __init__(self, spec: StageSpec, files: SharedFiles, abort: Callable[[], None]) -> None:
        # Ranks that are threads wait for the interpreter's lock, which a spinning rank does not need.
        sleep_at_once()
        self._abort = abort
        self._callback: Callable[[str], None] | None = None
        self._is_closing = False
        self.why_lost = ""
        self.pids: Sequence[int] = ()
        followers = [FollowingRank(spec, rank, files) for rank in range(1, spec.tensor_parallel)]
        for follower in followers:
            follower.load()
        self._loaded = [_LoadedRank(f"rank {spec.number_of(rank)}") for rank in range(1, spec.tensor_parallel)]
        self._threads = [
            threading.Thread(target=self._follow, args=one) for one in zip(followers, self._loaded, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def adapter_parts(self) -> Sequence[AdapterPart]:
        return self._loaded

    def _follow(self, follower: FollowingRank, loaded: _LoadedRank) -> None:
        try:
            follower.follow(loaded.adapters.put)
        except RankLost:
            return
        except Exception as error:
            self.declare_lost(f"{type(error).__name__}: {error}")

    def declare_lost(self, reason: str) -> None:
        """Declare the ranks lost, as if one of them had ended. Ranks that are being ended are not lost."""
        if self.why_lost or self._is_closing:
            return
        self.why_lost = reason
        self._abort()
        if self._callback is not None:
            self._callback(reason)

    def on_lost(self, callback: Callable[[str], None]) -> None:
        self._callback = callback
        if self.why_lost:
            callback(self.why_lost)

    def close(self) -> None:
        self._is_closing = True
        self._abort()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
