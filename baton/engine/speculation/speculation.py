"""The part of speculation in the scheduler: whose tokens are drafted, their slots in a step, and what became of them.

A request that decodes computes one token a step, and the scheduler looks at it only when it needs a block (see
decode_set.py). With a draft it leaves the decodes: the next step computes its last token and the draft behind it. Until
that step is committed nobody knows how many tokens it has, so no further step is decided (`may_run_ahead`). Without a
new draft it joins the decodes again.

Drafts from texts and grammars are made here between two steps. Those of a draft model come from the runner with the
step that sampled the tokens before them: how many tokens are wanted of which requests goes with the step's decision.

Three rules keep drafts out of everything but the step that verifies them:

  - A draft is given to a request only when the tokens before it are all committed, and it is forgotten when its step is
    decided. So neither the prefix cache, nor an offer, a swap or an output ever sees a token that was not verified.
  - A draft takes blocks only while some are free: no request is preempted for it, and it is dropped instead.
  - The slots of wrong drafts belong to the request, and its next tokens overwrite them.

A state can't be taken back behind wrong drafts. Where the model keeps states, a step's states cover no draft, and the
next step computes the drafts that were right once more, as known tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from baton.engine.batch import ModelRunnerOutput, SchedulerOutput
from baton.engine.kv_cache.block_table import AllocationAnswer
from baton.engine.request import Request, RequestStatus
from baton.engine.scheduler_state import SchedulerState
from baton.engine.speculation.request_drafts import RequestDrafts
from baton.engine.speculation.step_cost import FadingMean, Prices, StepCost
from baton.engine.stats import SpecDecodingCounts
from baton.engine.step_plan import StepPlan
from baton.engine.waiting.preemption import Preemption
from baton.engine.waiting.waiting_requests import WaitingRequests
from baton.messages.node import Leg
from baton.messages.speculation import DraftCounts, SpeculationConfig

LEAST_PRICE = 0.05
"""The least price of a drafted token: it also takes the time of looking for it, and steps can't be decided ahead."""
_ASSUMED_ROUND = 0.15
"""The assumed duration of a round of the draft model, as a share of that of a step, until both were measured."""
_STEPS_OF_A_MEASUREMENT = 512
"""A measured duration of a round is trusted for this many steps without another round, and for proportionally more if a
round takes longer than a step. Then a round is assumed to be cheap again; otherwise a draft model that was slow once
would never be tried again."""
_MAX_PROMPT_TOKENS = 256
"""The most prompt tokens that the draft model computes in one step. It bounds how much longer the step's tokens, and
requests whose KV has arrived, have to wait."""


class Speculation:
    """Drafts tokens for running requests, and schedules and commits the drafts. Called by the scheduler."""

    def __init__(
        self,
        config: SpeculationConfig | None,
        state: SchedulerState,
        waiting: WaitingRequests,
        preemption: Preemption,
    ) -> None:
        """`config`: how to draft tokens; None: only what `update_draft_token_ids` is given is verified."""
        self._config = config
        self._state = state
        self._waiting = waiting
        self._preemption = preemption
        self._cost = StepCost()
        self._round_seconds = FadingMean()
        """The duration of a round of the draft model."""
        self._num_steps_without_round = 0
        self._ready: dict[str, Request] = {}
        """Requests for which there may be a draft."""
        self._num_wanted: dict[str, int] = {}
        """How many tokens of requests the draft model is to draft in the next step."""
        self._has_ahead = False
        """Whether the draft model has tokens left to compute of requests whose KV is on its way."""
        self._asked: Mapping[str, int] = {}
        self._modelled: Mapping[str, Sequence[int]] = {}
        """What the step that is committed asked of the draft model, and its drafts behind the step's tokens."""
        self._new_block_ids: dict[str, Sequence[int]] = {}
        """The new blocks of requests with drafts, while a step is decided."""
        self.counts = SpecDecodingCounts()

    @property
    def is_waiting(self) -> bool:
        """Whether tokens are to be drafted before the next step is decided, which needs all steps committed."""
        return bool(self._ready)

    @property
    def has_work(self) -> bool:
        """Whether the draft model could compute something in a step that has no request."""
        return self._has_ahead

    def follow(self, request: Request) -> None:
        """Note the new tokens of a request that goes on."""
        config = self._config
        if config is None or request.beams is not None or not request.sampling_params.speculation:
            return
        drafts = request.drafts
        if drafts is None:
            if config.method == "grammar" and not request.matchers:
                return
            drafts = request.drafts = RequestDrafts(request, config)
        modelled = self._modelled.get(request.request_id)
        if modelled is None and request.request_id in self._asked:
            drafts.model_missed()
        if drafts.follow(self._prices(), modelled or ()):
            self._ready[request.request_id] = request
        else:
            self._ready.pop(request.request_id, None)
        # The next step yields at least one token before them.
        num_wanted = min(drafts.num_wanted, self._room(request) - 1)
        if num_wanted > 0:
            self._num_wanted[request.request_id] = num_wanted

    def note_step(self, scheduler_output: SchedulerOutput, runner_output: ModelRunnerOutput) -> None:
        """Note what a step took, and the draft model's drafts behind its tokens. The step is about to be committed."""
        self._asked, self._modelled = scheduler_output.num_drafts_wanted, runner_output.draft_token_ids
        self._has_ahead = runner_output.computes_ahead
        if self._config is None or scheduler_output.is_empty:
            return
        num_rows, seconds = scheduler_output.total_num_scheduled_tokens, runner_output.compute_seconds
        if num_rows and seconds > 0 and not scheduler_output.num_prefill_tokens:
            self._cost.add(num_rows, seconds)
        if runner_output.draft_seconds > 0:
            self._round_seconds.add(runner_output.draft_seconds)
            self._num_steps_without_round = 0
        else:
            self._num_steps_without_round += 1

    def ask_draft_model(self, plan: StepPlan) -> None:
        """Tell the runner what its draft model is to do in a step whose requests are chosen."""
        state = self._state
        plan.num_drafts_wanted, self._num_wanted = self._num_wanted, {}
        plan.computes_ahead, self._has_ahead = self._has_ahead, False
        if self._config is not None and self._config.method == "draft_model":
            plan.num_spare_tokens = plan.spare_chunk_size(_MAX_PROMPT_TOKENS)
            pays = self._prices().model < 1.0
            for request in state.begun_loads if pays else ():
                # The first token comes with the KV, the second with the step that can ask for drafts.
                may_draft = request.sampling_params.speculation and not request.spans and self._room(request) > 2
                if may_draft and request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
                    plan.add_loading(request, state.kv_cache_manager.block_ids(request.request_id))
        state.begun_loads.clear()

    def propose(self) -> None:
        """Draft tokens for the step that is about to be decided. No step may be in flight."""
        ready, self._ready = self._ready, {}
        drafts = {
            request_id: request.drafts.draft()
            for request_id, request in ready.items()
            if request.drafts is not None and self._may_draft(request)
        }
        self.update_draft_token_ids(drafts)

    def update_draft_token_ids(self, drafts: Mapping[str, Sequence[int]]) -> None:
        """Give requests drafts of their next tokens; see `Scheduler.update_draft_token_ids`. No step is in flight."""
        state = self._state
        for request_id, token_ids in drafts.items():
            request = state.requests.get(request_id)
            if request is None or not self._may_draft(request):
                continue
            request.spec_token_ids = list(token_ids[: self._room(request)])
            if request.spec_token_ids and state.decodes.leave(request_id):
                state.filling.append(request)
                state.speculating[request_id] = request

    def _room(self, request: Request) -> int:
        """How many drafts the request's next step may have: the step yields a token more than them."""
        return max(0, self._state.most_output_tokens(request) - request.num_output_tokens - 1)

    def _may_draft(self, request: Request) -> bool:
        """Whether the request decodes, and all its tokens are committed."""
        return (
            request.status is RequestStatus.RUNNING
            and (_num_known(request) == 1 or self._state.config.keeps_states)
            and request.leg not in (Leg.PREFILL, Leg.EMBED)
            and request.beams is None
            and (request.request_id in self._state.decodes or request.request_id in self._state.speculating)
        )

    def allocate(self, plan: StepPlan) -> None:
        """Get slots for all requests that had drafts, before anything of the step is scheduled."""
        state = self._state
        for request in tuple(state.speculating.values()):
            # Making room for another request may have preempted this one meanwhile.
            while request.request_id in state.speculating:
                num_new_tokens = _num_known(request) + len(request.spec_token_ids)
                allocation = state.kv_cache_manager.allocate_slots(request, num_new_tokens)
                if allocation.answer is AllocationAnswer.OK:
                    self._new_block_ids[request.request_id] = allocation.new_block_ids
                    break
                if request.spec_token_ids:
                    request.spec_token_ids = []
                else:
                    self._preemption.make_room(request, plan)

    def schedule(self, plan: StepPlan) -> None:
        """Schedule the requests with slots, as many of their drafts as the budget permits."""
        state = self._state
        num_known = sum(map(_num_known, state.speculating.values()))
        num_spare = plan.token_budget - num_known - self._num_tokens_of_others(plan)
        for request_id, request in state.speculating.items():
            drafts, request.spec_token_ids = request.spec_token_ids[: max(0, num_spare)], []
            num_spare -= len(drafts)
            plan.add_drafted(request, _num_known(request), drafts, self._new_block_ids[request_id])
        self._new_block_ids.clear()

    def _num_tokens_of_others(self, plan: StepPlan) -> int:
        """How many tokens of the budget drafts leave to requests that are scheduled later in this step.

        That is one for each, and where prompts have a budget beside the streams (`SchedulerConfig.step_tokens`), what
        they can use of it.
        """
        state, waiting, config = self._state, self._waiting, self._state.config
        filling = [request for request in state.filling if request.request_id not in state.speculating]
        num_free_seats = config.max_num_seqs - len(state.running)
        num_waiting = len(waiting.arrived) + len(waiting.swapped) + waiting.num_queued
        num_of_prompts = 0
        if config.step_tokens > config.max_num_batched_tokens:
            num_of_prompts = sum(map(_num_known, filling))
            num_of_prompts += waiting.num_queued_tokens + waiting.swapped.num_tokens if num_free_seats else 0
        return len(filling) + min(num_waiting, num_free_seats) + min(num_of_prompts, plan.prompt_room)

    def commit(self, request: Request, drafts: Sequence[int], token_ids: Sequence[int]) -> int:
        """Take back what a step computed of wrong drafts, or of all where states cover none; returns for how many
        tokens that is.

        `token_ids`: what the runner sampled; nothing if the request failed.
        """
        num_right = max(0, len(token_ids) - 1)
        num_void = len(drafts) if self._state.config.keeps_states else len(drafts) - num_right
        request.num_computed_tokens -= num_void
        if token_ids:
            self.counts.note(len(drafts), num_right)
            request.draft_counts += DraftCounts(len(drafts))
            request.has_new_draft_counts = True
            if request.drafts is not None:
                request.drafts.verified(len(drafts), num_right, self._prices())
        return num_void

    def count_output(self, request: Request, token_ids: Sequence[int], num_appended: int) -> None:
        """Count the drafts that are output. `num_appended`: how many of the sampled tokens are.

        Right drafts behind the end are no part of the output; without an end, the last token was not drafted.
        """
        request.draft_counts += DraftCounts(0, min(num_appended, len(token_ids) - 1))

    def _prices(self) -> Prices:
        row = max(LEAST_PRICE, self._cost.price(max(1, len(self._state.running))))
        step, one_round = self._cost.mean_seconds, self._round_seconds.mean
        share = one_round / step if step and one_round else _ASSUMED_ROUND
        if self._num_steps_without_round > _STEPS_OF_A_MEASUREMENT * max(1.0, share):
            share = _ASSUMED_ROUND
        return Prices(row, row + share)


def _num_known(request: Request) -> int:
    """How many committed tokens of a request its next step computes."""
    return request.num_tokens - request.num_computed_tokens
