"""What a computed step changes: tokens are appended, stops judged, blocks enter the prefix cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from baton.engine.batch import EngineCoreEventType, EngineCoreOutput, ModelRunnerOutput
from baton.engine.ledger import Ledger, OutputsByClient
from baton.engine.request import Request, RequestStatus
from baton.engine.sequence_steps import take_beam
from baton.engine.step_plan import StepPlan
from baton.engine.stopping import check_stop, most_outputs
from baton.engine.waiting.admission import Admission
from baton.messages.node import Leg
from baton.messages.sampling import TokenLogprobs

_FIRST_FIGURES = 2
"""Outputs that are so long, what it came with aside, say how much of the prompt was cached or came from elsewhere."""


class Commit:
    """Takes in a runner's results. A request that ended while its step was in flight has none."""

    def __init__(self, ledger: Ledger, admission: Admission) -> None:
        self._ledger = ledger
        self._admission = admission
        self._config = ledger.config
        self.num_skipped_results = 0
        """Results for requests that had ended or were never scheduled."""

    def take(
        self,
        plan: StepPlan,
        num_scheduled_tokens: Mapping[str, int],
        runner_output: ModelRunnerOutput,
        outputs: OutputsByClient,
    ) -> None:
        """All that a step brought, in the runner's order."""
        for client_index, requests in plan.decodes.by_client.items():
            self._decodes(requests, runner_output, outputs.of(client_index), outputs)
        for request in self._ledger.decodes.committed():
            self._one(request, 1, request.num_computed_tokens, runner_output, outputs)
        for request, num_computed_tokens in zip(plan.requests, plan.num_computed_tokens, strict=True):
            if request.status is RequestStatus.RUNNING:
                num_tokens = num_scheduled_tokens[request.request_id]
                self._one(request, num_tokens, num_computed_tokens, runner_output, outputs)
                request.attention_at = self.next_attention(request)
            else:
                self.num_skipped_results += 1

    def _decodes(
        self,
        requests: Sequence[Request],
        runner_output: ModelRunnerOutput,
        own_outputs: list[EngineCoreOutput],
        outputs: OutputsByClient,
    ) -> None:
        """The step's inmost loop: for most requests, append a token and say so."""
        sampled, logprobs, running = runner_output.sampled_token_ids, runner_output.logprobs, RequestStatus.RUNNING
        no_tokens: Sequence[int] = ()
        failed = runner_output.failed
        for request in requests:
            if request.status is not running:
                self.num_skipped_results += 1
                continue
            request_id = request.request_id
            new_token_ids = sampled.get(request_id, no_tokens)
            request.num_computed_tokens += 1
            output_token_ids = request.output_token_ids
            first_index = len(output_token_ids)
            if (
                first_index < request.attention_at
                and len(new_token_ids) == 1
                and new_token_ids[0] not in request.stop_ids
                and request_id not in failed
            ):
                output_token_ids.append(new_token_ids[0])
                new_logprobs = logprobs.get(request_id, ()) if logprobs else ()
                own_outputs.append(EngineCoreOutput(request_id, new_token_ids, first_index, new_logprobs))
            else:
                self._one(request, 1, request.num_computed_tokens, runner_output, outputs)
                if request.status is running:
                    request.attention_at = self.next_attention(request)

    def next_attention(self, request: Request) -> int:
        """The output index whose token fills a block, reaches a limit, or still carries first figures.

        0: each token needs attention, since a repetition may end with any.
        """
        if request.repetition is not None:
            return 0
        num_output_tokens, block_size = len(request.output_token_ids), self._config.block_size
        to_full_block = block_size - request.num_computed_tokens % block_size
        limit = min(most_outputs(request, self._ledger.most_tokens(request)), num_output_tokens + to_full_block) - 1
        return 0 if num_output_tokens - request.num_given_tokens < _FIRST_FIGURES else limit

    def _drop_unseen(self, request: Request, num_computed_tokens: int) -> None:
        # What a prefill leg offers is what the last token that it came with sees.
        is_prefill = request.leg is Leg.PREFILL
        next_query = min(num_computed_tokens, request.num_submitted_tokens - 1) if is_prefill else num_computed_tokens
        if request.group is None or request.group.all_run:
            self._ledger.kv_cache_manager.drop_unseen(request.request_id, next_query)

    def _one(
        self,
        request: Request,
        num_scheduled_tokens: int,
        num_computed_tokens: int,
        runner_output: ModelRunnerOutput,
        outputs: OutputsByClient,
    ) -> None:
        """What a step brought for one request, of which `num_computed_tokens` have KV now."""
        ledger, request_id = self._ledger, request.request_id
        failure = runner_output.failed.get(request_id)
        if failure is not None:
            status = RequestStatus.INVALID if request_id in runner_output.invalid else RequestStatus.ERROR
            ledger.end(request, status, outputs, error=failure)
            return
        ledger.kv_cache_manager.cache_blocks(request, num_computed_tokens)
        self._drop_unseen(request, num_computed_tokens)
        if num_scheduled_tokens > 1 or request.num_output_tokens == request.num_given_tokens:
            ledger.events.record(EngineCoreEventType.CHUNK_COMPUTED, request_id, num_computed_tokens)
        if request.leg is Leg.PREFILL:
            block_ids = ledger.kv_cache_manager.submitted_block_ids(request)
            try:
                ledger.connector.blocks_computed(request, block_ids, num_computed_tokens)
            except Exception as exc:
                ledger.end_by_connector(request, exc, outputs)
                return
        if num_computed_tokens < request.num_tokens:
            return
        if request.leg is Leg.EMBED:
            self._embedded(request, runner_output.embeddings.get(request_id, b""), outputs)
            return
        token_ids = runner_output.sampled_token_ids.get(request_id)
        if not token_ids:
            ledger.end(request, RequestStatus.ERROR, outputs, error="the runner returned no token")
            return
        logprobs = runner_output.logprobs.get(request_id, ())
        if request.beams is not None:
            take_beam(request, request.beams, logprobs, ledger, self._admission, outputs)
        else:
            self._append(request, token_ids, logprobs, outputs)

    def _embedded(self, request: Request, embedding: bytes, outputs: OutputsByClient) -> None:
        ledger = self._ledger
        if not embedding:
            ledger.end(request, RequestStatus.ERROR, outputs, error="the runner returned no embedding")
            return
        # It is what the client waits for, as others do for their first token.
        ledger.events.record(EngineCoreEventType.FIRST_TOKEN, request.request_id)
        ledger.end(request, RequestStatus.STOPPED, outputs, embedding=embedding)

    def _append(
        self,
        request: Request,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs],
        outputs: OutputsByClient,
    ) -> None:
        ledger, stop, is_first = self._ledger, None, request.num_output_tokens == request.num_given_tokens
        first_index = len(request.output_token_ids) - request.num_unreported
        if request.num_unreported:
            logprobs = (*request.last_logprobs, *logprobs)
            request.num_unreported = 0
        if is_first and request.leg is not Leg.PREFILL:
            self._admission.fork(request)
        for token_id in token_ids:
            request.output_token_ids.append(token_id)
            stop = check_stop(request, ledger.most_tokens(request))
            if stop is not None:
                break
        if is_first:
            ledger.events.record(EngineCoreEventType.FIRST_TOKEN, request.request_id)
        if request.leg is Leg.PREFILL:
            request.last_logprobs = logprobs
        if request.leg is Leg.PREFILL and (request.sampling_params.n > 1 or request.sampling_params.beam_width):
            # Its first sequence may be over, but the others need the prompt; and a beam search has no first token yet.
            stop = None
            first_index = len(request.output_token_ids) if request.sampling_params.beam_width else first_index
        if stop is None and request.leg is not Leg.PREFILL:
            ledger.emit(request, first_index, logprobs, outputs)
            return
        ledger.end(
            request,
            stop.status if stop is not None else RequestStatus.HANDED_OFF,
            outputs,
            stop_reason=stop.stop_reason if stop is not None else None,
            error=stop.error if stop is not None else None,
            first_index=first_index,
            logprobs=logprobs,
        )
