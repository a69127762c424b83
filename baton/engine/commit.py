"""The commit of a computed step: tokens are appended, stops are checked, and full blocks enter the prefix cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from baton.engine.batch import NOTHING_BUT_TOKENS, EngineCoreEventType, EngineCoreOutput, ModelRunnerOutput, new_output
from baton.engine.request import Request, RequestStatus
from baton.engine.scheduler_state import OutputsByClient, SchedulerState
from baton.engine.speculation.speculation import Speculation
from baton.engine.step_plan import StepPlan
from baton.engine.stopping import check_stop
from baton.engine.waiting.preemption import Preemption
from baton.engine.waiting.sequences import Sequences
from baton.messages.node import Leg, Outcome
from baton.messages.sampling import TokenLogprobs

_NUM_OUTPUTS_WITH_CACHE_COUNTS = 2
"""How many of a request's first outputs say how many tokens of its prompt were cached or came from another node."""


class Commit:
    """Processes a runner's results. Results for a request that ended while its step was in flight are skipped."""

    def __init__(
        self, state: SchedulerState, sequences: Sequences, speculation: Speculation, preemption: Preemption
    ) -> None:
        self._state = state
        self._sequences = sequences
        self._speculation = speculation
        self._preemption = preemption
        self._config = state.config

    def commit(
        self,
        plan: StepPlan,
        num_scheduled_tokens: Mapping[str, int],
        runner_output: ModelRunnerOutput,
        outputs: OutputsByClient,
    ) -> None:
        """Process all results of a step, in the order in which the runner computed them."""
        for client_index, requests in plan.decodes.by_client.items():
            self._commit_decodes(requests, runner_output, outputs.for_client(client_index), outputs)
        for request in self._state.decodes.committed():
            self._commit_one(request, 1, request.num_computed_tokens, runner_output, outputs)
        for request, num_computed_tokens in zip(plan.requests, plan.num_computed_tokens, strict=True):
            if request.status is RequestStatus.RUNNING:
                num_tokens = num_scheduled_tokens[request.request_id]
                drafts = plan.drafts.get(request.request_id)
                if drafts is not None:
                    sampled = runner_output.sampled_token_ids.get(request.request_id, ())
                    num_computed_tokens -= self._speculation.commit(request, drafts, sampled)
                    # The tokens of right drafts are computed, and not appended yet.
                    num_computed_tokens = min(num_computed_tokens, request.num_tokens)
                    num_tokens -= len(drafts)
                self._commit_one(request, num_tokens, num_computed_tokens, runner_output, outputs)
                request.append_only_until = self._append_only_until(request)
            else:
                self._state.counters.num_skipped_results += 1

    def _commit_decodes(
        self,
        requests: Sequence[Request],
        runner_output: ModelRunnerOutput,
        own_outputs: list[EngineCoreOutput],
        outputs: OutputsByClient,
    ) -> None:
        """The innermost loop of a step: for most decoding requests, append the token and output it."""
        sampled, logprobs, running = runner_output.sampled_token_ids, runner_output.logprobs, RequestStatus.RUNNING
        no_tokens: Sequence[int] = ()
        failed = runner_output.failed
        for request in requests:
            if request.status is not running:
                self._state.counters.num_skipped_results += 1
                continue
            request_id = request.request_id
            new_token_ids = sampled.get(request_id, no_tokens)
            request.num_computed_tokens += 1
            output_token_ids = request.output_token_ids
            first_index = len(output_token_ids)
            if (
                first_index < request.append_only_until
                and len(new_token_ids) == 1
                and new_token_ids[0] not in request.stop_ids
                and request_id not in failed
            ):
                output_token_ids.append(new_token_ids[0])
                new_logprobs = logprobs.get(request_id, ()) if logprobs else ()
                head = (request.attempt, new_token_ids, first_index, new_logprobs, request.sequence_index)
                own_outputs.append(new_output(head + NOTHING_BUT_TOKENS))
            else:
                self._commit_one(request, 1, request.num_computed_tokens, runner_output, outputs)
                if request.status is running:
                    request.append_only_until = self._append_only_until(request)

    def _append_only_until(self, request: Request) -> int:
        """The output length up to which a commit only appends a token (see `Request.append_only_until`).

        The token at that length fills a block, or the request ends or starts over with it. 0: each token needs more,
        since it may complete a repetition, since drafts follow it, since its output still has counts of cached tokens,
        or since the request is moved.
        """
        if request.repetition is not None or request.drafts is not None or request.move is not None:
            return 0
        num_output_tokens, block_size = len(request.output_token_ids), self._config.block_size
        to_full_block = block_size - request.num_computed_tokens % block_size
        limit = min(self._state.most_output_tokens(request), num_output_tokens + to_full_block) - 1
        return 0 if num_output_tokens - request.num_given_tokens < _NUM_OUTPUTS_WITH_CACHE_COUNTS else limit

    def _drop_unseen(self, request: Request, num_computed_tokens: int) -> None:
        manager, next_query = self._state.kv_cache_manager, num_computed_tokens
        if request.leg is Leg.PREFILL:
            # Its blocks are offered to where the next queries are.
            next_query = min(num_computed_tokens, manager.next_query(request))
        elif request.seen_from:
            next_query = min(num_computed_tokens, request.seen_from)
        if request.group is None or request.group.all_run:
            manager.drop_unseen(request.request_id, next_query)

    def _commit_one(
        self,
        request: Request,
        num_scheduled_tokens: int,
        num_computed_tokens: int,
        runner_output: ModelRunnerOutput,
        outputs: OutputsByClient,
    ) -> None:
        """Process a step's result for one request, whose first `num_computed_tokens` tokens have KV now."""
        state, request_id = self._state, request.request_id
        failure = runner_output.failed.get(request_id)
        if failure is not None:
            state.fail(request, failure, outputs)
            return
        state.kv_cache_manager.cache_blocks(request, num_computed_tokens)
        if request.encoder_inputs:
            state.encoder_cache.computed(request_id, request.encoder_inputs, num_computed_tokens)
        self._drop_unseen(request, num_computed_tokens)
        has_output = request.num_output_tokens > request.num_given_tokens
        # With states, right drafts are computed again as known tokens, and are no chunk of a prompt.
        if not has_output or (num_scheduled_tokens > 1 and not self._config.keeps_states):
            state.events.record(EngineCoreEventType.CHUNK_COMPUTED, request, num_computed_tokens)
        if request.leg is Leg.PREFILL or request.move is not None:
            block_ids = state.kv_cache_manager.exchanged_block_ids(request)
            try:
                state.connector.blocks_computed(request, block_ids, num_computed_tokens)
            except Exception as exc:
                state.end_after_connector_error(request, exc, outputs)
                return
        if num_computed_tokens < request.num_tokens:
            return
        if request.leg is Leg.EMBED:
            self._commit_embedding(request, runner_output.embeddings.get(request_id, b""), outputs)
            return
        token_ids = runner_output.sampled_token_ids.get(request_id)
        if not token_ids:
            state.end(request, Outcome.ERROR, outputs, error="the runner returned no token")
            return
        logprobs = runner_output.logprobs.get(request_id, ())
        if runner_output.prompt_logprobs:
            request.prompt_logprobs = runner_output.prompt_logprobs.get(request_id, ())
        if request.beams is not None:
            self._sequences.process_beam(request, request.beams, logprobs, outputs)
        else:
            self._append_tokens(request, token_ids, logprobs, outputs)

    def _may_cut(self, request: Request) -> bool:
        """Whether a request that is moved ends here with its last token. Ends the move if that came to its bound."""
        move = request.move
        if move is None:
            return False
        # With states, right drafts are still to be computed.
        is_computed = request.num_computed_tokens == request.num_tokens - 1 and not self._state.is_step_in_flight
        if is_computed and self._state.connector.may_cut(request):
            return True
        if request.num_tokens >= move.cut_by:
            self._state.end_move(request, f"the reader was behind when there were {request.num_tokens} tokens")
        return False

    def _commit_embedding(self, request: Request, embedding: bytes, outputs: OutputsByClient) -> None:
        state = self._state
        if not embedding:
            state.end(request, Outcome.ERROR, outputs, error="the runner returned no embedding")
            return
        # The client waits for the embedding as other clients wait for the first token.
        state.events.record(EngineCoreEventType.FIRST_TOKEN, request)
        state.end(request, Outcome.STOP, outputs, embedding=embedding)

    def _append_tokens(
        self,
        request: Request,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs],
        outputs: OutputsByClient,
    ) -> None:
        state, stop, is_first = self._state, None, request.num_output_tokens == request.num_given_tokens
        first_index = len(request.output_token_ids) - request.num_unreported
        if request.num_unreported:
            logprobs = (*request.last_logprobs, *logprobs)
            request.num_unreported = 0
        if is_first and request.leg is not Leg.PREFILL:
            self._sequences.fork(request)
        num_before = len(request.output_token_ids)
        for token_id in token_ids:
            request.output_token_ids.append(token_id)
            stop = check_stop(request, state.max_num_tokens(request))
            if stop is not None:
                break
        if len(token_ids) > 1:
            self._speculation.count_output(request, token_ids, len(request.output_token_ids) - num_before)
            state.kv_cache_manager.cache_blocks(request, min(request.num_computed_tokens, request.num_tokens))
        if is_first:
            state.events.record(EngineCoreEventType.FIRST_TOKEN, request)
        if request.leg is Leg.PREFILL:
            request.last_logprobs = logprobs
        if request.leg is Leg.PREFILL and request.has_several:
            # The first sequence may have stopped, but the others need the prompt; a beam search has no first token yet.
            stop = None
            first_index = len(request.output_token_ids) if request.sampling_params.beam_width else first_index
        if stop is None and request.leg is not Leg.PREFILL and not self._may_cut(request):
            state.emit(request, first_index, logprobs, outputs)
            self._speculation.follow(request)
            if self._state.is_long(request) and not request.is_long:
                self._preemption.start_over(request)
            return
        state.end(
            request,
            stop.outcome if stop is not None else Outcome.HANDED_OFF,
            outputs,
            stop_reason=stop.stop_reason if stop is not None else None,
            error=stop.error if stop is not None else None,
            first_index=first_index,
            logprobs=logprobs,
        )
