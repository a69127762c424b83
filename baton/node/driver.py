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
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass

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
from baton.engine.constraints import TokenMatcher
from baton.engine.core import EngineCore
from baton.engine.encoder_cache import EncoderInput
from baton.engine.kv_cache.events import KVEventBatch, KVSnapshot
from baton.engine.request import Request, RequestStatus
from baton.errors import BatonError, CacheInUse, InvalidRequest
from baton.messages.node import Outcome
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
from baton.node.encoding.encoder_thread import EncoderThread
from baton.node.encoding.row_fetcher import RowSource

_log = structlog.get_logger(__name__)


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
    adapters: AdapterNews | None = None
    """What has changed about adapters in memory; None: nothing."""


@dataclass(frozen=True, slots=True)
class _Add:
    request: Request
    adapter_directory: str = ""


@dataclass(frozen=True, slots=True)
class _GrammarCompiled:
    request_id: str
    matchers: Sequence[TokenMatcher]


@dataclass(frozen=True, slots=True)
class _GrammarFailed:
    request_id: str
    error: BatonError


@dataclass(frozen=True, slots=True)
class _Encoded:
    digest: str


@dataclass(frozen=True, slots=True)
class _EncodingFailed:
    digest: str
    error: BatonError


@dataclass(frozen=True, slots=True)
class _Fetched:
    each: EncoderInput
    rows: bytes | None
    """None: they could not be fetched."""


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
class _KeepAdapters:
    digests: Set[str]


@dataclass(frozen=True, slots=True)
class _AdapterLoaded:
    digest: str
    fault: AdapterFault | None
    """Why it could not be loaded; None: it is loaded."""


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


_AdapterCommand = _KeepAdapters | _AdapterLoaded
_EngineCommand = (
    _Add
    | _GrammarCompiled
    | _GrammarFailed
    | _Encoded
    | _EncodingFailed
    | _Fetched
    | _Abort
    | KVTransferOutput
    | _WatchKVCache
    | _ResetPrefixCache
    | _AdapterCommand
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
        adapters: AdapterThreads | None = None,
        max_cpu_loras: int = 1,
        rows: RowSource | None = None,
    ) -> None:
        """`on_crash` is called on the thread, as the last thing before it ends: from then on nothing is computed.

        `flush` posts what the engine's connector has kept back; it is called before each step and after `publish`.
        `grammars` is closed by `stop`; None: a request with a JSON schema fails. `adapters` loads adapters, of which at
        most `max_cpu_loras` are in memory; None: a request with an adapter fails. `rows`: where rows of inputs may come
        from, apart from the runner's encoder.
        """
        self._core = core
        self._publish = publish
        self._on_crash = on_crash
        self._flush = flush
        self._grammars = grammars if grammars is not None else GrammarCompiler(None, NO_GRAMMARS)
        self._adapters = adapters
        self._clock = core.scheduler.clock
        self._adapter_cache = AdapterCache(max_cpu_loras, self._clock)
        self._unloads: deque[tuple[str, int]] = deque()
        """Adapters to unload, each once so many steps are committed: a step in flight may name them."""
        self._adapter_news_due = False
        self._adapter_faults: dict[str, AdapterFault] = {}
        self._num_adapter_loads = 0
        self._inbox: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._rows = rows
        self._fetching: set[str] = set()
        """Inputs whose rows are being fetched, by digest."""
        self._encoder = EncoderThread(core.runner, self._clock, rows.encoded if rows is not None else _ignore)
        core.start_encoding, core.forget_encoded = self._start_encoding, self._forget_encoded
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
        self._inbox.put(_Stop())
        self._thread.join()
        if self._adapters is not None:
            self._adapters.end()
        for digest in self._adapter_cache.in_memory:
            self._core.runner.adapters.unload(digest)
        self._grammars.close()
        self._encoder.close()

    def submit(self, request: Request, adapter_directory: str = "") -> None:
        """Add a request; one with an id that is in use is answered by an output that ends it with an error.

        A request with a JSON schema waits in the engine until the schema is compiled, and one with an adapter until
        that is loaded from `adapter_directory`.
        """
        if not request.sampling_params.has_grammar:
            self._inbox.put(_Add(request, adapter_directory))
            return
        request_id, inbox = request.request_id, self._inbox
        inbox.put(_Add(request, adapter_directory))
        self._grammars.compile(
            request,
            lambda matchers: inbox.put(_GrammarCompiled(request_id, matchers)),
            lambda error: inbox.put(_GrammarFailed(request_id, error)),
        )

    def _forget_encoded(self, digests: Sequence[str]) -> None:
        self._encoder.cancel(digests)
        self._core.runner.encoder.forget(digests)

    def _start_encoding(self, each: EncoderInput) -> None:
        if self._rows is None or each.content.held_by is None:
            self._encode(each)
            return
        inbox = self._inbox
        self._fetching.add(each.digest)
        self._rows.fetch(each, lambda rows: inbox.put(_Fetched(each, rows)), lambda: inbox.put(_Fetched(each, None)))

    def _on_fetched(self, each: EncoderInput, rows: bytes | None) -> None:
        was_open = each.digest in self._fetching
        self._fetching.discard(each.digest)
        if not (was_open and self._core.scheduler.encoder_cache.awaits(each.digest)):
            return
        try:
            if rows is not None:
                self._core.input_fetched(each.digest, each.num_rows, rows)
                return
        except ValueError as error:
            _log.warning("rows that were fetched can't be used, and are made here", reason=str(error))
        self._encode(each)

    def _encode(self, each: EncoderInput) -> None:
        # A fetch for a request that has ended may still be open. Its answer must not have the input encoded once more.
        self._fetching.discard(each.digest)
        inbox = self._inbox
        self._encoder.encode(
            each,
            lambda digest: inbox.put(_Encoded(digest)),
            lambda digest, error: inbox.put(_EncodingFailed(digest, error)),
        )

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests from outside; unknown ids are ignored."""
        self._inbox.put(_Abort(request_ids))

    def tell_transfer(self, news: KVTransferOutput) -> None:
        """Pass on that KV arrived, failed to arrive, or that blocks were released."""
        self._inbox.put(news)

    def keep_adapters(self, digests: Set[str]) -> None:
        """Take the adapters that routers want: others leave memory as soon as no request uses them."""
        self._inbox.put(_KeepAdapters(digests))

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
            command = self._inbox.get(block=not self._core.has_work(), timeout=self._seconds_to_deadline())
            while True:
                if isinstance(command, _Stop):
                    return False
                outputs.append(self._execute(command))
                command = self._inbox.get_nowait()
        except queue.Empty:
            pass
        finally:
            self._flush()
        if ended := self._advance_adapters():
            outputs.append(ended)
        if self._core.has_work():
            if any(outputs):
                # Requests that a command has ended need not wait for the step.
                self._publish_news(outputs)
                outputs = []
            outputs.append(self._core.step())
            if ended := self._advance_adapters():
                outputs.append(ended)
        self._publish_news(outputs)
        self._flush()
        return True

    def _publish_news(self, outputs: Sequence[dict[int, EngineCoreOutputs]]) -> None:
        core = self._core
        merged, kv_cache = _merge(outputs), self._kv_cache_news()
        events, stats, step = core.take_events(), core.make_stats(), core.take_computed_step()
        self._publish(StepNews(merged, events, stats, core.step_times, kv_cache, step, self._take_adapter_news()))

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
            return self._add(command.request, command.adapter_directory)
        if isinstance(command, _GrammarCompiled):
            self._core.grammar_compiled(command.request_id, command.matchers)
            return {}
        if isinstance(command, _GrammarFailed):
            is_invalid = isinstance(command.error, InvalidRequest)
            status = RequestStatus.INVALID if is_invalid else RequestStatus.ERROR
            return self._core.finish_requests([command.request_id], status, str(command.error))
        if isinstance(command, _Encoded):
            self._core.input_encoded(command.digest)
            return {}
        if isinstance(command, _EncodingFailed):
            self._core.input_failed(command.digest, command.error)
            return self._core.scheduler.take_refusals()
        if isinstance(command, _Fetched):
            self._on_fetched(command.each, command.rows)
            return {}
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
        if isinstance(command, _KeepAdapters):
            self._adapter_cache.keep_only(command.digests)
            return {}
        if isinstance(command, _AdapterLoaded):
            return self._on_adapter_loaded(command.digest, command.fault)
        return self._core.update_from_kv_transfer(command)

    def _add(self, request: Request, adapter_directory: str) -> dict[int, EngineCoreOutputs]:
        try:
            self._core.add_request(request, awaits_adapter=bool(request.adapter))
        except BatonError as error:
            return {request.client_index: EngineCoreOutputs([_refused(request, error)])}
        refusals = self._core.scheduler.take_refusals()
        if request.adapter and not request.is_finished:
            ended = self._perform(self._adapter_cache.want(request.request_id, request.adapter, adapter_directory))
            return dict(_merge([refusals, ended]))
        return refusals

    # --- adapters ---

    def _on_adapter_loaded(self, digest: str, fault: AdapterFault | None) -> dict[int, EngineCoreOutputs]:
        self._adapter_news_due = True
        if fault is not None:
            self._adapter_faults[digest] = fault
        else:
            self._num_adapter_loads += 1
        return self._perform(self._adapter_cache.finished(digest, fault.reason if fault is not None else ""))

    @property
    def has_due(self) -> bool:
        """Whether something about adapters is to be given up now."""
        return self._adapter_cache.deadline <= self._clock.monotonic()

    def _seconds_to_deadline(self) -> float | None:
        deadline = self._adapter_cache.deadline
        return None if deadline == math.inf else max(0.0, deadline - self._clock.monotonic())

    def _advance_adapters(self) -> dict[int, EngineCoreOutputs]:
        """Unload and load what may be by now; this is almost always nothing."""
        cache, outputs = self._adapter_cache, []
        if self.has_due:
            outputs.append(self._perform(cache.expire()))
        while True:
            if cache.needs_turn:
                outputs.append(self._perform(cache.turn(self._core.scheduler.adapters_in_use())))
            if not (self._unloads and self._unloads[0][1] <= self._core.num_committed_steps):
                return dict(_merge(outputs)) if outputs else {}
            digest, _ = self._unloads.popleft()
            self._core.runner.adapters.unload(digest)
            cache.unloaded(digest)
            self._adapter_news_due = True

    def _perform(self, effects: Sequence[CacheEffect]) -> dict[int, EngineCoreOutputs]:
        outputs: list[dict[int, EngineCoreOutputs]] = []
        for effect in effects:
            match effect:
                case LoadAdapter(digest, directory):
                    self._load(digest, directory)
                case UnloadAdapter(digest):
                    self._unloads.append((digest, self._core.num_submitted_steps))
                case AdapterReady(request_ids):
                    for request_id in request_ids:
                        self._core.adapter_loaded(request_id)
                case AdapterFailed(request_ids, reason):
                    unavailable = RequestStatus.ADAPTER_UNAVAILABLE
                    outputs.append(self._core.finish_requests(request_ids, unavailable, reason))
        return dict(_merge(outputs)) if outputs else {}

    def _load(self, digest: str, directory: str) -> None:
        inbox = self._inbox
        if self._adapters is None:
            inbox.put(_AdapterLoaded(digest, AdapterFault("this node loads no adapters")))
            return
        self._adapters.load(digest, directory, lambda fault: inbox.put(_AdapterLoaded(digest, fault)))

    def _take_adapter_news(self) -> AdapterNews | None:
        if not self._adapter_news_due:
            return None
        faults, self._adapter_faults = self._adapter_faults, {}
        self._adapter_news_due = False
        return AdapterNews(self._adapter_cache.loaded, faults, self._num_adapter_loads)

    def _reset_prefix_cache(self) -> int | CacheInUse:
        scheduler = self._core.scheduler
        num_blocks = scheduler.kv_cache_manager.num_cached_blocks
        if scheduler.reset_prefix_cache():
            return num_blocks
        return CacheInUse(f"the prefix cache stays as it is, since blocks are in use: {scheduler.blocks_in_use()}")


def _ignore(num_rows: int, seconds: float) -> None:
    """Nobody wants to know how long an input took."""


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
