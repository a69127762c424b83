"""The engine's driver: the one thread that changes scheduler, block pool and requests.

All other threads put commands into its inbox. It sleeps on the inbox while the engine has nothing to compute, and calls
`publish` with the news of each step, on this thread. With asynchronous scheduling the runner computes on a thread of
its own, and this thread decides the next step meanwhile (see `EngineCore`).
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
    """The news of one turn of the driver: outputs by client index, events, and the load and step times after it."""

    outputs: Mapping[int, EngineCoreOutputs]
    events: Sequence[EngineCoreEvent]
    stats: SchedulerStats
    step_times: StepTimes
    kv_cache: KVEventBatch | KVSnapshot | None = None
    """Changes of the prefix cache since the last news that had any, or all that is in it; None while nobody watches."""
    step: ComputedStep | None = None
    """The step that was committed; None if there was none, or if it computed nothing."""


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


_EngineCommand = (
    _Add | _GrammarCompiled | _GrammarFailed | _Abort | KVTransferOutput | _WatchKVCache | _ResetPrefixCache
)
_Command = _EngineCommand | _Stop


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
        """`on_crash` is called on the thread, as the last thing before it ends: from then on nothing is computed.

        `flush` posts what the engine's connector has kept back; it is called before each step and after `publish`.
        `grammars` is closed by `stop`; None: a request with a JSON schema fails.
        """
        self._core = core
        self._publish = publish
        self._on_crash = on_crash
        self._flush = flush
        self._grammars = grammars if grammars is not None else GrammarCompiler(None, NO_GRAMMARS)
        self._inbox: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._snapshot_due = False
        self._next_kv_event: int | None = None
        """Sequence number of the first event of the prefix cache that is not published; None: nobody watches."""
        self._thread = threading.Thread(target=self._run, name="baton-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End after the current step; waits for the thread, and for a step that was scheduled ahead."""
        self._inbox.put(_Stop())
        self._thread.join()
        self._grammars.close()

    def submit(self, request: Request) -> None:
        """Add a request; one with an id that is in use is answered by an output that ends it with an error.

        A request with a JSON schema waits in the engine until the schema is compiled.
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
        """Pass on that KV arrived, failed to arrive, or that blocks were released."""
        self._inbox.put(news)

    def watch_kv_cache(self) -> None:
        """Publish all that is in the prefix cache with the next news, and its changes from then on."""
        self._inbox.put(_WatchKVCache(True))

    def unwatch_kv_cache(self) -> None:
        """Publish nothing of the prefix cache any more."""
        self._inbox.put(_WatchKVCache(False))

    def reset_prefix_cache(self, answer: Callable[[int | CacheInUse], None]) -> None:
        """Forget all cached KV; `answer` is called on the engine's thread with the number of blocks, or why none was.

        It is not called once the engine has stopped.
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
        """Execute the commands in the inbox, waiting for one when there is nothing to compute; then take one step."""
        outputs: list[dict[int, EngineCoreOutputs]] = []
        try:
            command = self._inbox.get(block=not self._core.has_work())
            while True:
                if isinstance(command, _Stop):
                    return False
                outputs.append(self._execute(command))
                command = self._inbox.get_nowait()
        except queue.Empty:
            pass
        finally:
            self._flush()
        if self._core.has_work():
            if any(outputs):
                # Requests that a command has ended need not wait for the step.
                self._publish_news(outputs)
                outputs = []
            outputs.append(self._core.step())
        self._publish_news(outputs)
        self._flush()
        return True

    def _publish_news(self, outputs: Sequence[dict[int, EngineCoreOutputs]]) -> None:
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
        # Somebody has begun to watch, or a single turn had more events than are kept.
        snapshot = scheduler.kv_snapshot()
        self._snapshot_due, self._next_kv_event = False, snapshot.next_sequence
        return snapshot

    def _execute(self, command: _EngineCommand) -> dict[int, EngineCoreOutputs]:
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
    """Merge the outputs of several commands and a step into one mapping, in order."""
    if len(parts) == 1:
        return parts[0]
    merged: dict[int, list[EngineCoreOutput]] = {}
    for part in parts:
        for index, outputs in part.items():
            merged.setdefault(index, []).extend(outputs.outputs)
    return {index: EngineCoreOutputs(outputs) for index, outputs in merged.items()}
