"""The engine's step: decide, compute, commit."""

from __future__ import annotations

from collections.abc import Collection

from baton.engine.connector import KVTransferOutput
from baton.engine.outputs import EngineCoreEvent, EngineCoreOutputs, ModelRunnerOutput, SchedulerStats
from baton.engine.request import Request, RequestStatus
from baton.engine.runner.base import ModelRunner
from baton.engine.scheduler import Scheduler


class EngineCore:
    """One scheduler and one runner. Called from one thread; between two steps nothing is in flight."""

    def __init__(self, scheduler: Scheduler, runner: ModelRunner) -> None:
        self.scheduler = scheduler
        self.runner = runner

    def add_request(self, request: Request) -> None:
        """Queue a request; DuplicateRequest when its id is live."""
        self.scheduler.add_request(request)

    def finish_requests(
        self, request_ids: Collection[str], status: RequestStatus, error: str | None = None
    ) -> dict[int, EngineCoreOutputs]:
        """End requests from outside (abort, deadline); idempotent. Returns their last outputs."""
        return self.scheduler.finish_requests(request_ids, status, error)

    def update_from_kv_transfer(self, transfers: KVTransferOutput) -> dict[int, EngineCoreOutputs]:
        """Take in arrivals, failures and releases; see Scheduler."""
        return self.scheduler.update_from_kv_transfer(transfers)

    def has_work(self) -> bool:
        """Whether `step` could bring something now; the driver sleeps while it is False."""
        return self.scheduler.has_work()

    def step(self) -> dict[int, EngineCoreOutputs]:
        """Run one step; outputs by client index. A runner that raises fails the step's requests, not the engine."""
        scheduler_output = self.scheduler.schedule()
        runner_output = _NOTHING_COMPUTED
        if scheduler_output.concerns_runner:
            try:
                runner_output = self.runner.execute_model(scheduler_output)
            except Exception as exc:
                failed = dict.fromkeys(scheduler_output.num_scheduled_tokens, f"the runner failed: {exc!r}")
                runner_output = ModelRunnerOutput({}, failed=failed, lost=True)
        return self.scheduler.update_from_output(scheduler_output, runner_output)

    def make_stats(self) -> SchedulerStats:
        """Load after the last step."""
        return self.scheduler.make_stats()

    def take_events(self) -> list[EngineCoreEvent]:
        """What happened to requests since the last call."""
        return self.scheduler.take_events()


_NOTHING_COMPUTED = ModelRunnerOutput({})
