"""A node in virtual time: the real scheduler and block pool, with step times from a formula.

A step is scheduled, takes its time, and is committed, as on a node without asynchronous scheduling. While all requests
only decode, many steps are one event (`DecodeRun`). `stepwise` turns that off, and must not change any result.

A node reports a step to its router if a request joined, ended or was preempted in it. Steps that only decode are not
reported, so a router knows context lengths as of the last time that a request joined or ended on the node. A node that
drafts tokens (`drafts`) has no such runs, since the tokens of a step depend on its drafts, and it reports each step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence

from baton.bench.simulator.attempt import Attempt
from baton.bench.simulator.config import NodeSizes
from baton.bench.simulator.drafts import SimulatedDrafts, num_tokens_of
from baton.bench.simulator.events import Event, RunningStep, SharedHost, StepEnds, Timeline, TimelineEntry
from baton.bench.simulator.handoff import HandOffs, OfferingConnector, ReadingConnector
from baton.bench.simulator.prompt import TOKEN
from baton.bench.simulator.scheduler import (
    DecodeRun,
    SimulatedScheduler,
    same_token_output,
    scheduled,
    scheduler_config,
    step_s_of,
    timeline_entry,
)
from baton.bench.simulator.streams_out import StreamsOut
from baton.engine.batch import EngineCoreOutput, EngineCoreOutputs, ModelRunnerOutput, SchedulerOutput
from baton.engine.connector import KVTransferOutput
from baton.engine.kv_cache.block_hash import CacheKeyFields
from baton.engine.kv_cache.events import KVEventLog
from baton.messages.ids import AttemptKey
from baton.messages.kv_cache import KVCacheUpdate
from baton.messages.node import (
    Leg,
    LoadReport,
    MoveOut,
    NodeDescription,
    Outcome,
    RequestDelta,
    Role,
    StepFigures,
    StepReport,
    Submit,
)
from baton.node.reports.reports import kv_cache_updates, load_of

_ONE_TOKEN = (TOKEN,)
_NOTHING = ModelRunnerOutput({})
_SAME_TOKEN = same_token_output(TOKEN)
_KEPT_KEYS = 1024
_LONGEST_RUN = 64
"""Largest number of steps in a run: most runs are interrupted earlier."""
TokenTimes = dict[tuple[AttemptKey, int], Sequence[float]]
"""When the last tokens of a delta were drawn, by attempt and first token index. The reader removes them."""


class SimulatedNode:
    """One incarnation of a node."""

    def __init__(
        self,
        description: NodeDescription,
        sizes: NodeSizes,
        timeline: Timeline,
        handoffs: HandOffs,
        report: Callable[[SimulatedNode, StepReport, TokenTimes], None],
        *,
        stepwise: bool = False,
        keeps_timeline: bool = False,
        host: SharedHost | None = None,
        drafts: SimulatedDrafts | None = None,
    ) -> None:
        """`report` is called with each report to the router, and the times at which the tokens in it were drawn.

        `host`: the machine that the node shares with others; it needs `stepwise`, and so do `drafts`.
        """
        self.description = description
        self.incarnation = description.incarnation
        self.is_gone = False
        self.watches_kv_cache = False
        self.num_steps = 0
        self.timeline: list[TimelineEntry] | None = [] if keeps_timeline else None
        self._times, self._encode_s = sizes.times, sizes.encode_ms / 1e3
        self._clock = timeline
        self._handoffs = handoffs
        self._report = report
        self._stepwise = stepwise
        self._host = host
        self.drafts = drafts
        is_prefill = description.role is Role.PREFILL
        connector = OfferingConnector(self, handoffs) if is_prefill else ReadingConnector(self, handoffs)
        fields = CacheKeyFields(description.model_fingerprint, description.dtype, description.kv_layout)
        self.scheduler = SimulatedScheduler(
            scheduler_config(description, sizes),
            fields,
            timeline,
            connector,
            known_token=None if stepwise else TOKEN,
            prompts_first=sizes.prompts_first,
        )
        self.scheduler.stop_events()
        # Events are read after each step, and keeping them would take much memory with hundreds of nodes.
        self.scheduler.kv_cache_manager.kv_events = KVEventLog(
            max(_KEPT_KEYS, description.num_blocks), with_tokens=False
        )
        self._attempts: dict[str, Attempt] = {}
        self._streams_out = StreamsOut(self, handoffs, description.block_size)
        self._ends = StepEnds()
        self._due: Event | RunningStep | None = None
        """The end of the current step or run."""
        self._decided: SchedulerOutput | None = None
        self._run: DecodeRun | None = None
        self._run_ends: list[float] = []
        self._num_run = 0
        """The number of these steps that have ended."""
        self._is_run_in_step = False
        self._num_quiet = 0
        """With `stepwise`: the number of steps that would be one run and are therefore not reported."""
        self._started_at = 0.0
        self._ended_at: float | None = None
        """When the last step ended."""
        self._next_kv_event = 0
        self._token_times: TokenTimes = {}

    # Called by router and hand-offs.

    def submit(self, submit: Submit) -> None:
        """Starts a leg."""
        if self.is_gone:
            return
        self._interrupt()
        attempt = self._attempts[str(submit.attempt)] = Attempt.of(submit, self._clock.now)
        self.scheduler.add_request(attempt.request)
        self._start_next_step()

    def abort(self, key: AttemptKey) -> None:
        """Aborts an attempt; nothing more is reported of it."""
        if self.is_gone:
            return
        request_id = str(key)
        self._streams_out.forget(request_id)
        if self._attempts.pop(request_id, None) is not None:
            self._forget_drafts(request_id)
            self._interrupt()
            self.scheduler.end_requests([request_id], Outcome.ABORTED)
        self._handoffs.drop(request_id, self)
        self._start_next_step()
        self._report_if_idle()

    def _report_if_idle(self) -> None:
        """Reports, soon, that it has nothing left to do: no step tells so."""
        if self._due is None and not self._attempts:
            self._clock.call_soon(self._report_load, "idle-node")

    def _report_load(self) -> None:
        if self._due is None and not self.is_gone:
            self._report(self, StepReport((), self.load()), self._token_times)

    def report_progress(self) -> None:
        """Reports the tokens of all streams, as a node does after each step."""
        self._interrupt()
        self.scheduler.bring_up_decodes()
        self._report_deltas(delta for one in self._attempts.values() for delta in self._drawn(one))

    def move_out(self, move: MoveOut) -> None:
        """Offers the KV of a stream that is to go on at another node, and ends it once nearly all of that is read."""
        attempt = self._attempts.get(str(move.attempt))
        if self.is_gone or attempt is None:
            return
        self._interrupt()
        self.scheduler.bring_up_decodes()
        self._streams_out.begin(move, attempt)

    def on_read(self, request_id: str) -> None:
        if self._streams_out.read(request_id) and not self.is_gone:
            self._interrupt()

    def give_back(self) -> None:
        """Ends all attempts, as a node does that changes its role: the router places them elsewhere."""
        self._interrupt()
        self.scheduler.bring_up_decodes()
        deltas: list[RequestDelta] = []
        for attempt in list(self._attempts.values()):
            deltas += self._end_attempt(attempt, Outcome.ABORTED, "the node changes its role")
            self._handoffs.drop(str(attempt.key), self)
        self._report_deltas(deltas)
        self._start_next_step()

    def _end_attempt(self, attempt: Attempt, outcome: Outcome, error: str = "") -> Sequence[RequestDelta]:
        # What it has drawn goes to the client first: of an attempt that was aborted nothing is taken any more.
        deltas = [*self._drawn(attempt), self._delta(attempt, outcome, error)]
        request_id = str(attempt.key)
        del self._attempts[request_id]
        self._forget_drafts(request_id)
        self.scheduler.end_requests([request_id], outcome)
        return deltas

    def _drawn(self, attempt: Attempt) -> Sequence[RequestDelta]:
        """What is not reported yet of a stream."""
        delta = None if attempt.leg is Leg.PREFILL else self._delta(attempt, None, "")
        return (delta,) if delta is not None and delta.token_ids else ()

    def _report_deltas(self, deltas: Iterable[RequestDelta]) -> None:
        if deltas := list(deltas):
            self._report(self, StepReport(deltas, self.load()), self._token_times)

    def on_transfer(self, output: KVTransferOutput) -> None:
        """Tells the scheduler what arrived, failed or was released."""
        if self.is_gone:
            return
        self._interrupt()
        arrived = [self._attempts[request_id] for request_id in output.arrived if request_id in self._attempts]
        moved = [attempt for attempt in arrived if attempt.request.cut_by]
        outputs = self.scheduler.update_from_kv_transfer(output)
        for attempt in moved:
            # The router has all tokens that a stream had on the other node.
            attempt.num_reported = len(attempt.request.output_token_ids)
        if outputs:
            self._publish(outputs, (), None)
        self._start_next_step()
        self._report_if_idle()

    def watch_kv_cache(self) -> KVCacheUpdate:
        """Reports the prefix cache's changes from now on; returns its contents."""
        snapshot = self.scheduler.kv_snapshot()
        self.watches_kv_cache = True
        self._next_kv_event = snapshot.next_sequence
        return next(iter(kv_cache_updates(snapshot)))

    def cache_fetched_blocks(self, keys: Sequence[bytes]) -> bool:
        """Puts blocks from another node into the prefix cache; without room returns False and changes nothing."""
        self._interrupt()
        return self.scheduler.cache_blocks(keys)

    def fail(self) -> None:
        """The process dies. What it had computed until now was reported."""
        self._interrupt()
        self.scheduler.bring_up_decodes()
        self.is_gone = True
        if self._due is not None:
            self._due.cancel()
        deltas = [delta for attempt in self._attempts.values() for delta in self._drawn(attempt)]
        if deltas:
            self._report(self, StepReport(deltas, LoadReport()), self._token_times)
        self._attempts.clear()

    def load(self) -> LoadReport:
        return load_of(self.scheduler)

    @property
    def is_idle(self) -> bool:
        """Whether every block is free or only cached, and no request runs or waits."""
        stats = self.scheduler.make_stats()
        return not self._attempts and not self.scheduler.has_requests() and stats.free_blocks == stats.total_blocks

    # Steps.

    def _start_next_step(self) -> None:
        """Starts a step if none is in flight and there is work."""
        while self._due is None and not self.is_gone and self.scheduler.has_work():
            if not self._stepwise:
                run = self.scheduler.decode_run()
                if run is not None:
                    self._start_run(run)
                    return
            elif self.drafts is not None:
                attempts = self._attempts.values()
                drafts = self.drafts.propose((attempt.key.request_id, attempt.request) for attempt in attempts)
                self.scheduler.update_draft_token_ids(drafts)
            elif self._num_quiet == 0:
                self._num_quiet = min(self.scheduler.num_quiet_steps(), _LONGEST_RUN)
            decided = self.scheduler.schedule()
            if decided.is_empty:
                self._publish(self.scheduler.update_from_output(decided, _NOTHING), (), None)
            else:
                self._start_step(decided)

    def _go_on(self) -> None:
        """Goes on after a step."""
        if self._streams_out.is_due:
            self._hand_over()
        self._start_next_step()
        if self._streams_out.is_due:
            self._interrupt()

    def _hand_over(self) -> None:
        """Ends the streams that other nodes go on with."""
        self.scheduler.bring_up_decodes()
        deltas: list[RequestDelta] = []
        for cut in self._streams_out.after_step(self._attempts):
            deltas += self._end_attempt(cut.attempt, Outcome.HANDED_OFF)
            self._handoffs.cut(self, cut.to, cut.num_computed_tokens, cut.token_ids)
        self._report_deltas(deltas)

    def _start_step(self, decided: SchedulerOutput) -> None:
        now = self._clock.now
        encode_s = 0.0
        for new in decided.scheduled_new_reqs:
            if (attempt := self._attempts.get(new.request_id)) is not None and attempt.scheduled_at is None:
                attempt.scheduled_at = now
                encode_s += attempt.num_images * self._encode_s
        for request_id in decided.preempted_req_ids:
            if (preempted := self._attempts.get(request_id)) is not None:
                self._collect_times(preempted)
        step_s = encode_s + step_s_of(decided, self.scheduler.requests, self._times, self.drafts, follows=self._follows)
        self._decided, self._started_at = decided, now
        if self._host is None:
            self._due = self._clock.call_at(now + step_s, self._end_step)
        else:
            self._due = self._host.compute(step_s, decided.num_prefill_tokens > 0, self._end_step)

    @property
    def _follows(self) -> bool:
        """Whether a step that begins now follows another one; with drafts it begins only when that one is done."""
        return self._ended_at == self._clock.now and self.drafts is None

    def _end_step(self) -> None:
        decided, self._decided, self._due = self._decided, None, None
        assert decided is not None
        drawn: dict[str, Sequence[int]] = (
            dict.fromkeys(decided.num_scheduled_tokens, _ONE_TOKEN) if self._stepwise else {}
        )
        joined: set[str] = set()
        index, now = self._ends.next_step, self._clock.now
        for data in scheduled(decided):
            attempt = self._attempts.get(data.request_id)
            if attempt is None or attempt.first_unreported_step is not None:
                continue
            if attempt.request.num_computed_tokens < attempt.request.num_tokens:
                # A chunk that does not reach the end of its prompt draws no token.
                drawn.pop(data.request_id, None)
            else:
                attempt.first_unreported_step = index
                joined.add(data.request_id)
        num_accepted_tokens = self._verify(decided, drawn) if self.drafts is not None else 0
        self._note_ends((now,))
        outputs = self.scheduler.update_from_output(
            decided, ModelRunnerOutput(drawn) if self._stepwise else _SAME_TOKEN
        )
        if self.timeline is not None:
            self.timeline.append(timeline_entry(self._started_at, now, decided))
        if self._num_quiet == 0:
            num_prefill_tokens = decided.num_prefill_tokens
            drafts = decided.scheduled_spec_decode_tokens
            num_draft_tokens = num_tokens_of(drafts)
            figures = StepFigures(
                (now - self._started_at) * 1e3,
                num_prefill_tokens,
                decided.total_num_scheduled_tokens - num_prefill_tokens - num_draft_tokens,
                decided.num_decode_context_tokens,
                len(drafts),
                num_draft_tokens,
                num_accepted_tokens,
            )
            self._publish(outputs, joined, figures)
        else:
            self._num_quiet -= 1
        self._go_on()

    def _verify(self, decided: SchedulerOutput, drawn: dict[str, Sequence[int]]) -> int:
        """Draw the tokens of right drafts, at the end of their step. Returns their number."""
        drafts, num_accepted_tokens, now = self.drafts, 0, self._clock.now
        assert drafts is not None
        num_drafted = num_tokens_of(decided.scheduled_spec_decode_tokens)
        num_rows = decided.total_num_scheduled_tokens - decided.num_prefill_tokens
        drafts.totals.num_decodes += num_rows - num_drafted
        if not decided.num_prefill_tokens:
            drafts.note_step(num_rows, now - self._started_at)
        for request_id, token_ids in decided.scheduled_spec_decode_tokens.items():
            attempt = self._attempts.get(request_id)
            if attempt is None:
                continue
            num_right = drafts.verify(attempt.key.request_id, attempt.request, len(token_ids))
            if num_right:
                drawn[request_id] = _ONE_TOKEN * (1 + num_right)
                self._collect_times(attempt, goes_on=True)
                attempt.times += [now] * num_right
                num_accepted_tokens += num_right
        return num_accepted_tokens

    def _forget_drafts(self, request_id: str) -> None:
        if self.drafts is not None:
            self.drafts.forget(request_id)

    # Runs of steps.

    def _start_run(self, run: DecodeRun) -> None:
        self._run, self._num_run, self._is_run_in_step = run, 0, False
        self._started_at = when = self._clock.now
        batch, context, decode_s = run.num_sequences, run.num_context_tokens, self._times.decode_s
        ends: list[float] = []
        follows = self._follows
        self._run_ends = ends
        for _ in range(min(run.max_steps, _LONGEST_RUN)):
            when += decode_s(batch, context, follows=follows)
            context += batch
            follows = True
            ends.append(when)
        self._due = self._clock.call_at(when, self._end_run)

    def _interrupt(self) -> None:
        """Ends a run with its current step, because the node's state is about to change."""
        if self._num_quiet:
            self._num_quiet = 1
        run, due = self._run, self._due
        if run is None or due is None or self._is_run_in_step:
            return
        num_over = min(bisect_right(self._run_ends, self._clock.now), len(self._run_ends) - 1)
        run.advance(num_over)
        run.begin()
        self._num_run, self._is_run_in_step = num_over, True
        self._note_ends(self._run_ends[:num_over])
        due.cancel()
        self._due = self._clock.call_at(self._run_ends[num_over], self._end_run)

    def _end_run(self) -> None:
        run, self._run, self._due = self._run, None, None
        assert run is not None
        if self._is_run_in_step:
            run.commit()
            self._note_ends(self._run_ends[self._num_run : self._num_run + 1])
        else:
            run.advance(len(self._run_ends))
            self._note_ends(self._run_ends)
        if self.timeline is not None:
            self.timeline.append(TimelineEntry(self._started_at, self._clock.now, "decode", run.num_sequences))
        self._go_on()

    # Reports.

    def _publish(self, outputs: EngineCoreOutputs, joined: Collection[str], figures: StepFigures | None) -> None:
        deltas: list[RequestDelta] = []
        for of_client in outputs.values():
            for output in of_client:
                request_id = str(output.attempt)
                if output.outcome is None and request_id not in joined:
                    continue
                if (attempt := self._attempts.get(request_id)) is not None:
                    deltas += self._deltas_of(attempt, output)
        update = self._kv_cache_update() if self.watches_kv_cache else None
        self._report(self, StepReport(deltas, self.load(), update, step=figures), self._token_times)

    def _deltas_of(self, attempt: Attempt, output: EngineCoreOutput) -> Sequence[RequestDelta]:
        now = self._clock.now
        if attempt.first_token_at is None and output.new_token_ids:
            attempt.first_token_at = now
            attempt.num_cached_tokens = output.num_cached_tokens
            attempt.num_external_tokens = output.num_external_tokens
        if output.outcome is None:
            return (self._delta(attempt, None, ""),)
        # Tokens before the last one get a delta without an outcome: a flight processes them all at once.
        before = [self._delta(attempt, None, "", spared=1)] if attempt.num_reported else []
        delta = self._delta(attempt, output.outcome, str(output.error or ""))
        delta.timings = attempt.timings(self._handoffs.transfers)
        request_id = str(attempt.key)
        del self._attempts[request_id]
        self._forget_drafts(request_id)
        return (*before, delta) if before and before[0].token_ids else (delta,)

    def _delta(self, attempt: Attempt, outcome: Outcome | None, error: str, spared: int = 0) -> RequestDelta:
        """A delta of the unreported tokens, without the last `spared` ones."""
        self._collect_times(attempt, goes_on=outcome is None)
        first, tokens, times = attempt.num_reported, attempt.request.output_token_ids, attempt.times
        num_tokens = len(tokens)
        end = attempt.num_reported = max(first, num_tokens - spared)
        cut = max(0, len(times) - (num_tokens - end))
        if cut == len(times):
            self._token_times[attempt.key, first], attempt.times = times, []
        else:
            self._token_times[attempt.key, first], attempt.times = times[:cut], times[cut:]
        return RequestDelta(attempt.key, first, tokens[first:end], (), outcome, None, error)

    def _kv_cache_update(self) -> KVCacheUpdate | None:
        batch = self.scheduler.kv_cache_manager.kv_events.since(self._next_kv_event)
        if batch.complete and not batch.events:
            return None
        self._next_kv_event = batch.next_sequence
        if not batch.complete:
            return self.watch_kv_cache()
        self.scheduler.kv_cache_manager.kv_events.forget_before(batch.next_sequence)
        return next(iter(kv_cache_updates(batch)))

    # Times of tokens.

    def _note_ends(self, ends: Sequence[float]) -> None:
        self.num_steps += len(ends)
        if ends:
            self._ended_at = ends[-1]
        self._ends.add(ends, (attempt.first_unreported_step for attempt in self._attempts.values()))

    def _collect_times(self, attempt: Attempt, *, goes_on: bool = False) -> None:
        """Adds the times of tokens that were drawn in consecutive steps. `goes_on`: the next step draws one, too."""
        if attempt.first_unreported_step is not None:
            attempt.times += self._ends.since(attempt.first_unreported_step)
            attempt.first_unreported_step = self._ends.next_step if goes_on else None
