"""The requests that don't run, by what they wait for.

A waiting request lacks one of two things, and does not wait behind requests that lack the other one:

  a seat       to be computed here: one of `max_num_seqs`, and at least one token of the step's budget
  a load slot  to have KV read from another node into reserved blocks: one of `max_num_seqs` more; needs no seat

Requests that lack a seat and requests that lack a load slot have a queue each, and all queues share one order.
"""

from __future__ import annotations

import bisect
from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence

from baton.engine.batch import WaitingReason
from baton.engine.constraints import TokenMatcher
from baton.engine.request import Request, RequestEvent, RequestStatus
from baton.engine.scheduler_config import SchedulerConfig
from baton.engine.sequences.sequence_group import SequenceGroup
from baton.engine.waiting.request_queue import (
    AdapterQueues,
    QueuePositions,
    RequestQueue,
)
from baton.messages.node import Leg


class WaitingRequests:
    """The waiting requests of one engine. Only the scheduler's parts write to it."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._max_num_seqs = config.max_num_seqs
        self._positions = QueuePositions()

        def empty_queue() -> RequestQueue:
            ageing_s, block_size = config.priority_ageing_s, config.block_size
            return RequestQueue(self._positions, config.policy, ageing_s=ageing_s, block_size=block_size)

        self.for_seat = AdapterQueues(empty_queue)
        """Requests that wait for a seat, without blocks; parked beams that continue have blocks."""
        self.for_load = AdapterQueues(empty_queue)
        """Decode legs that wait for a load slot, without blocks."""
        self.swapped = empty_queue()
        """Preempted requests whose blocks are in the host tier."""
        self.holding: list[SequenceGroup] = []
        """Requests of several sequences some of which are held back (see sequence_group.py)."""
        self.for_grammar: dict[str, Request] = {}
        """Requests whose grammar is being compiled."""
        self.for_adapter: dict[str, Request] = {}
        """Requests whose adapter is being loaded."""
        self.remote: dict[str, Request] = {}
        """Requests with reserved blocks that are being filled from another node."""
        self.arrived: deque[Request] = deque()
        """Requests whose KV has arrived, in the order of the policy and of its arrival; they wait for the next step."""
        self.times_passed: Counter[str] = Counter()
        """How often later requests were admitted before a waiting one."""
        self.preempted: set[str] = set()
        """Ids of the requests in `for_seat` that were preempted."""
        self.deferred: set[str] = set()
        """Ids of the requests that wait for the prefill node, or for another sequence, to compute their prompt."""

    @property
    def num_queued(self) -> int:
        """Requests that wait for a seat or a load slot."""
        return len(self.for_seat) + len(self.for_load)

    @property
    def num_queued_tokens(self) -> int:
        """The sum of `tokens_to_compute` over the requests that wait for a seat or a load slot.

        Takes a time that grows with the number of their adapters only.
        """
        return self.for_seat.num_tokens + self.for_load.num_tokens

    @property
    def num_blocks_to_take(self) -> int:
        """The stripes of blocks that requests without blocks will take; those that wait for a grammar or an adapter are
        not counted, which they do for a moment only. Takes a time that grows with the number of their adapters only.
        """
        return self.for_seat.num_blocks + self.for_load.num_blocks + self.swapped.num_blocks

    @property
    def may_be_admitted(self) -> bool:
        """Whether the next step may have a request to admit."""
        return bool(self.arrived or self.num_queued or len(self.swapped) or self.has_due)

    @property
    def num_held(self) -> int:
        """Sequences that are held back."""
        return sum(len(group.held) for group in self.holding)

    @property
    def has_due(self) -> bool:
        """Whether a sequence was held back and is to be queued now."""
        return any(group.has_due for group in self.holding)

    @property
    def num_waiting_for_remote_kvs(self) -> int:
        """Requests whose KV is in transfer, or not begun on the other node."""
        return len(self.remote) + len(self.deferred)

    @property
    def awaits_moved(self) -> bool:
        """Whether a stream is being moved here."""
        return any(request.cut_by for request in self.remote.values())

    @property
    def has_load_slot(self) -> bool:
        """Whether another load may begin."""
        return len(self.remote) + len(self.arrived) < self._max_num_seqs

    def num_by_reason(self) -> dict[WaitingReason, int]:
        """The number of requests by what they wait for, in a time that grows with the number of their adapters only."""
        return {
            "capacity": self.num_queued - len(self.preempted) - len(self.deferred),
            "deferred": len(self.deferred),
            "grammar": len(self.for_grammar),
            "adapter": len(self.for_adapter),
            "remote_kv": len(self.remote),
            "arrived": len(self.arrived),
            "preempted": len(self.preempted),
            "swapped": len(self.swapped),
        }

    def add(self, request: Request) -> None:
        """Queue a request for a seat or a load slot: a new one at the end, others at their positions."""
        queue = self.for_load if may_load(request) else self.for_seat
        queue.add(request)

    def enter(self, request: Request, *, awaits_adapter: bool) -> None:
        """Take a new request: it waits for its adapter and its grammar, or is queued. Its position in the queues is
        that of its arrival.
        """
        if request.adapter and awaits_adapter:
            request.transition(RequestEvent.ADAPTER_MISSING)
            self._give_position(request)
            self.for_adapter[request.request_id] = request
        else:
            self._await_grammar(request)

    def adapter_loaded(self, request_id: str) -> None:
        """Queue a request whose adapter is loaded, before those that arrived later; skip one that has ended."""
        request = self.for_adapter.pop(request_id, None)
        if request is not None:
            request.transition(RequestEvent.ADAPTER_LOADED)
            self._await_grammar(request)

    def grammar_compiled(self, request_id: str, matchers: Sequence[TokenMatcher]) -> None:
        """Queue a request whose grammar is compiled, before those that arrived later; skip one that has ended."""
        waiting = self.for_adapter.get(request_id)
        if waiting is not None:
            waiting.matchers = matchers
            return
        request = self.for_grammar.pop(request_id, None)
        if request is not None:
            request.transition(RequestEvent.GRAMMAR_COMPILED)
            request.matchers = matchers
            self.add(request)

    def _await_grammar(self, request: Request) -> None:
        """Queue a request, or let it wait for its grammar if it has one that is not compiled."""
        if request.sampling_params.has_grammar and not request.matchers:
            request.transition(RequestEvent.GRAMMAR_MISSING)
            self._give_position(request)
            self.for_grammar[request.request_id] = request
        else:
            self.add(request)

    def _give_position(self, request: Request) -> None:
        if not request.queue_position:
            request.queue_position = self._positions.behind_all()

    def put_back(self, request: Request) -> None:
        """Put a preempted request next in turn, in the queue that its status (SWAPPED or PREEMPTED) tells."""
        if request.status is RequestStatus.SWAPPED:
            self.swapped.prepend(request)
        else:
            self.for_seat.prepend(request)
            self.preempted.add(request.request_id)

    def kv_arrived(self, request: Request) -> None:
        """Let a request whose KV has arrived wait for the next step, behind those that the policy puts first."""
        bisect.insort(self.arrived, request, key=self.swapped.rank)

    def last_in_turn(self, running: Iterable[Request]) -> Request | None:
        """The running request that is preempted first. `running`: in order of admission."""
        return self.for_seat.last_in_turn(running)

    def remove(self, requests: Collection[Request]) -> None:
        """Remove requests that are about to end from the queues in which they wait."""
        queued, swapped = set(), set()
        for request in requests:
            self.times_passed.pop(request.request_id, None)
            self.remote.pop(request.request_id, None)
            self.for_grammar.pop(request.request_id, None)
            self.for_adapter.pop(request.request_id, None)
            if request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
                queued.add(request.request_id)
            elif request.status is RequestStatus.SWAPPED:
                swapped.add(request.request_id)
        if swapped:
            self.swapped.remove_many(swapped)
        if queued:
            self.for_seat.remove_many(queued)
            self.for_load.remove_many(queued)
            self.preempted -= queued
            self.deferred -= queued
            self.arrived = deque(request for request in self.arrived if request.request_id not in queued)


def may_load(request: Request) -> bool:
    """Whether a request waits for a load of its KV from another node, instead of a seat."""
    return request.leg is Leg.DECODE and request.status is RequestStatus.WAITING
