"""The engine's step: decide, compute, commit.

With a `StepExecutor` scheduling is asynchronous: while the runner computes a step, the next step is decided and the
previous one is committed and published. Without a `StepExecutor` the three calls of a step follow each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence

from baton.engine.batch import (
    ComputedStep,
    EngineCoreEvent,
    EngineCoreOutputs,
    ModelRunnerOutput,
    SchedulerOutput,
    SchedulerStats,
    StepTimes,
)
from baton.engine.connector import KVTransferOutput
from baton.engine.constraints import TokenMatcher
from baton.engine.encoder_cache import EncoderInput, EncoderWork
from baton.engine.request import Request, RequestStatus
from baton.engine.runner import LazyExecutor, ModelRunner, RunnerLost, StepExecutor
from baton.engine.scheduler import Scheduler
from baton.errors import ConfigError, InvalidRequest


class EngineCore:
    """One scheduler and one runner. Called from one thread; between two calls at most one step is in flight."""

    def __init__(self, scheduler: Scheduler, runner: ModelRunner, executor: StepExecutor | None = None) -> None:
        """`executor`: schedule asynchronously; closed by `close`. None: between two calls no step is in flight.

        Raises ConfigError for a scheduler that allocates blocks for other groups of layers than the runner has.
        """
        if len(scheduler.config.windows) != len(runner.layout.groups):
            raise ConfigError(
                f"the scheduler has windows of {len(scheduler.config.windows)} groups of layers, the model has "
                f"{len(runner.layout.groups)} groups; set SchedulerConfig.windows to KVLayout.windows"
            )
        self.scheduler = scheduler
        self.runner = runner
        self._runs_ahead = executor is not None
        self._executor: StepExecutor = executor if executor is not None else LazyExecutor()
        self._in_flight: deque[tuple[SchedulerOutput, float, Callable[[], ModelRunnerOutput]]] = deque()
        """Steps that are submitted and not committed, in order: the decision, when it was made, and what waits for the
        result. At most one between two calls; two while `step` waits for the first one."""
        self.start_encoding: Callable[[EncoderInput], None] = self._encode
        """Has the runner encode an input. By default at once; a driver puts in its place what encodes beside the steps,
        and then calls `input_encoded` or `input_failed`."""
        self.forget_encoded: Callable[[Sequence[str]], None] = runner.encoder.forget
        """Has the runner forget the rows of inputs; a driver also gives up what is still to be encoded of them."""
        self._forgotten: dict[str, int] = {}
        """Inputs whose rows are to be forgotten, with the number of steps that were submitted before."""
        self._clock = scheduler.clock
        self._decided_at = self._committed_at = 0.0
        self._computed: ComputedStep | None = None
        self._num_steps = 0
        self._schedule_s = self._run_s = self._update_s = 0.0

    def add_request(self, request: Request, *, awaits_adapter: bool = False) -> None:
        """Queue a request; raises DuplicateRequest when a request with its id has not ended.

        `awaits_adapter`: see `Scheduler.add_request`.
        """
        self.scheduler.add_request(request, awaits_adapter=awaits_adapter)

    def finish_requests(
        self, request_ids: Collection[str], status: RequestStatus, error: str | None = None
    ) -> dict[int, EngineCoreOutputs]:
        """End requests from outside (abort, deadline); idempotent. Returns their last outputs."""
        return self.scheduler.finish_requests(request_ids, status, error)

    def update_from_kv_transfer(self, transfers: KVTransferOutput) -> dict[int, EngineCoreOutputs]:
        """Process arrivals, failures and releases of KV; see `Scheduler.update_from_kv_transfer`."""
        return self.scheduler.update_from_kv_transfer(transfers)

    def grammar_compiled(self, request_id: str, matchers: Sequence[TokenMatcher]) -> None:
        """Give a request the matchers for which it waits; see `Scheduler.grammar_compiled`."""
        self.scheduler.grammar_compiled(request_id, matchers)

    def adapter_loaded(self, request_id: str) -> None:
        """Queue a request that waits for its adapter; see `Scheduler.adapter_loaded`."""
        self.scheduler.adapter_loaded(request_id)

    def input_encoded(self, digest: str) -> None:
        """Note that an input is encoded; see `Scheduler.input_encoded`."""
        self.scheduler.input_encoded(digest)

    def input_fetched(self, digest: str, num_rows: int, rows: bytes) -> None:
        """Give the runner the rows of an input that another node made, float32 [num_rows, width], little-endian."""
        self.runner.encoder.keep(digest, num_rows, rows)
        self.scheduler.input_encoded(digest, is_fetched=True)

    def input_failed(self, digest: str, error: Exception) -> None:
        """End the requests that need an input which can't be encoded; see `Scheduler.input_failed`."""
        self.scheduler.input_failed(digest, str(error), is_invalid=isinstance(error, InvalidRequest))

    @property
    def num_submitted_steps(self) -> int:
        """How many steps the runner was given since the start."""
        return self._num_steps

    @property
    def num_committed_steps(self) -> int:
        """How many of them are committed: those were submitted first."""
        return self._num_steps - len(self._in_flight)

    def has_work(self) -> bool:
        """Whether a call of `step` could do anything now; the driver sleeps while it could not."""
        return bool(self._in_flight) or self.scheduler.has_work()

    def step(self) -> dict[int, EngineCoreOutputs]:
        """Decide a step and commit a step, which is the same one unless another is in flight. Outputs by client index.

        A runner that raises fails the step's requests, not the engine.
        """
        if not self._in_flight or self.scheduler.may_run_ahead():
            decided = self._schedule()
            if decided.concerns_runner:
                self._submit(decided)
                if len(self._in_flight) == 1 and self._runs_ahead and self.scheduler.may_run_ahead():
                    return self.scheduler.take_refusals()
            elif not self._in_flight:
                return self._update(decided, _NOTHING_COMPUTED)
        return self._commit()

    def close(self) -> None:
        """Wait for the step in flight and drop its result. `step` must not be called afterwards."""
        self._executor.close()

    def _schedule(self) -> SchedulerOutput:
        self._decided_at = started = self._clock.monotonic()
        decided = self.scheduler.schedule()
        self._schedule_s += self._clock.monotonic() - started
        if self.scheduler.config.num_encoder_rows:
            self._do_encoder_work(self.scheduler.take_encoder_work())
        return decided

    def _do_encoder_work(self, work: EncoderWork) -> None:
        for digest in work.to_forget:
            # Steps that were submitted may still have rows of requests that have ended.
            self._forgotten[digest] = self._num_steps
        for each in work.to_encode:
            self._forgotten.pop(each.digest, None)
            self.start_encoding(each)
        self._forget_encoded()

    def _forget_encoded(self) -> None:
        """Have the runner forget rows that no submitted step can name."""
        gone = [digest for digest, step in self._forgotten.items() if step <= self.num_committed_steps]
        if gone:
            self.forget_encoded(gone)
            for digest in gone:
                del self._forgotten[digest]

    def _encode(self, each: EncoderInput) -> None:
        try:
            self.runner.encoder.encode(each.content, each.num_rows)
        except Exception as exc:
            self.input_failed(each.digest, exc)
        else:
            self.input_encoded(each.digest)

    def _submit(self, decided: SchedulerOutput) -> None:
        self._num_steps += 1
        self.runner.expect(decided)
        self._in_flight.append((decided, self._decided_at, self._executor.submit(lambda: self._run(decided))))

    def _run(self, decided: SchedulerOutput) -> ModelRunnerOutput:
        # Runs on the executor's thread, if it has one. `_run_s` is written here only.
        started = self._clock.monotonic()
        try:
            return self.runner.execute_model(decided)
        finally:
            self._run_s += self._clock.monotonic() - started

    def _update(self, decided: SchedulerOutput, computed: ModelRunnerOutput) -> dict[int, EngineCoreOutputs]:
        started = self._clock.monotonic()
        outputs = self.scheduler.update_from_output(decided, computed)
        self._committed_at = self._clock.monotonic()
        self._update_s += self._committed_at - started
        return outputs

    def _commit(self) -> dict[int, EngineCoreOutputs]:
        """Wait for the first step in flight, and commit it."""
        decided, decided_at, result = self._in_flight.popleft()
        began = max(decided_at, self._committed_at)
        try:
            computed = result()
        except RunnerLost:
            raise
        except Exception as exc:
            failed = dict.fromkeys(decided.num_scheduled_tokens, f"the runner failed: {exc!r}")
            computed = ModelRunnerOutput({}, failed=failed, lost=True)
        if self._forgotten:
            self._forget_encoded()
        outputs = self._update(decided, computed)
        if not computed.lost and not decided.is_empty:
            self._computed = _computed_step(decided, computed, began, self._committed_at, self.has_work())
        return outputs

    def make_stats(self) -> SchedulerStats:
        """The engine's load after the last step."""
        return self.scheduler.make_stats()

    def take_computed_step(self) -> ComputedStep | None:
        """The step that was committed since the last call, if one was and it computed something."""
        computed, self._computed = self._computed, None
        return computed

    @property
    def step_times(self) -> StepTimes:
        """The seconds that all steps took so far."""
        return StepTimes(self._num_steps, self._schedule_s, self._run_s, self._update_s)

    def take_events(self) -> list[EngineCoreEvent]:
        """The events of requests since the last call."""
        return self.scheduler.take_events()


def _computed_step(
    decided: SchedulerOutput, computed: ModelRunnerOutput, began: float, ended: float, goes_on: bool
) -> ComputedStep:
    drafts = decided.scheduled_spec_decode_tokens
    num_draft_tokens = num_accepted_tokens = 0
    for request_id, token_ids in drafts.items():
        num_draft_tokens += len(token_ids)
        num_accepted_tokens += max(0, len(computed.sampled_token_ids.get(request_id, ())) - 1)
    num_prefill_tokens = decided.num_prefill_tokens
    return ComputedStep(
        ended - began,
        num_prefill_tokens,
        decided.total_num_scheduled_tokens - num_prefill_tokens - num_draft_tokens,
        decided.num_decode_context_tokens,
        ended,
        goes_on,
        len(drafts),
        num_draft_tokens,
        num_accepted_tokens,
    )


_NOTHING_COMPUTED = ModelRunnerOutput({})
