"""The engine of offline use: the node's scheduler, runner and thread, without the ports of a node.

The engine runs in a thread of its own (`baton.node.driver`), as on a node. So Ctrl-C, which Python raises in the main
thread, never stops a step half-way: the caller's requests are aborted, and the engine takes the next ones.
"""

from __future__ import annotations

import queue
from collections.abc import Mapping, Sequence
from pathlib import Path

from baton.clock import SystemClock
from baton.config import NodeConfig
from baton.engine.batch import EngineCoreOutput
from baton.engine.core import EngineCore
from baton.engine.kv_cache.block_hash import CacheKeyFields
from baton.engine.runner import ModelRunner
from baton.engine.scheduler import Scheduler
from baton.engine.sequences.sequence_group import lone_sequence_id, split_sequence_id
from baton.errors import EngineFault, InvalidRequest
from baton.messages.adapters import AdapterSource
from baton.messages.ids import AttemptKey
from baton.messages.node import Abort, StageTimings, Submit
from baton.node.adapters.adapter_files import AdapterDirectories
from baton.node.adapters.adapter_threads import AdapterThreads
from baton.node.attempts.engine_request import engine_request
from baton.node.attempts.grammars import load_compiler
from baton.node.attempts.submit_check import objection
from baton.node.description import describe
from baton.node.driver import EngineDriver, StepNews
from baton.node.reports.deltas import request_delta
from baton.node.runner_spec import scheduler_config
from baton.offline.progress import OnProgress
from baton.offline.running_request import RunningRequest
from baton.runner.execution.step_thread import StepThread


class OfflineEngine:
    """Computes lists of requests, one list at a time, until `close`."""

    def __init__(self, config: NodeConfig, runner: ModelRunner) -> None:
        """Start the engine's thread.

        Raises ConfigError for limits that the model or its memory can't keep, and AdapterRefused.
        """
        key_fields = CacheKeyFields.of(runner.model, runner.layout)
        self.scheduler = Scheduler(scheduler_config(config, runner), key_fields, SystemClock())
        executor = StepThread() if config.schedules_ahead else None
        core = EngineCore(self.scheduler, runner, executor)
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
            core,
            self._news.put,
            self._news.put,
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
        first = [self._checked(place, request) for place, request in enumerate(requests)]
        live = {request.engine_id: request for request in requests}
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
            self._driver.abort(list(live))

    def close(self) -> None:
        """End the engine's thread after the current step and the runner, and free what they hold."""
        self._driver.stop()
        self._threads.end()
        self._runner.close()

    def _checked(self, place: int, request: RunningRequest) -> Sequence[Submit | Abort]:
        """The request's first messages; raises InvalidRequest that names the prompt by its place."""
        try:
            messages = request.start()
            for message in messages:
                why = objection(message, self.description) if isinstance(message, Submit) else None
                if why is not None:
                    raise InvalidRequest(*why.split(": ", 1))
            return messages
        except InvalidRequest as error:
            raise at_prompt(place, error) from None

    def _send(self, messages: Sequence[Submit | Abort]) -> None:
        for message in messages:
            if isinstance(message, Submit):
                directory = self._directories[message.adapter] if message.adapter else ""
                self._driver.submit(engine_request(message, self.description.eos_token_ids), directory)
            elif message.sequence_index is None:
                self._driver.abort([str(message.attempt)])
            else:
                self._driver.abort([lone_sequence_id(str(message.attempt), message.sequence_index)])

    def _next_outputs(self) -> list[EngineCoreOutput]:
        """Wait for the outputs of the next step."""
        news = self._news.get()
        if isinstance(news, BaseException):
            self._crash = news
            raise EngineFault(f"the engine died: {news!r}") from news
        return [output for outputs in news.outputs.values() for output in outputs.outputs]

    def _take(self, live: dict[str, RunningRequest], output: EngineCoreOutput) -> None:
        """Give an output to its request; one of a request that has ended is dropped."""
        engine_id, sequence_index = output.request_id, 0
        if engine_id not in live:
            engine_id, sequence_index = split_sequence_id(engine_id)
        request = live.get(engine_id)
        if request is None:
            return
        timings = StageTimings(cached_tokens=output.num_cached_tokens) if sequence_index == 0 else None
        key = AttemptKey.parse(engine_id)
        self._send(request.take(request_delta(key, sequence_index, output, output.outcome, timings)))
        if request.is_over:
            del live[engine_id]


def _checked_adapters(config: NodeConfig, runner: ModelRunner) -> Mapping[str, AdapterSource]:
    """The adapters that the configuration names; raises AdapterRefused, before any is loaded."""
    return {
        name: AdapterSource(name, directory, runner.adapters.check(Path(directory)).digest)
        for name, directory in config.adapter_modules.items()
    }


def at_prompt(place: int, error: InvalidRequest) -> InvalidRequest:
    """The error of one prompt of a list, with the place of the prompt in its field."""
    reason = error.reason if error.field == "prompt" else str(error)
    return InvalidRequest(f"prompts[{place}]", reason)
