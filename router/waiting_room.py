"""The waiting room: requests without nodes get nodes here in their order, or wait, or are turned away with the reason.

`admission` has the order of waiting requests, and `placer` chooses nodes; this module connects the two. What is to be
done with a request is returned; `router.live_requests` does it.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from random import Random

from baton.errors import BatonError, InvalidRequest, NoCapacity, Overloaded, QueueFull, VersionGone, WouldBeLate
from baton.messages.node import NodeDescription
from baton.messages.node_model import check_capable, in_order
from baton.messages.operator import QueuePlace
from baton.values import value
from router.admission.admission import NO_TARGETS, AdmissionQueue, Ticket
from router.admission.exchange import LedgerExchange
from router.admission.ledger import Standing, TenantLedger
from router.admission.limits import DispatchLimits
from router.admission.service_class import ServiceClass
from router.admission.tenant_figures import TenantFigures
from router.flight.active_request import ActiveRequest
from router.flight.flight_table import AttemptCause, GiveUp, Place
from router.placement.decisions import Choice
from router.placement.placement import Candidate, Placement, demand_of, size_of
from router.placement.placer import Placer
from router.placement.view import ClusterView
from router.timers import Timers


@value(frozen=True, slots=True)
class Wait:
    """The request waits until there are nodes for it."""

    displaced: ActiveRequest | None = None
    """A request that gave way to it in a full queue, and does not wait any more."""


class _WaitingLine:
    """The requests of one kind: text, or embeddings, which fewer nodes may compute and which take one node alone.

    The times of embeddings say nothing about those of text, so each line has its own count and times.
    """

    def __init__(self, limits: DispatchLimits, rng: Random) -> None:
        self.queue: AdmissionQueue[ActiveRequest] = AdmissionQueue(
            limits.max_queue, limits.priority_ageing_s, rng, limits.fair_output_weight, limits.urgent_share
        )
        self.num_placed = 0
        self.is_fair = limits.fairness != "off"

    def share(self, tenant: str, service_class: ServiceClass) -> tuple[str, ServiceClass]:
        """The tenant that a request counts for, and its class there."""
        return (tenant, service_class) if self.is_fair else ("", ServiceClass.NORMAL)

    def ledger(self, active: ActiveRequest) -> tuple[str, TenantLedger]:
        """The tenant that a request counts for, and the ledger that has its counter."""
        payer, service_class = self.share(active.tenant, active.service_class)
        return payer, self.queue.ledger(service_class)

    def retry_after_s(self, active: ActiveRequest) -> float:
        """After how many seconds a request that is turned away now should come again."""
        return self.queue.retry_after_s(self.num_placed, *self.share(active.tenant, active.service_class))


class WaitingRoom:
    """The requests of one router that wait for nodes, and the number of those that have nodes.

    Text and embeddings wait in separate lines, so that the first request of one does not hold up the other line. Room
    that both could use goes to the request that comes first by the rules of `admission`.
    """

    def __init__(
        self,
        view: ClusterView,
        placer: Placer,
        timers: Timers,
        rng: Random,
        limits: DispatchLimits,
    ) -> None:
        self._view = view
        self._placer = placer
        self._timers = timers
        self._limits = limits
        self._text, self._embeddings = _WaitingLine(limits, rng), _WaitingLine(limits, rng)
        lines = {"text": self._text, "embeddings": self._embeddings}
        self.exchange = LedgerExchange(
            {
                f"{kind}-{each.name.lower()}": line.queue.ledger(each)
                for kind, line in lines.items()
                for each in ServiceClass
            }
        )
        self.tenants = TenantFigures(self._lag)
        self._unplaceable: dict[ActiveRequest, None] = {}
        """Requests that were placed before, and wait for a node of their version that is large enough and has their
        adapter. They are in no queue: room on other nodes does not help them, and they must not hold up others."""
        self._requeued_for: tuple[Sequence[NodeDescription], int] = ((), 0)
        """The nodes that were attached when `_requeue_fitting` ran last, and `ClusterView.num_adapter_reports`."""

    def __len__(self) -> int:
        return len(self._text.queue) + len(self._embeddings.queue) + len(self._unplaceable)

    @property
    def num_placed(self) -> int:
        """Number of requests that are on nodes, or whose client still reads their output."""
        return self._text.num_placed + self._embeddings.num_placed

    def check_room(
        self,
        priority: int,
        tenant: str,
        service_class: ServiceClass,
        weight: float = 1.0,
        *,
        embeds: bool = False,
    ) -> None:
        """Raises QueueFull if a new request of this priority could not even wait."""
        line = self._embeddings if embeds else self._text
        if line.queue:
            payer, service_class = line.share(tenant, service_class)
            line.queue.ledger(service_class).set_weight(payer, weight if payer else 1.0)
            line.queue.check_room(priority, line.num_placed, payer, service_class)

    def find_nodes(self, active: ActiveRequest, place: Place) -> Choice | Wait | GiveUp:
        """Find nodes for an attempt, which is sent there.

        Wait: the request waits now, with `wanted` set. GiveUp: it can't be placed and can't wait.
        """
        active.wanted = place
        try:
            self._check_capable(active, place)
            choice = self._find_nodes_or_wait(active, place)
        except (InvalidRequest, Overloaded) as error:
            return GiveUp(error)
        if not isinstance(choice, Wait):
            active.wanted = None
            is_first = active.placed_at is None
            standing = self._standing_of(active) if is_first else None
            self._placer.placed(choice, self._timers.monotonic(), standing)
        return choice

    def _standing_of(self, active: ActiveRequest) -> Standing:
        payer, ledger = self._line(active).ledger(active)
        return ledger.standing(payer)

    def _lag(self, tenant: str) -> float:
        """The largest of a tenant's lags in any ledger."""
        lags = []
        for line in (self._text, self._embeddings):
            for each in ServiceClass:
                payer, service_class = line.share(tenant, each)
                lags.append(line.queue.ledger(service_class).lag(payer))
        return max(lags)

    def _check_capable(self, active: ActiveRequest, place: Place) -> None:
        """Refuse a new request if nodes are up and none can do what it needs: that won't change soon.

        Raises UnsupportedRequest, or NoCapacity if a node could a short time ago. A request whose node was lost waits
        as any other does.
        """
        model, needs = active.request.model, active.request.needs
        if place.is_retry or not (abilities := self._view.abilities(model)) or any(needs <= can for can in abilities):
            return
        sizes = [size for size in self._view.sizes(self._timers.monotonic()) if size.model == model]
        if not any(needs <= size.can for size in sizes):
            check_capable(model, needs, frozenset().union(*(size.can for size in sizes)))
        what = " and ".join(in_order(needs))
        raise NoCapacity(f"no node that can {what} with {model} is up", self._line(active).retry_after_s(active))

    def _line(self, active: ActiveRequest) -> _WaitingLine:
        return self._embeddings if active.request.embeds else self._text

    def _find_nodes_or_wait(self, active: ActiveRequest, place: Place) -> Choice | Wait:
        """Find nodes, or let the request wait.

        Raises for a new request: InvalidRequest if no node has been large enough for long, NoCapacity if one was a
        short time ago, WouldBeLate if a latency target can't be met, QueueFull.
        """
        ticket = active.ticket or self._new_ticket(active, place)
        try:
            choice = self._nodes_for(ticket, place)
        except WouldBeLate:
            raise
        except InvalidRequest as error:
            return self._on_too_large(ticket, error)
        except Overloaded as error:
            adapter = active.request.adapter
            if place.origin is not None and not self._view.may_continue(place.origin):
                return self._wait_for_nodes(ticket, error)
            if adapter and not self._view.is_acknowledged(adapter, place.origin):
                return self._on_no_adapter(ticket, error, place.cause)
            return self._wait(ticket, error)
        self.remove(active)
        return choice

    def _on_too_large(self, ticket: Ticket[ActiveRequest], error: InvalidRequest) -> Wait:
        """No attached node is large enough. A request that was placed before waits for one; a new one is refused."""
        active = ticket.item
        if not ticket.is_retry:
            if self._view.could_hold(demand_of(active.request), self._timers.monotonic()):
                message = f"{error}; a node that was large enough was lost a short time ago"
                raise NoCapacity(message, self._line(active).retry_after_s(active))
            raise error
        return self._wait_for_nodes(ticket, NoCapacity(f"no node that is up is large enough: {error}"))

    def _on_no_adapter(self, ticket: Ticket[ActiveRequest], error: Overloaded, cause: AttemptCause) -> Wait:
        """No node acknowledges the request's adapter. It waits if one may do so soon, and is refused otherwise.

        A node that was started again acknowledges it soon; one whose files have changed does not.
        """
        active, line = ticket.item, self._line(ticket.item)
        was_lost = ticket.is_retry and cause is not AttemptCause.ADAPTER_UNAVAILABLE
        if was_lost or self._view.may_be_acknowledged(active.request.adapter):
            if len(self._unplaceable) >= self._limits.max_queue:
                raise QueueFull("too many requests wait for nodes with their adapters", line.retry_after_s(active))
            return self._wait_for_nodes(ticket, error)
        name = active.request.shown_model
        raise NoCapacity(f"no node that is up acknowledges the adapter of {name}", line.retry_after_s(active))

    def _wait_for_nodes(self, ticket: Ticket[ActiveRequest], why: Overloaded) -> Wait:
        active = ticket.item
        active.why_waiting = why
        self._unplaceable[active] = None
        if active.ticket is None:
            active.ticket, active.waiting_since = ticket, self._timers.monotonic()
        else:
            self._line(active).queue.remove(ticket)
        return Wait()

    def _requeue_fitting(self) -> None:
        """If nodes came or went, put requests that fit on a node now back into their queue."""
        nodes, num_reports = self._view.descriptions(), self._view.num_adapter_reports
        if nodes is self._requeued_for[0] and num_reports == self._requeued_for[1]:
            return
        self._requeued_for, sizes = (nodes, num_reports), set(map(size_of, nodes))
        for active in list(self._unplaceable):
            origin = active.wanted.origin if active.wanted is not None else None
            demand = demand_of(active.request, origin)
            has_adapter = not demand.adapter or self._view.is_acknowledged(demand.adapter, origin)
            is_there = has_adapter and (origin is None or self._view.may_continue(origin))
            if active.ticket is not None and is_there and any(size.holds(demand) for size in sizes):
                del self._unplaceable[active]
                self._line(active).queue.put_back(active.ticket)

    def queue_place(self, active: ActiveRequest) -> QueuePlace | None:
        """Where a request waits; None: it does not. Takes time that grows with the number of waiting tenants."""
        if active.ticket is None:
            return None
        is_ordered = active not in self._unplaceable
        queue, standing = self._line(active).queue, self._standing_of(active)
        first = queue.first() if is_ordered else None
        num_tenants, num_own = queue.num_before(active.ticket) if is_ordered else (0, 0)
        return QueuePlace(
            why=str((first.item if first is not None else active).why_waiting),
            waited_s=self._timers.monotonic() - active.waiting_since,
            tenants_before=num_tenants,
            own_before=num_own,
            tenant_counter=standing.counter,
            virtual_time=standing.virtual_time,
        )

    def placed(self, active: ActiveRequest, at: float) -> None:
        """Note that a request has nodes for the first time, and charge its tenant for it.

        Of an adopted one the tenant pays here for what is still to be generated. The router that had it was paid for
        the rest; if that router died, also for what it expected this one to generate.
        """
        active.placed_at, active.counts_as_placed = at, True
        line, request = self._line(active), active.request
        line.num_placed += 1
        most_output = 0 if request.embeds else request.sampling_params.max_tokens
        num_prompt = 0 if active.is_adopted else request.num_prompt_tokens
        payer, service_class = line.share(active.tenant, active.service_class)
        ledger = line.queue.ledger(service_class)
        ledger.set_weight(payer, active.weight if payer else 1.0)
        active.charge = charge = ledger.charge(payer, num_prompt, most_output, active.num_computed)
        line.queue.urgent.placed(service_class, charge.tokens)
        weight, request_s = charge.weight, line.queue.times.request_s()
        delay = service_class - ServiceClass.NORMAL
        active.turn = line.queue.turns(service_class).place(payer, charge.tokens / weight, at, request_s, delay)
        now, name = self._timers.monotonic(), active.service_class.name.lower()
        self.tenants.placed(active.tenant, name, weight, at - active.started, now)

    def turn_in_s(self, active: ActiveRequest, place: Place, now: float) -> float | None:
        """In how many seconds it is the turn of an attempt that is placed now; None: nodes are told nothing of that."""
        if not self._line(active).is_fair:
            return None
        return 0.0 if active.turn is None or place.is_retry else active.turn.at - now

    def end(self, active: ActiveRequest) -> None:
        """Forget a request whose client has everything, or has left. Idempotent."""
        self.remove(active)
        line = self._line(active)
        line.num_placed -= active.counts_as_placed
        active.counts_as_placed = False
        charge, active.charge = active.charge, None
        turn, active.turn = active.turn, None
        if charge is not None and turn is not None:
            _, service_class = line.share(active.tenant, active.service_class)
            ledger = line.queue.ledger(service_class)
            cost = ledger.settle(charge, *active.tokens_computed(), active.num_computed)
            self.tenants.served(active.tenant, cost, self._timers.monotonic())
            line.queue.turns(service_class).end(turn)

    def note_times(self, active: ActiveRequest) -> None:
        """Note the times of a request that has ended well, as a prediction for others."""
        if active.placed_at is not None:
            now = self._timers.monotonic()
            first_token_at = now if active.first_token_at is None else active.first_token_at
            num_tokens, times = active.flight.num_output_tokens, self._line(active).queue.times
            times.add(first_token_at - active.placed_at, now - active.placed_at, num_tokens, now)

    def remove(self, active: ActiveRequest) -> None:
        """Take a request out of its queue, and stop its timer. Idempotent."""
        if active.ticket is not None:
            self._line(active).queue.remove(active.ticket)
            self._unplaceable.pop(active, None)
            active.ticket = None
        if active.wait_timer is not None:
            active.wait_timer.cancel()
            active.wait_timer = None

    def next_to_place(self, tried: Set[Ticket[ActiveRequest]]) -> Ticket[ActiveRequest] | None:
        """The first ticket of both lines, for whose request `find_nodes` is to be called again.

        `tried`: those for which it was called since there is new room. A line whose first one is among them has no
        next one.
        """
        if self._unplaceable and not tried:
            self._requeue_fitting()
        firsts = (self._text.queue.first(), self._embeddings.queue.first())
        ready = [first for first in firsts if first is not None and first not in tried]
        return min(ready, key=lambda one: (not one.is_retry, one.service_class, one.order_key), default=None)

    def _nodes_for(self, ticket: Ticket[ActiveRequest], place: Place) -> Choice:
        """Choose nodes; raises Overloaded, too, if there is no node or all are full."""
        active, candidates = ticket.item, self._view.candidates()
        if ticket.is_retry:
            # Its client is in mid-stream, so it does not wait for room on a node.
            return self._choose(candidates, active, place)
        line = self._line(active)
        queue = line.queue
        if (first := queue.first()) is not None and not queue.is_next(ticket):
            reason = first.item.why_waiting
            if first.item.tenant == active.tenant:
                raise _with_retry_after(reason)
            # What another tenant's request waits for is that tenant's affair.
            raise type(reason)("requests of others are before this one", 1.0)
        if self.num_placed >= self._limits.max_running:
            raise Overloaded(f"{self._limits.max_running} requests run, as many as may")
        payer, ledger = line.ledger(active)
        if ledger.is_ahead(payer) and not active.request.embeds and not self._view.has_free_seats:
            # All that nodes have left is their headroom (`room`), which is for the others. Seats that those leave free
            # this tenant gets.
            raise Overloaded("requests of others, at another router, are before this one", 1.0)
        try:
            choice = self._choose(candidates, active, place, with_room=True)
        except (InvalidRequest, NoCapacity):
            choice = self._choose(candidates, active, place)
        placement = choice.placement
        for node in (placement.prefill, placement.decode):
            if node is None:
                continue
            has_prompt = node is placement.prompt_node
            why = self._view.why_full(node.incarnation, has_prompt=has_prompt)
            if why and self._goes_ahead(ticket):
                why = self._view.why_full(node.incarnation, has_prompt=has_prompt, goes_ahead=True)
            if why:
                raise Overloaded(f"every node is full: the best one {why}")
        self._check_in_time(ticket, choice)
        return choice

    def may_have_room(self, incarnation: str) -> bool:
        """Whether the node may have room for a request that waits and is next."""
        # Prompts on a decode node keep no hand-off from it.
        has_prompt = not self._view.takes_hand_offs(incarnation)
        if not self._view.why_full(incarnation, has_prompt=has_prompt):
            return True
        if self._view.why_full(incarnation, has_prompt=has_prompt, goes_ahead=True):
            return False
        firsts = (self._text.queue.first(), self._embeddings.queue.first())
        return any(first is not None and self._goes_ahead(first) for first in firsts)

    def _goes_ahead(self, ticket: Ticket[ActiveRequest]) -> bool:
        """Whether a request goes ahead of those that wait for seats on nodes. One of a batch never does."""
        queue, own = self._line(ticket.item).queue, ticket.service_class
        others = [(queue.turns(each), each - own) for each in ServiceClass if each is not own]
        return own is not ServiceClass.BATCH and queue.turns(own).goes_ahead(ticket.tenant, others)

    def _check_in_time(self, ticket: Ticket[ActiveRequest], choice: Choice) -> None:
        """Raises WouldBeLate if the chosen nodes are predicted to miss the request's latency targets."""
        line, now = self._line(ticket.item), self._timers.monotonic()
        if ticket.targets == NO_TARGETS:
            return
        queue, num_placed, times = line.queue, line.num_placed, line.queue.times
        way = choice.way
        if way is None:
            # The policy predicts nothing: only the times of earlier requests are known.
            if self._is_busy(choice.placement):
                queue.check_in_time(ticket, now, times.first_token_s(), times.token_s(), num_placed)
            queue.check_pace(ticket, times.pace_s(now), num_placed)
            return
        first_s, each_s = way.terms.first_token_ms / 1e3, way.terms.token_ms / 1e3
        # An idle node is always worth a try: otherwise one bad measurement would refuse the requests that correct it.
        if way.terms.queue_ms > 0.0:
            queue.check_in_time(ticket, now, first_s, each_s, num_placed)
        if way.decode.streams > 0.0 and times.token_s() > 0.0:
            queue.check_pace(ticket, each_s, num_placed)
        else:
            queue.check_pace(ticket, min(each_s, times.pace_s(now)), num_placed)

    def _is_busy(self, placement: Placement) -> bool:
        chosen = {node.incarnation for node in (placement.prefill, placement.decode) if node is not None}
        return any(
            candidate.load > 0.0 for candidate in self._view.candidates() if candidate.node.incarnation in chosen
        )

    def _choose(
        self, candidates: Sequence[Candidate], active: ActiveRequest, place: Place, *, with_room: bool = False
    ) -> Choice:
        now, request = self._timers.monotonic(), active.request
        waited_s = now - active.started
        return self._placer.choose(
            candidates,
            request,
            place.exclude,
            place.attempt,
            waited_s,
            now,
            with_room=with_room,
            origin=place.origin,
            encoders=self._view.encoders() if request.contents else (),
        )

    def _new_ticket(self, active: ActiveRequest, place: Place) -> Ticket[ActiveRequest]:
        line = self._line(active)
        tenant, service_class = line.share(active.tenant, active.service_class)
        return line.queue.ticket(
            active,
            active.started,
            active.request.priority,
            active.targets(),
            is_retry=place.is_retry,
            tenant=tenant,
            service_class=service_class,
            weight=active.weight if tenant else 1.0,
        )

    def _wait(self, ticket: Ticket[ActiveRequest], why: Overloaded) -> Wait:
        """Let a request wait for the reason `why`; raises QueueFull or WouldBeLate if it can't."""
        active, now = ticket.item, self._timers.monotonic()
        active.why_waiting = why
        if active.ticket is not None:
            return Wait()
        line = self._line(active)
        displaced = line.queue.add(ticket, now, line.num_placed)
        active.ticket, active.waiting_since = ticket, now
        return Wait(displaced.item if displaced is not None else None)

    def displaced_error(self, active: ActiveRequest) -> QueueFull:
        """The error of a request that gave way to another one."""
        return QueueFull(
            "the queue is full, and another request has the place", self._line(active).retry_after_s(active)
        )

    def waits_until(self, active: ActiveRequest) -> float:
        """When a waiting request will have waited long enough for what it waits for now."""
        limits = self._limits
        if active.ticket is not None and active.ticket.is_retry:
            longest_s = limits.recovery_wait_s
        else:
            longest_s = limits.capacity_wait_s if isinstance(active.why_waiting, NoCapacity) else limits.queue_wait_s
        until = active.waiting_since + longest_s
        if (slo := active.request.ttft_slo_ms) is not None and active.first_token_at is None:
            until = min(until, active.started + slo / 1e3)
        return until

    def waited_error(self, active: ActiveRequest) -> BatonError:
        """The error of a request that has waited long enough."""
        origin = active.wanted.origin if active.wanted is not None else None
        if origin is not None and not self._view.may_continue(origin):
            waited_s = self._timers.monotonic() - active.waiting_since
            why = f"{origin.why_only}, of which none took work for {waited_s:.0f} s: ask again"
            return VersionGone(why)
        return _with_retry_after(active.why_waiting, self._line(active).retry_after_s(active))


def _with_retry_after(why: Overloaded, retry_after_s: float = 1.0) -> Overloaded:
    """A new error with the same class and message: the first one may be raised for other requests."""
    return type(why)(str(why), retry_after_s)
