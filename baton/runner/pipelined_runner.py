"""Executes steps on a model in stages, with as many micro-batches at once as there are stages.

A step is divided in micro-batches, of which each stage computes another one. While the last ones of a step are
computed, the first stage begins the next step, if the scheduler has decided it already. A micro-batch of the next step
waits only for those that sample its own tokens. All stages compute micro-batches in one order, that in which they
began: so each step finds the keys and values of the steps before it, as if steps were computed one after the other.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Container, Mapping
from dataclasses import dataclass

from baton.engine.batch import ModelRunnerOutput, SchedulerOutput
from baton.engine.runner import ModelInfo
from baton.model_formats.adapters import DEFAULT_MAX_RANK
from baton.runner.backends.cpu.kernels.errors import RankLost
from baton.runner.execution.draft_model import DraftModel
from baton.runner.execution.sampler import Sampler
from baton.runner.execution.step_results import StepResults, StepRows
from baton.runner.images import ImageInputs
from baton.runner.model_runner import TorchModelRunner
from baton.runner.ranks.rank_leader import RankLeader
from baton.runner.stages.leading_stage import LeadingStage
from baton.runner.stages.stage_leader import STAGES_ENDED


@dataclass(slots=True)
class _Step:
    results: StepResults
    waiting: deque[list[tuple[str, int]]]
    """The micro-batches that have not begun: requests and how many tokens of each."""
    num_computing: int = 0
    is_void: bool = False
    """Whether the step before it failed while this one had begun."""


@dataclass(frozen=True, slots=True)
class _MicroBatch:
    step: _Step
    rows: StepRows


class PipelinedModelRunner(TorchModelRunner):
    """A runner whose model is computed in several stages. Only `expect` may be called from another thread."""

    def __init__(
        self,
        model: ModelInfo,
        transformer: LeadingStage,
        host_cache_bytes: int,
        draft_model: DraftModel | None,
        leader: RankLeader,
        images: ImageInputs | None = None,
        max_lora_rank: int = DEFAULT_MAX_RANK,
        sampler: Sampler | None = None,
    ) -> None:
        super().__init__(
            model, transformer, host_cache_bytes, draft_model, leader, images, max_lora_rank, sampler=sampler
        )
        self._leading = transformer
        self._executing = threading.Lock()
        """Held while a step is executed."""
        self._is_closed = False
        self._computed_at = 0.0
        """When the last step was computed (perf_counter)."""
        # A draft model drafts behind a whole step, before it learns of the next one.
        self._begins_ahead = draft_model is None
        self._expected: deque[SchedulerOutput] = deque()
        """Steps that were decided and have not begun, in order."""
        self._steps: deque[_Step] = deque()
        """Steps that have begun, in order: the one that is executed, and the one behind it."""
        self._computing: deque[_MicroBatch] = deque()
        """In the order in which they began."""
        self._news, self._news_end = socket.socketpair()
        """Can be read when a step was decided since the last look."""
        self._news.setblocking(False)
        self._news_end.setblocking(False)

    def expect(self, scheduler_output: SchedulerOutput) -> None:
        """Take note of the step that will be executed behind those that were expected before."""
        self._expected.append(scheduler_output)
        with contextlib.suppress(OSError):  # there is unread news already, or the runner is closed
            self._news_end.send(b"\0")

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute one step, and meanwhile begin the next one. A failure of one request is reported in `failed`.

        A step that was begun beside one that failed fails, too. Raises RankLost once the runner is closed.
        """
        with self._executing:
            if self._is_closed:
                raise RankLost(STAGES_ENDED)
            if not self._steps:
                if self._expected and self._expected[0] is scheduler_output:
                    self._expected.popleft()
                self._open(scheduler_output)
            step = self._steps[0]
            if step.results.decided is not scheduler_output:
                raise RuntimeError("steps must be executed in the order in which they were expected")
            try:
                if step.is_void:
                    raise RuntimeError("the step before it failed")
                while step.waiting or step.num_computing:
                    self._advance()
                # A step that was begun ahead takes time from when the one before it was computed.
                step.results.began_at = max(step.results.began_at, self._computed_at)
                self._computed_at = step.results.computed_at
                return self._end(step.results)
            except Exception:
                self._void_all()
                raise
            except BaseException:
                self._end_ranks()
                raise
            finally:
                self._steps.popleft()

    def close(self) -> None:
        self._end_ranks()
        # A step that was being computed has ended now, and waits for nothing that is closed here. Its thread may begin
        # the next one before it learns of the end.
        with self._executing:
            self._is_closed = True
            super().close()
            self._news.close()
            self._news_end.close()

    def _end_ranks(self) -> None:
        if self._leader is not None:
            self._leader.end_ranks()

    def _void_all(self) -> None:
        """Forget the micro-batches that are computed, once they are, and the steps that they are of."""
        for step in self._steps:
            step.is_void = True
        computing = len(self._computing)
        self._computing.clear()
        for _ in range(computing):
            self._leading.take_result()

    def _advance(self) -> None:
        """Take the results of a micro-batch, or begin one, or wait until either is possible."""
        if self._computing and self._leading.wait(timeout=0):
            self._take_first()
        elif self._leading.can_begin and (step := self._next_step()) is not None:
            self._begin_micro_batch(step)
        else:
            self._leading.wait(self._news)
            with contextlib.suppress(BlockingIOError):
                while self._news.recv(4096):
                    pass

    def _next_step(self) -> _Step | None:
        """The step whose next micro-batch can begin now; None if none can."""
        if not self._steps[-1].waiting and len(self._steps) == 1 and self._expected:
            if not self._begins_ahead or _copies_blocks(self._expected[0]):
                return None
            self._open(self._expected.popleft())
        step = next((step for step in self._steps if step.waiting), None)
        if step is None:
            return None
        sampling = {share.state.request_id for micro in self._computing for share in micro.rows.samplers}
        return None if any(request_id in sampling for request_id, _ in step.waiting[0]) else step

    def _open(self, decided: SchedulerOutput) -> None:
        parts = divide(decided.num_scheduled_tokens, decided.scheduled_spec_decode_tokens, self._leading.stage.count)
        self._steps.append(_Step(self._begin(decided), deque(parts)))

    def _begin_micro_batch(self, step: _Step) -> None:
        rows = self._rows_of(step.results, step.waiting.popleft())
        if rows is None:
            return
        self._leading.begin(rows.batch, rows.logits_rows, rows.wants_hidden)
        self._computing.append(_MicroBatch(step, rows))
        step.num_computing += 1

    def _take_first(self) -> None:
        micro = self._computing.popleft()
        micro.step.num_computing -= 1
        self._take(micro.step.results, micro.rows, self._leading.take_result())


def _copies_blocks(decided: SchedulerOutput) -> bool:
    """Whether a step begins with copies of blocks, for which the stages must be done with the steps before it."""
    return bool(
        decided.blocks_to_copy
        or decided.blocks_to_swap_in
        or decided.blocks_to_swap_out
        or decided.scheduled_forked_reqs
    )


def divide(counts: Mapping[str, int], drafted: Container[str], num_parts: int) -> list[list[tuple[str, int]]]:
    """Divide a step's tokens in at most `num_parts` micro-batches of nearly equal size, in their order.

    `counts`: the tokens of each request, which may be in several parts, one behind the other; those of a request in
    `drafted` stay together, since they are verified together. Returns for each part requests and their tokens.
    """
    total = sum(counts.values())
    ends = [total * (part + 1) // num_parts for part in range(num_parts)]
    parts: list[list[tuple[str, int]]] = [[] for _ in ends]
    place = part = 0
    for request_id, count in counts.items():
        left = count
        while left:
            while part < num_parts - 1 and place >= ends[part]:
                part += 1
            taken = left if request_id in drafted or part == num_parts - 1 else min(left, ends[part] - place)
            parts[part].append((request_id, taken))
            place += taken
            left -= taken
    return [tokens for tokens in parts if tokens]
