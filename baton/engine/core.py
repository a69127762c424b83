"""The engine's step: decide, compute, commit.

With a `StepExecutor` scheduling is asynchronous: while the runner computes a step, the next step is decided and the
previous one is committed and published. Without a `StepExecutor` the three calls of a step follow each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from baton.engine.batch import (
    ComputedStep,
    EngineCoreOutputs,
    ModelRunnerOutput,
    SchedulerOutput,
    StepTimes,
)
from baton.engine.encoder_cache import EncoderInput
from baton.engine.runner import LazyExecutor, ModelRunner, RunnerLost, StepExecutor
from baton.engine.scheduler import Scheduler
from baton.errors import ConfigError
from baton.messages.node import StepFigures


class InputEncoder(Protocol):
    """Has a runner make rows of inputs, and tells the scheduler. Both methods return at once."""

    def start_encoding(self, encoder_input: EncoderInput) -> None:
        """Have an input encoded; `Scheduler.input_encoded` or `input_failed` follows, on the engine's thread."""
        ...

    def release(self, digests: Sequence[str]) -> None:
        """Have the runner release the rows of inputs, and give up what is still to be encoded of them."""
        ...


class EncodesAtOnce:
    """The encoder of an engine whose steps may wait for it."""

    def __init__(self, scheduler: Scheduler, runner: ModelRunner) -> None:
        self._scheduler = scheduler
        self._runner = runner

    def start_encoding(self, encoder_input: EncoderInput) -> None:
        try:
            self._runner.encoder.encode(encoder_input.content, encoder_input.num_rows)
        except Exception as exc:
            self._scheduler.input_failed(encoder_input.digest, exc)
        else:
            self._scheduler.input_encoded(encoder_input.digest)

    def release(self, digests: Sequence[str]) -> None:
        self._runner.encoder.release(digests)


class EngineCore:
    """The steps of one scheduler and one runner; requests go to the scheduler. Called from one thread.

    Between two calls at most one step is in flight.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        executor: StepExecutor | None = None,
        encoder: InputEncoder | None = None,
    ) -> None:
        """`executor`: schedule asynchronously; closed by `close`. None: between two calls no step is in flight.
        `encoder`: encodes inputs beside the steps; None: they are encoded at once, when a step is decided.

        Raises ConfigError for a scheduler that allocates blocks for other groups of layers than the runner has.
        """
        config, layout = scheduler.config, runner.layout
        if (len(config.windows), config.keeps_states) != (len(layout.groups), layout.keeps_states):
            raise ConfigError(
                f"the scheduler has windows of {len(config.windows)} groups of layers, the model has "
                f"{len(layout.groups)} groups; set SchedulerConfig.windows to KVLayout.windows, and keeps_states, too"
            )
        self.scheduler = scheduler
        self.runner = runner
        self._runs_ahead = executor is not None
        self._executor: StepExecutor = executor if executor is not None else LazyExecutor()
        self._in_flight: deque[tuple[SchedulerOutput, float, Callable[[], ModelRunnerOutput]]] = deque()
        """Steps that are submitted and not committed, in order: the decision, when it was made, and what waits for the
        result. At most one between two calls; two while `step` waits for the first one."""
        self._encoder: InputEncoder = encoder if encoder is not None else EncodesAtOnce(scheduler, runner)
        self._to_release: dict[str, int] = {}
        """Inputs whose rows are to be released, with the number of steps that were submitted before."""
        self._clock = scheduler.clock
        self._decided_at = self._committed_at = 0.0
        self._computed: ComputedStep | None = None
        self._num_steps = 0
        self._schedule_s = self._run_s = self._update_s = 0.0

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

    def step(self) -> EngineCoreOutputs:
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
            self.do_encoder_work()
        return decided

    def do_encoder_work(self) -> None:
        """Have encoded and released what the encoder cache decided since the last time; each step begins with it."""
        work = self.scheduler.take_encoder_work()
        for digest in work.to_release:
            # Steps that were submitted may still have rows of requests that have ended.
            self._to_release[digest] = self._num_steps
        for encoder_input in work.to_encode:
            self._to_release.pop(encoder_input.digest, None)
            self._encoder.start_encoding(encoder_input)
        self._release_encoded()

    def _release_encoded(self) -> None:
        """Have the runner release rows that no submitted step can name."""
        gone = [digest for digest, step in self._to_release.items() if step <= self.num_committed_steps]
        if gone:
            self._encoder.release(gone)
            for digest in gone:
                del self._to_release[digest]

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

    def _update(self, decided: SchedulerOutput, computed: ModelRunnerOutput) -> EngineCoreOutputs:
        started = self._clock.monotonic()
        outputs = self.scheduler.update_from_output(decided, computed)
        self._committed_at = self._clock.monotonic()
        self._update_s += self._committed_at - started
        return outputs

    def _commit(self) -> EngineCoreOutputs:
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
        if self._to_release:
            self._release_encoded()
        outputs = self._update(decided, computed)
        if not computed.lost and not decided.is_empty:
            self._computed = _computed_step(decided, computed, began, self._committed_at, self.has_work())
        return outputs

    def take_computed_step(self) -> ComputedStep | None:
        """The step that was committed since the last call, if one was and it computed something."""
        computed, self._computed = self._computed, None
        return computed

    @property
    def step_times(self) -> StepTimes:
        """The seconds that all steps took so far."""
        return StepTimes(self._num_steps, self._schedule_s, self._run_s, self._update_s)


def _computed_step(
    decided: SchedulerOutput, computed: ModelRunnerOutput, began: float, ended: float, goes_on: bool
) -> ComputedStep:
    drafts = decided.scheduled_spec_decode_tokens
    num_draft_tokens = num_accepted_tokens = 0
    for request_id, token_ids in drafts.items():
        num_draft_tokens += len(token_ids)
        num_accepted_tokens += max(0, len(computed.sampled_token_ids.get(request_id, ())) - 1)
    num_prefill_tokens = decided.num_prefill_tokens
    figures = StepFigures(
        (ended - began) * 1e3,
        num_prefill_tokens,
        decided.total_num_scheduled_tokens - num_prefill_tokens - num_draft_tokens,
        decided.num_decode_context_tokens,
        len(drafts),
        num_draft_tokens,
        num_accepted_tokens,
    )
    return ComputedStep(figures, ended, goes_on)


_NOTHING_COMPUTED = ModelRunnerOutput({})
