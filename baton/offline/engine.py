"""The engine of offline use: the node's scheduler, runner and thread, without the ports of a node; and its requests.

The engine runs in a thread of its own (`baton.node.driver`), as on a node. So Ctrl-C, which Python raises in the main
thread, never stops a step half-way: the caller's requests are aborted, and the engine takes the next ones. A request is
the router's flight and answer, over this one engine.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from baton.clock import SystemClock
from baton.config import NodeConfig
from baton.engine.batch import EngineCoreOutput
from baton.engine.kv_cache.block_hash import CacheKeyFields
from baton.engine.runner import ModelRunner
from baton.engine.scheduler import Scheduler
from baton.errors import BatonError, EngineFault, InvalidRequest
from baton.messages.adapters import AdapterSource
from baton.messages.generation import Chunk, GenerateEvent, SequenceFinished
from baton.messages.ids import AttemptKey
from baton.messages.node import Abort, NodeDescription, RequestDelta, StageTimings, Submit
from baton.messages.sampling import TokenLogprobs
from baton.messages.speculation import DraftCounts
from baton.node.adapters.adapter_threads import AdapterDirectories, AdapterThreads
from baton.node.attempts.grammars import load_compiler
from baton.node.attempts.submit_check import engine_request, objection
from baton.node.driver import EngineDriver, StepNews
from baton.node.reports.reports import describe, request_delta
from baton.node.runner_spec import scheduler_config
from baton.offline.outputs import CompletionOutput, OnProgress
from baton.runner.execution.step_thread import StepThread
from baton.text.detokenizer import TextCodec
from router.admission.request import ValidRequest
from router.flight.answer import Answer
from router.flight.flight import Flight
from router.flight.flight_table import (
    AbortLeg,
    Delta,
    EmitPromptLogprobs,
    EmitTokens,
    Fail,
    Finish,
    FlightEffect,
    GiveUp,
    Place,
    Placed,
    SequenceEnded,
    StopStringFound,
    SubmitLeg,
)
from router.placement.placement import Candidate, choose, demand_of


class RunningRequest:
    """A request from its start to its end. Pure: the engine's news in, messages to the engine out."""

    def __init__(self, request: ValidRequest, codec: TextCodec, engine: NodeDescription) -> None:
        self.request = request
        self.error: BatonError | None = None
        """Why the request failed; None if it has not."""
        self.finish: Finish | None = None
        self.prompt_logprobs: Sequence[TokenLogprobs] = ()
        self._flight = Flight(request)
        self._answer = Answer(codec, request)
        self._engine = engine
        self._chunks: list[list[Chunk]] = [[] for _ in range(request.num_returned)]
        self._ends: list[tuple[str, int | str | None]] = [("", None)] * request.num_returned

    @property
    def key(self) -> AttemptKey:
        """The request's attempt, whose text is its id in the engine, once it was started."""
        return self._flight.key

    @property
    def is_over(self) -> bool:
        return self._flight.is_over

    @property
    def draft_counts(self) -> DraftCounts:
        """What became of the drafts of all sequences."""
        return self._flight.draft_counts

    @property
    def _candidate(self) -> Candidate:
        """The one engine, which has the adapters of all requests."""
        return Candidate(self._engine, 0.0, 0, adapters=frozenset((self.request.adapter,)))

    def start(self) -> Sequence[Submit | Abort]:
        """What to tell the engine first. Raises InvalidRequest for a request that does not fit into its KV cache."""
        choose([self._candidate], demand_of(self.request))
        return self._perform(self._flight.start())

    def take(self, delta: RequestDelta) -> Sequence[Submit | Abort]:
        """Take a result of the engine; returns what to tell the engine now."""
        return self._perform(self._flight.handle(Delta(self._engine.incarnation, delta)))

    def outputs(self) -> Sequence[CompletionOutput]:
        """The outputs of a request that has ended without an error."""
        return [self._output(index) for index in range(len(self._chunks))]

    def _perform(self, effects: Sequence[FlightEffect]) -> Sequence[Submit | Abort]:
        messages: list[Submit | Abort] = []
        pending = deque(effects)
        while pending:
            match pending.popleft():
                case Place(attempt=1) as place:
                    placement = choose([self._candidate], demand_of(self.request), place.exclude)
                    pending.extend(self._flight.handle(Placed(placement)))
                case Place(cause=cause):
                    # There is no other engine that could do better.
                    failed = EngineFault(f"the engine gave the request up ({cause.value})")
                    pending.extend(self._flight.handle(GiveUp(failed)))
                case SubmitLeg(_, submit):
                    messages.append(submit)
                case AbortLeg(_, abort):
                    messages.append(abort)
                case EmitPromptLogprobs(positions):
                    self.prompt_logprobs = positions
                case EmitTokens() as tokens:
                    self._collect(self._answer.push(tokens))
                    if (stop_string := self._answer.stop_string_found(tokens.sequence_index)) is not None:
                        pending.extend(self._flight.handle(StopStringFound(stop_string, tokens.sequence_index)))
                case SequenceEnded() as ended:
                    self._collect(self._answer.end_sequence(ended))
                case Finish() as finish:
                    self._collect(self._answer.finish(finish))
                    self.finish = finish
                    if len(self._ends) == 1:
                        self._ends[0] = (self._answer.finish_reason, self._answer.stop_reason)
                case Fail(error):
                    self.error = error
        return messages

    def _collect(self, events: Sequence[GenerateEvent]) -> None:
        for event in events:
            if isinstance(event, Chunk):
                self._chunks[event.sequence_index].append(event)
            elif isinstance(event, SequenceFinished):
                self._ends[event.sequence_index] = (event.finish_reason, event.stop_reason)

    def _output(self, index: int) -> CompletionOutput:
        chunks = self._chunks[index]
        finish_reason, stop_reason = self._ends[index]
        return CompletionOutput(
            index,
            "".join(chunk.text for chunk in chunks),
            tuple(token for chunk in chunks for token in chunk.token_ids),
            finish_reason,
            stop_reason,
            tuple(position for chunk in chunks for position in chunk.logprobs),
        )


class OfflineEngine:
    """Computes lists of requests, one list at a time, until `close`."""

    def __init__(self, config: NodeConfig, runner: ModelRunner) -> None:
        """Start the engine's thread.

        Raises ConfigError for limits that the model or its memory can't keep, and AdapterRefused.
        """
        key_fields = CacheKeyFields.of(runner.model, runner.layout)
        self.scheduler = Scheduler(scheduler_config(config, runner), key_fields, SystemClock())
        self.description = describe(config, runner, "offline", key_fields, self.scheduler.max_model_len)
        self._news: queue.SimpleQueue[StepNews | BaseException] = queue.SimpleQueue()
        self._crash: BaseException | None = None
        self._runner = runner
        self.adapters: Mapping[str, AdapterSource] = _checked_adapters(config, runner)
        """The adapters that requests may have, by name."""
        self._directories = {source.digest: source.directory for source in self.adapters.values()}
        directories = AdapterDirectories(config.adapter_directories, runner.adapters.check)
        self._threads = AdapterThreads(runner, directories)
        self._driver = EngineDriver(
            self.scheduler,
            runner,
            self._news.put,
            self._news.put,
            executor=StepThread() if config.schedules_ahead else None,
            grammars=load_compiler(config, runner.model),
            adapters=self._threads,
            max_cpu_loras=config.max_cpu_loras,
        )
        self._driver.start()

    def run(self, requests: Sequence[RunningRequest], on_progress: OnProgress) -> None:
        """Compute all requests to their ends; each then has its result or its error.

        Raises InvalidRequest, before anything is computed, for a request that this engine can't run; EngineFault if the
        engine's thread has ended. Whatever is raised, no request runs on.
        """
        if self._crash is not None:
            raise EngineFault(f"the engine died: {self._crash!r}") from self._crash
        first = [self._checked(index, request) for index, request in enumerate(requests)]
        live = {request.key: request for request in requests}
        num_tokens = 0
        try:
            for messages in first:
                self._send(messages)
            while live:
                for output in self._next_outputs():
                    num_tokens += len(output.new_token_ids)
                    self._take(live, output)
                on_progress(len(requests) - len(live), num_tokens)
        finally:
            self._driver.abort([str(key) for key in live])

    def close(self) -> None:
        """End the engine's thread after the current step and the runner, and free what they hold."""
        self._driver.stop()
        self._threads.close()
        self._runner.close()

    def _checked(self, index: int, request: RunningRequest) -> Sequence[Submit | Abort]:
        """The request's first messages; raises InvalidRequest that names the prompt by its place."""
        try:
            messages = request.start()
            for message in messages:
                why = objection(message, self.description) if isinstance(message, Submit) else None
                if why is not None:
                    raise InvalidRequest(*why.split(": ", 1))
            return messages
        except InvalidRequest as error:
            raise at_prompt(index, error) from None

    def _send(self, messages: Sequence[Submit | Abort]) -> None:
        for message in messages:
            if isinstance(message, Submit):
                directory = self._directories[message.spec.adapter] if message.spec.adapter else ""
                self._driver.submit(engine_request(message, self.description.eos_token_ids), directory)
            elif message.sequence_index is None:
                self._driver.abort([str(message.attempt)])
            else:
                self._driver.abort_sequence(str(message.attempt), message.sequence_index)

    def _next_outputs(self) -> list[EngineCoreOutput]:
        """Wait for the outputs of the next step."""
        news = self._news.get()
        if isinstance(news, BaseException):
            self._crash = news
            raise EngineFault(f"the engine died: {news!r}") from news
        return [output for outputs in news.outputs.values() for output in outputs]

    def _take(self, live: dict[AttemptKey, RunningRequest], output: EngineCoreOutput) -> None:
        """Give an output to its request; one of a request that has ended is dropped."""
        request = live.get(output.attempt)
        if request is None:
            return
        timings = StageTimings(cached_tokens=output.num_cached_tokens) if output.sequence_index == 0 else None
        self._send(request.take(request_delta(output, timings)))
        if request.is_over:
            del live[output.attempt]


def _checked_adapters(config: NodeConfig, runner: ModelRunner) -> Mapping[str, AdapterSource]:
    """The adapters that the configuration names; raises AdapterRefused, before any is loaded."""
    return {
        name: AdapterSource(name, directory, runner.adapters.check(Path(directory)).digest)
        for name, directory in config.adapter_modules.items()
    }


def at_prompt(index: int, error: InvalidRequest) -> InvalidRequest:
    """The error of one prompt of a list, with the place of the prompt in its field."""
    reason = error.reason if error.field == "prompt" else str(error)
    return InvalidRequest(f"prompts[{index}]", reason)
