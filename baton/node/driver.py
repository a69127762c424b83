"""The engine's driver: one thread, the only writer of scheduler, pool and requests.

Everybody else leaves commands in its inbox. It sleeps on the inbox while the engine has nothing to compute, and hands
each step's news to `publish`, on this thread. With asynchronous scheduling the runner computes on a thread of its own,
and this one decides the next step meanwhile (see EngineCore).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from baton.engine.batch import (
    ComputedStep,
    EngineCoreEvent,
    EngineCoreOutput,
    EngineCoreOutputs,
    SchedulerStats,
    StepTimes,
)
from baton.engine.connector import KVTransferOutput
from baton.engine.core import EngineCore
from baton.engine.kv_cache.events import KVEventBatch, KVSnapshot
from baton.engine.request import Request, RequestStatus
from baton.engine.sampling.grammar import TokenMatcher
from baton.errors import BatonError, CacheInUse, InvalidRequest
from baton.messages.node import Outcome
from baton.node.attempts.grammars import NO_GRAMMARS, GrammarCompiler


@dataclass(frozen=True, slots=True)
class StepNews:
    """What a turn of the driver brought: outputs per client index, events, and the load and the times after it."""

    outputs: Mapping[int, EngineCoreOutputs]
    events: Sequence[EngineCoreEvent]
    stats: SchedulerStats
    step_times: StepTimes
    kv_cache: KVEventBatch | KVSnapshot | None = None
    """What became of the prefix cache since the last news that told, while it is watched."""
    step: ComputedStep | None = None
    """The step that was committed, if one was and it computed something."""


@dataclass(frozen=True, slots=True)
class _Add:
    request: Request


@dataclass(frozen=True, slots=True)
class _GrammarCompiled:
    request_id: str
    matchers: Sequence[TokenMatcher]


@dataclass(frozen=True, slots=True)
class _GrammarFailed:
    request_id: str
    error: BatonError


@dataclass(frozen=True, slots=True)
class _Abort:
    request_ids: Sequence[str]


@dataclass(frozen=True, slots=True)
class _WatchKVCache:
    begin: bool


@dataclass(frozen=True, slots=True)
class _ResetPrefixCache:
    answer: Callable[[int | CacheInUse], None]


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


_Order = _Add | _GrammarCompiled | _GrammarFailed | _Abort | KVTransferOutput | _WatchKVCache | _ResetPrefixCache
_Command = _Order | _Stop


class EngineDriver:
    """Runs an engine in its own thread. All methods but `start` and `stop` return at once, from any thread."""

    def __init__(
        self,
        core: EngineCore,
        publish: Callable[[StepNews], None],
        on_crash: Callable[[BaseException], None],
        flush: Callable[[], None] = lambda: None,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        """`on_crash` is called on the thread, which has ended when it returns: from then on nothing is computed.

        `flush` lets go of what the engine's connector left behind: called before a step and after its news are out.
        `grammars`: closed by `stop`. None: a request with a JSON schema fails.
        """
        self._core = core
        self._publish = publish
        self._on_crash = on_crash
        self._flush = flush
        self._grammars = grammars if grammars is not None else GrammarCompiler(None, NO_GRAMMARS)
        self._inbox: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._snapshot_due = False
        self._next_kv_event: int | None = None
        """Of the prefix cache's events, the first that nobody was told of; None: nobody listens."""
        self._thread = threading.Thread(target=self._run, name="baton-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End after the current step; waits for the thread, and for a step that was decided ahead."""
        self._inbox.put(_Stop())
        self._thread.join()
        self._grammars.close()

    def submit(self, request: Request) -> None:
        """Add a request; a duplicate id comes back as an output that ends it with an error.

        One with a JSON schema waits in the engine until that has been compiled.
        """
        if not request.sampling_params.has_grammar:
            self._inbox.put(_Add(request))
            return
        request_id, inbox = request.request_id, self._inbox
        inbox.put(_Add(request))
        self._grammars.compile(
            request,
            lambda matchers: inbox.put(_GrammarCompiled(request_id, matchers)),
            lambda error: inbox.put(_GrammarFailed(request_id, error)),
        )

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests from outside; unknown ids are ignored."""
        self._inbox.put(_Abort(request_ids))

    def tell_transfer(self, news: KVTransferOutput) -> None:
        """Pass on what the transfer side has to say."""
        self._inbox.put(news)

    def watch_kv_cache(self) -> None:
        """Have the next news tell all that is in the prefix cache, and those that follow what became of it."""
        self._inbox.put(_WatchKVCache(True))

    def unwatch_kv_cache(self) -> None:
        """Nobody listens to that any more."""
        self._inbox.put(_WatchKVCache(False))

    def reset_prefix_cache(self, answer: Callable[[int | CacheInUse], None]) -> None:
        """Forget all cached KV; `answer` hears, on the engine's thread, how many blocks it was or why not.

        Nobody is answered once the engine has stopped.
        """
        self._inbox.put(_ResetPrefixCache(answer))

    def _run(self) -> None:
        try:
            try:
                while self._turn():
                    pass
            finally:
                self._core.close()
        except BaseException as error:
            self._on_crash(error)

    def _turn(self) -> bool:
        """Take what is in the inbox (waiting for it when there is nothing to compute), then one step."""
        outputs: list[dict[int, EngineCoreOutputs]] = []
        try:
            command = self._inbox.get(block=not self._core.has_work())
            while True:
                if isinstance(command, _Stop):
                    return False
                outputs.append(self._obey(command))
                command = self._inbox.get_nowait()
        except queue.Empty:
            pass
        finally:
            self._flush()
        if self._core.has_work():
            if any(outputs):
                # Whose end came with the inbox does not wait for a step.
                self._tell(outputs)
                outputs = []
            outputs.append(self._core.step())
        self._tell(outputs)
        self._flush()
        return True

    def _tell(self, outputs: Sequence[dict[int, EngineCoreOutputs]]) -> None:
        core = self._core
        merged, kv_cache = _merge(outputs), self._kv_cache_news()
        events, stats, step = core.take_events(), core.make_stats(), core.take_computed_step()
        self._publish(StepNews(merged, events, stats, core.step_times, kv_cache, step))

    def _kv_cache_news(self) -> KVEventBatch | KVSnapshot | None:
        scheduler = self._core.scheduler
        if self._next_kv_event is not None and not self._snapshot_due:
            batch = scheduler.kv_events_since(self._next_kv_event)
            if batch.complete:
                self._next_kv_event = batch.next_sequence
                return batch if batch.events else None
        elif not self._snapshot_due:
            return None
        # Somebody new listens, or a single turn had more events than are kept.
        snapshot = scheduler.kv_snapshot()
        self._snapshot_due, self._next_kv_event = False, snapshot.next_sequence
        return snapshot

    def _obey(self, command: _Order) -> dict[int, EngineCoreOutputs]:
        if isinstance(command, _Add):
            try:
                self._core.add_request(command.request)
            except BatonError as error:
                return {command.request.client_index: EngineCoreOutputs([_refused(command.request, error)])}
            return self._core.scheduler.take_refusals()
        if isinstance(command, _GrammarCompiled):
            self._core.grammar_compiled(command.request_id, command.matchers)
            return {}
        if isinstance(command, _GrammarFailed):
            is_invalid = isinstance(command.error, InvalidRequest)
            status = RequestStatus.INVALID if is_invalid else RequestStatus.ERROR
            return self._core.finish_requests([command.request_id], status, str(command.error))
        if isinstance(command, _Abort):
            return self._core.finish_requests(command.request_ids, RequestStatus.ABORTED)
        if isinstance(command, _WatchKVCache):
            self._snapshot_due = command.begin
            if not command.begin:
                self._next_kv_event = None
                self._core.scheduler.stop_kv_events()
            return {}
        if isinstance(command, _ResetPrefixCache):
            command.answer(self._reset_prefix_cache())
            return {}
        return self._core.update_from_kv_transfer(command)

    def _reset_prefix_cache(self) -> int | CacheInUse:
        scheduler = self._core.scheduler
        num_blocks = scheduler.kv_cache_manager.num_cached_blocks
        if scheduler.reset_prefix_cache():
            return num_blocks
        return CacheInUse(f"the prefix cache stays as it is, since blocks are in use: {scheduler.blocks_in_use()}")


def _refused(request: Request, error: BatonError) -> EngineCoreOutput:
    return EngineCoreOutput(request.request_id, (), 0, outcome=Outcome.ERROR, error=str(error))


def _merge(parts: Sequence[Mapping[int, EngineCoreOutputs]]) -> Mapping[int, EngineCoreOutputs]:
    """One mapping of several turns' outputs, in order."""
    if len(parts) == 1:
        return parts[0]
    merged: dict[int, list[EngineCoreOutput]] = {}
    for part in parts:
        for index, outputs in part.items():
            merged.setdefault(index, []).extend(outputs.outputs)
    return {index: EngineCoreOutputs(outputs) for index, outputs in merged.items()}
