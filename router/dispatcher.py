"""The dispatcher: admits requests, gives their events to their clients, lets clients come back, and drains the router.

Everything runs on one event loop, and only a client's generator waits, for its next event. The requests themselves are
in `router.live_requests`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from random import Random
from typing import Protocol, TypeAlias, TypeVar

from baton.errors import BatonError, Cancelled, ContinuedElsewhere, Draining, InvalidRequest, QueueFull, RequestNotFound
from baton.fair_executor import FairExecutor
from baton.messages.generation import Accepted, Finished, GenerateEvent, GenerateRequest, ModelCard, TakeChunk
from baton.messages.ids import SCOPED_ID_PATTERN, new_request_id, unscoped
from baton.messages.request_limits import MAX_POOLED_TOKENS
from baton.messages.sampling import CONSTRAINT_KINDS, Constraint
from baton.security.matrix import Caller
from baton.text.detokenizer import TextCodec
from router.admission.bounded_work import BoundedWork
from router.admission.limits import NUM_TEXT_THREADS, DispatchLimits
from router.admission.prompt_inputs import ImageRules
from router.admission.quotas import RequestQuota
from router.admission.request import ValidRequest
from router.admission.service_class import ServiceClass
from router.admission.validation import validate, with_allowed_priority
from router.flight.active_request import ActiveRequest, ClientCall
from router.flight.answer import Answer, ResumedAnswer, check_positions, lacks_logprobs, replayed
from router.flight.event_queue import EventQueue, FairQueue
from router.flight.flight_record import FlightJournal, FlightRecord, placement_in_record
from router.flight.flight_table import Cancel, GiveUp, LeaveToOtherRouter
from router.flight.timeline import RequestSpans
from router.leg_messages import NodeSender
from router.live_requests import LiveRequests
from router.node_links import LinkListener
from router.placement.placer import Placer
from router.placement.view import ClusterView
from router.timers import Timers

T = TypeVar("T")


class Links(NodeSender, Protocol):
    """The links to nodes, as a dispatcher uses them; `router.node_links.NodeLinks` is the real one."""

    def listen(self, listener: LinkListener) -> None:
        """Set the listener of the links' events."""
        ...


OnFinished: TypeAlias = Callable[[], None]
"""Called when a request has ended well and its reader has taken all events."""
_QUICK_IDS = MAX_POOLED_TOKENS // 16
"""The most token ids of a vector's input that are checked on the event loop, which takes some milliseconds."""


class Dispatcher:
    """Serves the streams of this router's clients."""

    def __init__(
        self,
        view: ClusterView,
        links: Links,
        codec: TextCodec | None,
        card: Callable[[], ModelCard],
        timers: Timers,
        rng: Random,
        limits: DispatchLimits | None = None,
        journal: FlightJournal | None = None,
        placer: Placer | None = None,
        spans: RequestSpans | None = None,
        bounded_work: BoundedWork | None = None,
        image_rules: ImageRules | None = None,
    ) -> None:
        """Without a journal no other router can continue a flight of this one, nor this one another's. Without
        a placer the least loaded nodes are chosen; without `spans` nothing is traced. `image_rules`: None: the model
        takes no images.
        """
        self._image_rules = image_rules
        self._limits = limits = limits or DispatchLimits()
        self.requests = LiveRequests(view, links, timers, rng, limits, journal, placer, spans)
        self._journal = journal
        self._view = view
        self._codec = codec
        self._bounded_work = bounded_work or BoundedWork()
        self._card = card
        self._timers = timers
        self._rng = rng
        self._texts = FairExecutor("router-texts", NUM_TEXT_THREADS, limits.max_tokenizing)
        self._turns = FairQueue()
        self._draining = False
        links.listen(self.requests)

    def generate(
        self,
        raw: GenerateRequest,
        timeout_s: float | None = None,
        take: TakeChunk | None = None,
        on_finished: OnFinished | None = None,
        quota: RequestQuota | None = None,
    ) -> AsyncGenerator[GenerateEvent, None]:
        """Yields Accepted, Chunks and Finished; any other end raises a BatonError. Closing it cancels the request.

        `timeout_s` counts from the first step of the generator. A request that is turned away at once gets no Accepted.
        Chunks that `take` accepts while the generator is awaited are not among its events. `on_finished` is called
        before Finished is yielded; memory that is reserved for the answer stays so until the generator is closed.
        `quota`: by which it takes what it costs of its tenant's quotas; None: there are none.
        """

        def admitted(started: float) -> Awaitable[ActiveRequest]:
            return self._admit(raw, started, timeout_s, quota)

        return self._stream(admitted, take, raw.constraint_field, on_finished, quota)

    def resume(
        self,
        request_id: str,
        next_token_index: Sequence[int],
        timeout_s: float | None = None,
        take: TakeChunk | None = None,
        call: int = 0,
        repeat: GenerateRequest | None = None,
        on_finished: OnFinished | None = None,
        quota: RequestQuota | None = None,
        caller: Caller | None = None,
    ) -> AsyncGenerator[GenerateEvent, None]:
        """Yields Accepted, the events after these positions (`Chunk.next_position`, one for each sequence), Finished.

        For a client that lost its stream, here or at another router; a stream that is still open ends with Cancelled.
        `call`: the number of the client's call for this request; 0: the client does not say. `repeat`: the request
        itself, if the client sent it again, for its prompt. `caller`: whose class and weight a request has that
        another router began; None: there are no tenants. Raises ContinuedElsewhere if a later call is served;
        RequestNotFound, at once or later, if no process has the request or its prompt any more: then the same request
        with the same seed gives the same tokens.
        """
        return self._stream(
            lambda started: self._resume(
                request_id, next_token_index, ClientCall(started, timeout_s, takeover=call), repeat, quota, caller
            ),
            take,
            repeat.constraint_field if repeat is not None else "",
            on_finished,
            quota,
        )

    async def _stream(
        self,
        enter: Callable[[float], Awaitable[ActiveRequest]],
        take: TakeChunk | None,
        constraint_field: str,
        on_finished: OnFinished | None,
        quota: RequestQuota | None,
    ) -> AsyncGenerator[GenerateEvent, None]:
        """`constraint_field`: as in GenerateRequest."""
        try:
            active = await enter(self._timers.monotonic())
        except BaseException:
            if quota is not None:
                quota.end(0)
            raise
        queue, request = active.queue, active.request
        before, active.quota = active.quota, quota
        if before is not None and quota is not None:
            quota.take_over(before)
        queue.pass_chunks_to(take)
        try:
            self.requests.start(active)
            if active.finish is not None or not active.flight.is_over:
                name = unscoped(request.request_id)
                yield Accepted(name, request.sampling_params.seed, request.num_prompt_tokens, (request.context_tokens,))
            while (event := await queue.get()) is not None:
                self.requests.relay.stop_stall_timer_if_read(active)
                if isinstance(event, Finished):
                    if active.queue is queue:
                        self.requests.all_taken(active)
                    if on_finished is not None:
                        on_finished()
                    if quota is not None:
                        quota.end(active.tokens_used())
                yield event
        except InvalidRequest as error:
            # Nodes know a constraint by its kind alone.
            if constraint_field and error.field in CONSTRAINT_KINDS:
                raise error.renamed(constraint_field) from error
            raise
        finally:
            # Another stream of the client may have taken the request over.
            is_own = active.queue is queue
            if quota is not None:
                quota.end(active.tokens_used() if is_own else None)
            if is_own:
                self.requests.close(active)

    async def _admit(
        self, raw: GenerateRequest, started: float, timeout_s: float | None, quota: RequestQuota | None
    ) -> ActiveRequest:
        with self._counted_if_rejected():
            if self._draining:
                raise self._shutting_down()
            # Checked before any work is done for the request.
            raw = with_allowed_priority(raw, self._limits.min_priority)
            least = self._least_priority(raw.min_priority)
            service_class = ServiceClass.of(raw.priority, least if raw.tenant else None, raw.service_class)
            embeds = raw.pooling is not None
            self.requests.check_room(raw.priority, raw.tenant, service_class, raw.weight, embeds=embeds)
            request = await self._validated(raw)
            if quota is not None:
                num_prompt, is_request = request.num_prompt_tokens, not raw.is_further_part
                await quota.take(num_prompt, request.most_output_tokens, is_request=is_request)
            call = ClientCall(
                started, timeout_s, raw.traceparent, max(1, raw.call), raw.delivery, service_class, raw.weight
            )
            return self._open(request, Answer(self._codec, request), call)

    async def _resume(
        self,
        request_id: str,
        positions: Sequence[int],
        call: ClientCall,
        repeat: GenerateRequest | None,
        quota: RequestQuota | None,
        caller: Caller | None,
    ) -> ActiveRequest:
        if quota is not None:
            await quota.resume()
        active = self.requests.find(request_id)
        if active is None:
            record = await self._record(request_id)
            if record is not None and repeat is not None:
                record = replace(record, request=await self._with_prompt(record.request, repeat))
            # Another call may have opened the request meanwhile.
            active = self.requests.find(request_id)
            if active is None and record is None:
                raise RequestNotFound(f"no router knows request {unscoped(request_id)[:80]!r}: send it again")
        if active is not None and active.request.embeds:
            raise RequestNotFound(
                f"request {unscoped(request_id)[:80]!r} is for an embedding, which is no stream: send it again"
            )
        if active is None:
            assert record is not None
            if quota is not None:
                quota.num_paid = record.request.num_prompt_tokens + sum(positions)
            call = _taking_over(call, record.takeover)
            if caller is not None:
                least = self._least_priority(caller.min_priority)
                service_class = ServiceClass.of(record.request.priority, least, caller.service_class)
                call = replace(call, service_class=service_class, weight=caller.weight)
            self.requests.counters.resumed += 1
            return self._reopen(record, positions, replace(call, traceparent=record.traceparent))
        call = _taking_over(call, active.flight.takeover)
        self.requests.counters.resumed += 1
        return self._take_over_stream(active, positions, call)

    def _least_priority(self, of_key: int | None) -> int:
        """The smallest priority that is allowed with a key; None: the key has none of its own."""
        return self._limits.min_priority if of_key is None else of_key

    async def _with_prompt(self, request: ValidRequest, repeat: GenerateRequest) -> ValidRequest:
        """The request with the prompt of its repetition; raises InvalidRequest if that is another request."""
        if repeat.model == request.shown_model:
            # The name may be unloaded by now, and the request keeps its adapter.
            repeat = replace(repeat, model="")
        valid = await self._validated(repeat)
        prompt = valid.prompt_token_ids
        if len(prompt) != request.num_prompt_tokens:
            raise InvalidRequest("prompt", f"has {len(prompt)} tokens; the request had {request.num_prompt_tokens}")
        if [span.without_rows() for span in valid.spans] != [*request.spans]:
            raise InvalidRequest(
                "prompt", "has other prompt_embeds, images, audio or text for the encoder than the request"
            )
        return replace(request, prompt_token_ids=prompt, prompt_length=0, spans=valid.spans, contents=valid.contents)

    async def _record(self, request_id: str) -> FlightRecord | None:
        if self._journal is None or not SCOPED_ID_PATTERN.match(request_id):
            return None
        return await self._journal.find(request_id, self._card())

    def _reopen(self, record: FlightRecord, positions: Sequence[int], call: ClientCall) -> ActiveRequest:
        """Continue a flight that another router began, or this one before its client left."""
        check_positions(record.request, positions)
        answer = ResumedAnswer(self._codec, record.request, positions)
        active = self._open(record.request, answer, call)
        placement = placement_in_record(
            record, positions, {node.incarnation: node for node in self._view.descriptions()}
        )
        # A client without tokens may be served by any version, unless nodes were given some that it is to get.
        has_begun = any(positions) or (placement is not None and record.num_given > 0)
        origin = record.origin if has_begun else None
        if placement is None:
            active.start_flight = partial(active.flight.start, record.attempt, origin)
        else:
            active.num_adopted_tokens = sum(positions)
            active.start_flight = partial(self.requests.adopt, active, record, placement, origin)
        return active

    def _take_over_stream(self, active: ActiveRequest, positions: Sequence[int], call: ClientCall) -> ActiveRequest:
        """Let a new stream of the same client continue a live request."""
        check_positions(active.request, positions)
        name = unscoped(active.request.request_id)
        if active.request.sampling_params.logprobs is not None and not active.logprobs:
            raise RequestNotFound(
                f"request {name!r} is answered when it is complete, and has no log-probabilities to continue with: "
                "wait for its answer, or send it again when that call has ended"
            )
        if lacks_logprobs(active.request, active.flight.sequences, active.logprobs, positions):
            self.requests.abandon(active, "its client came back for log-probabilities that are forgotten")
            raise RequestNotFound(f"request {name!r} has no log-probabilities from there on any more: send it again")
        timers = active.deadline_timer, active.stall_timer
        self.requests.set_deadline(active, call)
        active.flight.takeover = call.takeover
        for timer in timers:
            if timer is not None:
                timer.cancel()
        active.stall_timer = None
        before, active.queue = active.queue, EventQueue(self._turns)
        before.discard()  # the new stream has what the old one has not sent
        before.end(Cancelled("continued elsewhere"))
        active.answer = ResumedAnswer(self._codec, active.request, positions)
        if active.prompt_logprobs is not None and not any(positions):
            active.queue.put(active.prompt_logprobs)
        active.queue.put_all(replayed(active.answer, active.flight.sequences, active.logprobs))
        active.num_replayed = active.flight.num_output_tokens
        if active.finish is not None:
            finish, finished = active.finish
            active.queue.put_all(active.answer.finish(finish))
            active.queue.put(finished)
        if active.flight.is_over:
            active.queue.end(before.error)
        return active

    def new_request_id(self) -> str:
        """An id for a call whose client sent none."""
        return new_request_id(self._rng)

    def cancel(self, request_id: str) -> None:
        """End a live request; its generator raises Cancelled. Raises RequestNotFound."""
        active = self.requests.find(request_id)
        if active is None or active.flight.is_over:
            raise RequestNotFound(f"no live request {unscoped(request_id)[:80]!r}")
        self.requests.feed(active, Cancel("cancelled by the client"))

    def drain(self) -> None:
        """Accept no new requests. Idempotent."""
        self._draining = True

    async def idle(self) -> None:
        """Return when no request is live."""
        await self.requests.idle.wait()

    def close(self) -> None:
        """End the threads and processes of the dispatcher, and wait for them. No request may be live. Idempotent."""
        self._bounded_work.close()
        self._texts.close()

    def leave_all_to_other_routers(self) -> None:
        """End all live streams, and leave their attempts to the routers to which the clients go.

        Requests that no other router can continue are aborted on their nodes: embeddings, requests without nodes, and
        all if there is no journal.
        """
        for active in reversed([*self.requests.active_requests()]):
            if active.has_record and not active.flight.is_over:
                self.requests.feed(
                    active, LeaveToOtherRouter(ContinuedElsewhere("this router is shutting down: go on at another one"))
                )
            else:
                self.requests.feed(active, GiveUp(self._shutting_down()))

    async def _validated(self, raw: GenerateRequest) -> ValidRequest:
        most_bytes, rules = self._limits.prompt_embeds_bytes, self._image_rules
        check = partial(validate, raw, self._card(), self._codec, self._rng, most_bytes, rules)
        # The ids of a vector's input are only compared with bounds. A call has up to 2,048 inputs: were each long one
        # checked in a thread, there would be more of them than the threads of a tenant take.
        is_vector = raw.pooling is not None and not isinstance(raw.prompt, str)
        num_prompt = max(0, len(raw.prompt or ()) - (_QUICK_IDS if is_vector else 0))
        num_chars = num_prompt + _num_constraint_chars(raw) + sum([len(rows.data) for rows in raw.prompt_embeds])
        # Each image has thousands of tokens, and a header that takes milliseconds; audio is hashed.
        if raw.images or raw.audio or num_chars > self._limits.thread_text_chars:
            request = await self.in_thread(raw.tenant, check)
        else:
            request = check()
        for field, schema in raw.schemas.items():
            await self._check(Constraint(schema), field, raw.tenant)
        if (constraint := request.sampling_params.constraint) is not None:
            await self._check(constraint, raw.constraint_field or constraint.kind, raw.tenant)
        return request

    async def _check(self, constraint: Constraint, field: str, tenant: str) -> None:
        """Check that a constraint can be served; raises InvalidRequest that names the client's field."""
        try:
            with self._in_a_queue():
                await self._bounded_work.check(constraint, tenant)
        except InvalidRequest as error:
            raise InvalidRequest(field, error.reason) from None

    async def in_thread(self, tenant: str, work: Callable[..., T], *args: object) -> T:
        """Do long work in a thread, beside the event loop; raises QueueFull if too much of it waits."""
        with self._in_a_queue():
            return await asyncio.get_running_loop().run_in_executor(self._texts.of(tenant), work, *args)

    async def in_waiting_thread(self, tenant: str, work: Callable[..., T], *args: object) -> T:
        """Do work that waits for a child process; raises QueueFull if too much of it waits."""
        with self._in_a_queue():
            return await self._bounded_work.run(tenant, work, *args)

    async def in_chat_thread(self, tenant: str, work: Callable[..., T], *args: object, is_long: bool) -> T:
        """Do work that renders a chat with the model's template; raises QueueFull if too much of it waits."""
        with self._in_a_queue():
            return await self._bounded_work.render(tenant, work, *args, is_long=is_long)

    @contextmanager
    def _in_a_queue(self) -> Iterator[None]:
        """Let QueueFull say when to try again.

        What is awaited inside must not be a variable: a future has its error, which has the frames that it has passed,
        so one with that variable would be a cycle. It would keep the request's body until the next full collection.
        """
        try:
            yield
        except QueueFull as error:
            error.retry_after_s = self._rng.uniform(0.75, 1.25)
            raise

    def _open(self, request: ValidRequest, answer: Answer, call: ClientCall) -> ActiveRequest:
        if self._draining:
            raise self._shutting_down()
        return self.requests.open(request, answer, EventQueue(self._turns), call)

    def _shutting_down(self) -> Draining:
        return Draining("this router is shutting down", self._rng.uniform(0.75, 1.25))

    @contextmanager
    def _counted_if_rejected(self) -> Iterator[None]:
        try:
            yield
        except BatonError as error:
            self.requests.counters.rejections[type(error).__name__] += 1
            raise


def _taking_over(call: ClientCall, takeover: int) -> ClientCall:
    """A call that takes over the request of call number `takeover`, with a number if the client has given it none.

    Raises ContinuedElsewhere for an earlier call.
    """
    if 0 < call.takeover <= takeover:
        raise ContinuedElsewhere(f"call {call.takeover} of the client came after call {takeover}, which is served")
    return call if call.takeover else replace(call, takeover=takeover + 1)


def _num_constraint_chars(raw: GenerateRequest) -> int:
    texts = (raw.json_schema or "", raw.regex or "", raw.grammar or "")
    return sum(map(len, texts)) + sum(map(len, raw.choice))
