"""The handlers behind the router's ports: one for clients' requests (gRPC and HTTP), one for operators' calls."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from itertools import islice
from typing import TypeVar

from baton.clock import Clock
from baton.errors import InvalidRequest, RequestNotFound
from baton.messages.generation import GenerateEvent, GenerateRequest, ModelCard, TakeChunk
from baton.messages.ids import scoped
from baton.messages.node import Role
from baton.messages.operator import ClusterStatus, NodeStatus, PlacementDecision, RequestRow, Timeline
from baton.messages.pooling import EmbedRequest, EmbedResponse
from baton.messages.request_limits import MAX_PROMPT_BYTES
from baton.registry import Membership, NodeRecord
from baton.security.callers import current_caller
from router.admission.tenants import Tenants
from router.admission.validation import check_model, check_text, check_token_ids
from router.dispatcher import Dispatcher
from router.embed_call import embed
from router.flight.text_stream import TextCodec
from router.flight.timeline import timeline
from router.operations.explained import explained
from router.operations.request_rows import ended_rows, running_rows
from router.placement.placement import may_serve, note_of_left_out
from router.placement.view import ClusterView

T = TypeVar("T")
_STATUS_WORDS = {"starting": "Starting", "ready": "Ready", "draining": "Draining"}


class GenerationHandler:
    """Serves clients; see `baton.wire.services.generation_service.GenerationHandler`."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        codec: TextCodec | None,
        card: Callable[[], ModelCard],
        tenants: Tenants | None = None,
    ) -> None:
        self._tenants = tenants or Tenants()
        self._dispatcher = dispatcher
        self._codec = codec
        self._card = card

    def generate(
        self, request: GenerateRequest, timeout_s: float | None, take: TakeChunk | None = None
    ) -> AsyncGenerator[GenerateEvent, None]:
        """Yields Accepted, Chunks, Finished. Closing the generator cancels the request."""
        caller = current_caller.get()
        if not caller.tenant:
            return self._dispatcher.generate(request, timeout_s, take)
        owned = replace(request, tenant=caller.tenant, min_priority=caller.min_priority)
        return self._tenants.counted(
            caller, lambda on_finished: self._dispatcher.generate(owned, timeout_s, take, on_finished)
        )

    def most_at_once(self) -> int | None:
        """How many requests the caller may have running at once; None: any number."""
        return current_caller.get().max_concurrent

    def resume(
        self,
        request_id: str,
        next_token_index: Sequence[int],
        timeout_s: float | None,
        take: TakeChunk | None = None,
        call: int = 0,
        repeat: GenerateRequest | None = None,
    ) -> AsyncGenerator[GenerateEvent, None]:
        """Yields Accepted, the events after these positions, Finished. Closing the generator cancels the request."""
        caller = current_caller.get()
        if not caller.tenant:
            return self._dispatcher.resume(request_id, next_token_index, timeout_s, take, call, repeat)
        name = scoped(caller.tenant, request_id)
        owned = replace(repeat, tenant=caller.tenant) if repeat is not None else None
        return self._tenants.counted(
            caller,
            lambda on_finished: self._dispatcher.resume(
                name, next_token_index, timeout_s, take, call, owned, on_finished
            ),
        )

    async def cancel(self, request_id: str) -> None:
        """End a live request; raises RequestNotFound."""
        self._dispatcher.cancel(scoped(current_caller.get().tenant, request_id))

    async def tokenize(self, model: str, text: str) -> Sequence[int]:
        """The token ids that `generate` would see; raises InvalidRequest."""
        check_model(model, self._card())
        check_text("text", text, MAX_PROMPT_BYTES)
        # In a thread, since a long text takes a second.
        return await self.in_thread(self._text_codec().encode, text)

    async def detokenize(self, model: str, token_ids: Sequence[int]) -> str:
        """The text of token ids; raises InvalidRequest."""
        card, codec = self._card(), self._text_codec()
        check_model(model, card)
        if len(token_ids) > card.max_model_len:
            message = (
                f"has {len(token_ids)} entries; at most {card.max_model_len} are taken, as many as {card.name} reads"
            )
            raise InvalidRequest("token_ids", message)

        def decode() -> str:
            check_token_ids("token_ids", token_ids, card.vocab_size)
            return codec.decode(token_ids)

        return await self.in_thread(decode)

    async def in_thread(self, work: Callable[..., T], *args: object) -> T:
        """Do long work in a thread, beside the event loop; raises Overloaded if too much of it waits."""
        return await self._dispatcher.in_thread(current_caller.get().tenant, work, *args)

    async def in_waiting_thread(self, work: Callable[..., T], *args: object) -> T:
        """Do work that waits for a child process, in a thread; raises Overloaded if too much of it waits."""
        return await self._dispatcher.in_waiting_thread(current_caller.get().tenant, work, *args)

    async def in_chat_thread(self, work: Callable[..., T], *args: object, is_long: bool) -> T:
        """Do work that renders a chat with the model's template; raises Overloaded if too much of it waits."""
        return await self._dispatcher.in_chat_thread(current_caller.get().tenant, work, *args, is_long=is_long)

    async def embed(self, request: EmbedRequest, timeout_s: float | None) -> EmbedResponse:
        """The vectors, labels or scores of all inputs; raises BatonErrors. Cancelling it ends all of them."""
        named = replace(request, request_id=request.request_id or self._dispatcher.new_request_id())
        return await embed(named, self, self._codec, self._card(), timeout_s)

    def embedding_size(self) -> int:
        """Numbers in an embedding of the model, as nodes have reported it; 0: none has."""
        return self._card().embedding_size

    def list_models(self) -> Sequence[ModelCard]:
        return self._card().with_adapters()

    def _text_codec(self) -> TextCodec:
        if self._codec is None:
            raise InvalidRequest("model", "is served without a tokenizer")
        return self._codec


class OperatorHandler:
    """Serves operators; see `baton.wire.services.operator_service.OperatorHandler`."""

    def __init__(
        self, view: ClusterView, dispatcher: Dispatcher, membership: Membership, clock: Clock, own: NodeRecord
    ) -> None:
        self._view = view
        self._dispatcher = dispatcher
        self._membership = membership
        self._clock = clock
        self._own = own
        self._routers: tuple[NodeRecord, ...] = ()

    def own_record(self, record: NodeRecord) -> None:
        """Take this router's new record."""
        self._own = record

    def registered_routers(self, records: Sequence[NodeRecord]) -> None:
        """Take the routers that are in the registry now."""
        self._routers = tuple(records)

    def status(self) -> ClusterStatus:
        """The cluster as this router sees it, this router included."""
        wall = self._clock.wall()
        own = replace(
            _router_status(self._own, wall),
            running=self._dispatcher.requests.num_live - self._dispatcher.requests.num_waiting,
            waiting=self._dispatcher.requests.num_waiting,
        )
        others = [_router_status(r, wall) for r in self._routers if r.incarnation != self._own.incarnation]
        nodes = self._view.statuses(self._clock.monotonic(), wall)
        health, detail = self._health()
        return ClusterStatus(self._membership.cluster, health, detail, [own, *others, *nodes])

    def requests(self, limit: int, request_id: str = "") -> Sequence[RequestRow]:
        """Live and ended requests; see `baton.wire.services.operator_service.OperatorHandler`."""
        if not request_id:
            return [*self.running(limit or None), *self.ended(limit)]
        name, now = self._own.name, self._clock.monotonic()
        active, traced = (
            self._dispatcher.requests.find(request_id),
            self._dispatcher.requests.timelines.find(request_id),
        )
        if active is not None:
            return list(running_rows([active], name, now))
        return list(ended_rows([traced], name, now)) if traced is not None else []

    def running(self, limit: int | None) -> list[RequestRow]:
        """The requests that this router serves, the latest first."""
        active_requests = islice(self._dispatcher.requests.active_requests(), limit)
        return list(running_rows(active_requests, self._own.name, self._clock.monotonic()))

    def ended(self, limit: int) -> list[RequestRow]:
        """The ended requests that are still kept, the latest first."""
        latest = islice(self._dispatcher.requests.timelines.latest(), limit)
        return list(ended_rows(latest, self._own.name, self._clock.monotonic()))

    def explain(self, request_id: str) -> Sequence[PlacementDecision]:
        """Why a request was placed as it was; raises RequestNotFound if it is unknown or too long ago."""
        now = self._clock.monotonic()
        found = self._dispatcher.requests.placer.explain(request_id, now)
        if not found:
            raise RequestNotFound(f"this router remembers no request {request_id[:80]!r}")
        return [explained(explanation, now) for explanation in found]

    def timeline(self, request_id: str) -> Timeline:
        """Where a request's time went; raises RequestNotFound if it is unknown, live, or too long ago."""
        traced = self._dispatcher.requests.timelines.find(request_id)
        if traced is None and self._dispatcher.requests.find(request_id) is not None:
            raise RequestNotFound(f"request {request_id[:80]!r} has not ended yet: its timeline is known when it has")
        if traced is None:
            raise RequestNotFound(f"this router remembers no request {request_id[:80]!r}")
        return timeline(traced, self._own.name, self._clock.monotonic())

    def _health(self) -> tuple[str, str]:
        candidates = self._view.candidates()
        why = self._dispatcher.requests.placer.why_not_ready(candidates, self._own.model)
        if why:
            return "unavailable", why
        roles = {candidate.node.role for candidate in may_serve(candidates, None)}
        notes = [
            f"no {role.value} node is up{note_of_left_out(candidates, role)}"
            for role in (Role.PREFILL, Role.DECODE)
            if role not in roles
        ]
        if cordoned := self._view.cordoned:
            notes.append(f"cordoned: {', '.join(cordoned)}")
        if not self._membership.healthy:
            notes.insert(0, "the registry does not answer; serving goes on with the last view")
            return "degraded", "; ".join(notes)
        return "ok", "; ".join(notes)


def _router_status(record: NodeRecord, wall: float) -> NodeStatus:
    return NodeStatus(
        name=record.name,
        role=record.role,
        status=_STATUS_WORDS[record.state],
        incarnation=record.incarnation,
        address=record.address,
        pid=record.pid,
        model=record.model,
        running=0,
        waiting=0,
        kv_usage=0.0,
        version=record.version,
        age_s=max(0.0, wall - record.started_at),
        detail=f"HTTP on {record.http_address}" if record.http_address else "",
    )
