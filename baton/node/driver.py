"""The engine's driver: the one thread that changes scheduler, block pool and requests.

All other threads put commands into its inbox. It sleeps on the inbox while the engine has nothing to compute, and calls
`publish` with the news of each step, on this thread. With asynchronous scheduling the runner computes on a thread of
its own, and this thread decides the next step meanwhile (see `EngineCore`).
"""

from __future__ import annotations

import math
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace

import structlog

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
from baton.engine.request import Request
from baton.engine.runner import ModelRunner, StepExecutor
from baton.engine.scheduler import Scheduler
from baton.engine.scheduler_state import failure_of
from baton.errors import BatonError, CacheInUse
from baton.messages.node import MoveOut, Outcome
from baton.node.adapters.adapter_cache import (
    AdapterCache,
    AdapterFailed,
    AdapterFault,
    AdapterNews,
    AdapterReady,
    CacheEffect,
    LoadAdapter,
    UnloadAdapter,
)
from baton.node.adapters.adapter_threads import AdapterThreads
from baton.node.attempts.grammars import NO_GRAMMARS, GrammarCompiler
from baton.node.encoding import EncoderThread, RowSource
from baton.node.row_requests import Answers, RowRequests, WantedRows

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class StepNews:
    """The news of one turn of the driver: outputs by client index, events, and the load and step times after it."""

    outputs: EngineCoreOutputs
    events: Sequence[EngineCoreEvent]
    stats: SchedulerStats
    step_times: StepTimes
    kv_cache: KVEventBatch | KVSnapshot | None = None
    """Changes of the prefix cache since the last news that had any, or all that is in it; None while nobody watches."""
    step: ComputedStep | None = None
    """The step that was committed; None if there was none, or if it computed nothing."""
    adapters: AdapterNews | None = None
    """What has changed about adapters in memory; None: nothing."""


_Command = Callable[[], EngineCoreOutputs | None]
"""What another thread wants of the engine: called on the engine's thread, it returns results that it brought about."""


class EngineDriver:
    """Runs an engine in its own thread. All methods but `start` and `stop` return at once, from any thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        publish: Callable[[StepNews], None],
        on_crash: Callable[[BaseException], None],
        *,
        executor: StepExecutor | None = None,
        flush: Callable[[], None] = lambda: None,
        grammars: GrammarCompiler | None = None,
        adapters: AdapterThreads | None = None,
        max_cpu_loras: int = 1,
        rows: RowSource | None = None,
    ) -> None:
        """`on_crash` is called on the thread, as the last thing before it ends: from then on nothing is computed.

        `executor`: see `EngineCore`. `flush` posts what the engine's connector has kept back; it is called before each
        step and after `publish`. `grammars` is closed by `stop`; None: a request with a JSON schema fails. `adapters`
        loads adapters, of which at most `max_cpu_loras` are in memory; None: a request with an adapter fails. `rows`:
        where rows of inputs may come from, apart from the runner's encoder.
        """
        self._scheduler = scheduler
        self._runner = runner
        self._publish = publish
        self._on_crash = on_crash
        self._flush = flush
        self._inbox: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        """What other threads want of the engine; None: it is to stop."""
        self._row_requests = RowRequests(scheduler.encoder_cache)
        self._encoder = EncoderThread(scheduler, runner, self._post_of_encoder, rows, self._on_rows)
        self._core = EngineCore(scheduler, runner, executor, self._encoder)
        self._grammars = grammars if grammars is not None else GrammarCompiler(None, NO_GRAMMARS)
        self._adapters = adapters
        self._adapter_cache = AdapterCache(max_cpu_loras, scheduler.clock)
        self._unloads: deque[tuple[str, int]] = deque()
        """Adapters to unload, each once so many steps are committed: a step in flight may name them."""
        self._adapter_news_due = False
        self._adapter_faults: dict[str, AdapterFault] = {}
        self._num_adapter_loads = 0
        self._snapshot_due = False
        self._next_kv_event: int | None = None
        """Sequence number of the first event of the prefix cache that is not published; None: nobody watches."""
        self._thread = threading.Thread(target=self._run, name="baton-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End after the current step; waits for the thread, and for a step that was scheduled ahead.

        Waits a while for adapters that are being loaded, too, and takes all out of memory: the runner may serve another
        incarnation of this node.
        """
        self._inbox.put(None)
        self._thread.join()
        if self._adapters is not None:
            self._adapters.close()
        for digest in self._adapter_cache.in_memory:
            self._runner.adapters.unload(digest)
        self._grammars.close()
        self._encoder.close()

    def submit(self, request: Request, adapter_directory: str = "") -> None:
        """Add a request; one with an id that is in use is answered by an output that ends it with an error.

        A request with a JSON schema waits in the engine until the schema is compiled, and one with an adapter until
        that is loaded from `adapter_directory`.
        """
        self._inbox.put(lambda: self._add(request, adapter_directory))
        if request.sampling_params.has_grammar:
            request_id, inbox, scheduler = request.request_id, self._inbox, self._scheduler
            self._grammars.compile(
                request,
                lambda matchers: inbox.put(lambda: scheduler.grammar_compiled(request_id, matchers)),
                lambda error: inbox.put(lambda: scheduler.end_requests([request_id], *failure_of(error))),
            )

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests from outside; unknown ids are ignored."""
        self._inbox.put(lambda: self._scheduler.end_requests(request_ids, Outcome.ABORTED))

    def abort_sequence(self, request_id: str, index: int) -> None:
        """End one sequence of a request from outside; one that does not live is ignored."""
        self._inbox.put(lambda: self._scheduler.end_sequence(request_id, index, Outcome.ABORTED))

    def move(self, request_id: str, move: MoveOut) -> None:
        """Let another node take a request over, see `Scheduler.move`."""
        self._inbox.put(lambda: self._scheduler.move(request_id, move))

    def tell_transfer(self, news: KVTransferOutput) -> None:
        """Pass on that KV arrived, failed to arrive, or that blocks were released."""
        self._inbox.put(lambda: self._scheduler.update_from_kv_transfer(news))

    def want_rows(self, wanted: WantedRows) -> None:
        """Have the rows of an input made for another node, and held until `end_rows`. For an encode node alone.

        Its `answer` is called on the engine's thread, or not at all once the engine has stopped.
        """
        self._inbox.put(lambda: self._answer(self._row_requests.add(wanted)))

    def end_rows(self, number: int) -> None:
        """The other node has read the rows, or has left. Idempotent."""
        self._inbox.put(lambda: self._answer(self._row_requests.end(number)))

    def keep_adapters(self, digests: Set[str]) -> None:
        """Take the adapters that routers want: others leave memory as soon as no request uses them."""
        self._inbox.put(lambda: self._adapter_cache.keep_only(digests))

    def watch_kv_cache(self) -> None:
        """Publish all that is in the prefix cache with the next news, and its changes from then on."""
        self._inbox.put(lambda: self._watch_kv_cache(begin=True))

    def unwatch_kv_cache(self) -> None:
        """Publish nothing of the prefix cache any more."""
        self._inbox.put(lambda: self._watch_kv_cache(begin=False))

    def reset_prefix_cache(self, answer: Callable[[int | CacheInUse], None]) -> None:
        """Forget all cached KV; `answer` is called on the engine's thread with the number of blocks, or why none was.

        It is not called once the engine has stopped.
        """
        self._inbox.put(lambda: answer(self._reset_prefix_cache()))

    def _post_of_encoder(self, note: Callable[[], None]) -> None:
        self._inbox.put(lambda: self._on_encoded(note))

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
        outputs: list[EngineCoreOutputs] = []
        if self._do_commands(outputs):
            self._flush()
            return False
        if ended := self._advance_adapters():
            outputs.append(ended)
        # Routers are told that a command has ended a request before the nodes that wait for its KV are told, which
        # would report to them that it was lost.
        if self._core.has_work():
            if outputs:
                # Such a request need not wait for the step.
                self._publish_news(outputs)
                outputs = []
            self._flush()
            outputs.append(self._core.step())
            if ended := self._advance_adapters():
                outputs.append(ended)
        self._publish_news(outputs)
        self._flush()
        return True

    def _do_commands(self, outputs: list[EngineCoreOutputs]) -> bool:
        """Execute the commands in the inbox; their results go to `outputs`. Returns whether the engine is to stop."""
        try:
            command = self._inbox.get(block=not self._core.has_work(), timeout=self._seconds_to_deadline())
            while command is not None:
                if ended := command():
                    outputs.append(ended)
                command = self._inbox.get_nowait()
        except queue.Empty:
            return False
        return True

    def _publish_news(self, outputs: Sequence[EngineCoreOutputs]) -> None:
        core = self._core
        merged, kv_cache = _merge(outputs), self._kv_cache_news()
        events, stats, step = self._scheduler.take_events(), self._stats(), core.take_computed_step()
        self._publish(StepNews(merged, events, stats, core.step_times, kv_cache, step, self._take_adapter_news()))

    def _stats(self) -> SchedulerStats:
        """The engine's load; of an encode node that is what other nodes ask it for."""
        stats, rows = self._scheduler.make_stats(), self._row_requests
        if not (rows.num_running or rows.num_waiting):
            return stats
        return replace(
            stats, num_running=stats.num_running + rows.num_running, num_waiting=stats.num_waiting + rows.num_waiting
        )

    def _kv_cache_news(self) -> KVEventBatch | KVSnapshot | None:
        scheduler = self._scheduler
        if self._next_kv_event is not None and not self._snapshot_due:
            batch = scheduler.kv_cache_manager.kv_events.since(self._next_kv_event)
            if batch.complete:
                self._next_kv_event = batch.next_sequence
                return batch if batch.events else None
        elif not self._snapshot_due:
            return None
        # Somebody has begun to watch, or a single turn had more events than are kept.
        snapshot = scheduler.kv_snapshot()
        self._snapshot_due, self._next_kv_event = False, snapshot.next_sequence
        return snapshot

    # --- commands ---

    def _add(self, request: Request, adapter_directory: str) -> EngineCoreOutputs:
        try:
            self._scheduler.add_request(request, awaits_adapter=bool(request.adapter))
        except BatonError as error:
            return {request.client_index: [_refused(request, error)]}
        refusals = self._scheduler.take_refusals()
        if request.adapter and not request.is_finished:
            ended = self._perform(self._adapter_cache.want(request.request_id, request.adapter, adapter_directory))
            return _merge([refusals, ended])
        return refusals

    def _on_encoded(self, note: Callable[[], None]) -> EngineCoreOutputs:
        """Let the encoder tell the scheduler of an input. One that can't be encoded may have ended requests."""
        note()
        return self._scheduler.take_refusals()

    def _on_rows(self, digest: str, error: Exception | None) -> None:
        requests = self._row_requests
        self._answer(requests.encoded(digest) if error is None else requests.failed(digest, error))

    def _answer(self, answers: Answers) -> None:
        for wanted, error in answers:
            wanted.answer(error)
        if self._row_requests.is_used:
            # No step of an encode node does it.
            self._core.do_encoder_work()

    def _watch_kv_cache(self, *, begin: bool) -> None:
        self._snapshot_due = begin
        if not begin:
            self._next_kv_event = None
            self._scheduler.kv_cache_manager.kv_events.stop()

    def _reset_prefix_cache(self) -> int | CacheInUse:
        num_blocks = self._scheduler.kv_cache_manager.num_cached_blocks
        if self._scheduler.kv_cache_manager.reset_prefix_cache():
            return num_blocks
        in_use = self._scheduler.kv_cache_manager.blocks_in_use()
        return CacheInUse(f"the prefix cache stays as it is, since blocks are in use: {in_use}")

    # --- adapters ---

    def _on_adapter_loaded(self, digest: str, fault: AdapterFault | None) -> EngineCoreOutputs:
        self._adapter_news_due = True
        if fault is not None:
            self._adapter_faults[digest] = fault
        else:
            self._num_adapter_loads += 1
        return self._perform(self._adapter_cache.load_ended(digest, fault.reason if fault is not None else ""))

    @property
    def has_due(self) -> bool:
        """Whether something about adapters is to be given up now."""
        return self._adapter_cache.deadline <= self._scheduler.clock.monotonic()

    def _seconds_to_deadline(self) -> float | None:
        deadline = self._adapter_cache.deadline
        return None if deadline == math.inf else max(0.0, deadline - self._scheduler.clock.monotonic())

    def _advance_adapters(self) -> EngineCoreOutputs:
        """Unload and load what may be by now; this is almost always nothing."""
        cache, outputs = self._adapter_cache, []
        if self.has_due:
            outputs.append(self._perform(cache.expire()))
        while True:
            if cache.needs_turn:
                outputs.append(self._perform(cache.turn(self._scheduler.adapters_in_use())))
            if not (self._unloads and self._unloads[0][1] <= self._core.num_committed_steps):
                return _merge(outputs)
            digest, _ = self._unloads.popleft()
            self._runner.adapters.unload(digest)
            cache.unloaded(digest)
            self._adapter_news_due = True

    def _perform(self, effects: Sequence[CacheEffect]) -> EngineCoreOutputs:
        outputs: list[EngineCoreOutputs] = []
        for effect in effects:
            match effect:
                case LoadAdapter(digest, directory):
                    self._load(digest, directory)
                case UnloadAdapter(digest):
                    self._unloads.append((digest, self._core.num_submitted_steps))
                case AdapterReady(request_ids):
                    for request_id in request_ids:
                        self._scheduler.adapter_loaded(request_id)
                case AdapterFailed(request_ids, reason):
                    unavailable = Outcome.ADAPTER_UNAVAILABLE
                    outputs.append(self._scheduler.end_requests(request_ids, unavailable, reason))
        return _merge(outputs)

    def _load(self, digest: str, directory: str) -> None:
        inbox = self._inbox
        if self._adapters is None:
            inbox.put(lambda: self._on_adapter_loaded(digest, AdapterFault("this node loads no adapters")))
            return
        self._adapters.load(digest, directory, lambda fault: inbox.put(lambda: self._on_adapter_loaded(digest, fault)))

    def _take_adapter_news(self) -> AdapterNews | None:
        if not self._adapter_news_due:
            return None
        faults, self._adapter_faults = self._adapter_faults, {}
        self._adapter_news_due = False
        return AdapterNews(self._adapter_cache.loaded, faults, self._num_adapter_loads)


def _refused(request: Request, error: BatonError) -> EngineCoreOutput:
    return EngineCoreOutput(request.attempt, (), 0, outcome=Outcome.ERROR, error=str(error))


def _merge(parts: Sequence[EngineCoreOutputs]) -> EngineCoreOutputs:
    """Merge the outputs of several commands and a step into one mapping, in order."""
    if len(parts) == 1:
        return parts[0]
    merged: dict[int, list[EngineCoreOutput]] = {}
    for part in parts:
        for index, outputs in part.items():
            merged.setdefault(index, []).extend(outputs)
    return merged
