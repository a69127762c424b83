"""One client request as the router sees it. Pure: events in, effects out, no clock and no I/O.

The rules:

1. Both legs of an attempt are sent at the same time. The first token comes from the prefill leg, the others from the
   decode leg; which stream is faster does not matter, tokens leave in the order of their indices.
2. Tokens are a function of the request alone. So whatever dies, at whatever time: a new attempt goes on with the prompt
   and what the client already has, on other nodes. Where that can't be given to nodes (several sequences, beams) they
   run the request again: what the client has is dropped, and compared. A difference ends the flight with an error.
3. Messages of an earlier attempt, and all that come after the end, change nothing; they are counted.
4. Whoever still works on an attempt that is over is told so in the same breath.
5. The budget of attempts ends a request that breaks its nodes. An attempt that a node refuses, or that is lost with a
   node which never said that it had it, costs a refusal and not an attempt. An attempt that is lost together with
   several nodes which this flight never used costs neither: no request can do that, so the network or the router was
   at fault. Those are bounded, too, so that nothing is tried for ever. Progress refills the budget: when the client got
   `REFILL_TOKENS` new tokens since the last failure, counting starts anew. A request that kills each of its nodes after
   fewer tokens than that still ends. An error inside the engine is final, because it would come back.
6. An attempt that another router began is adopted from its nodes, which tell all that it brought; those that don't know
   it cost none of the budget. Whoever serves the client's latest call owns an attempt: each flight has that call's
   number, which its messages carry. An attempt that another router adopted is no longer ours: nothing is retried or
   aborted. But where that router's number is smaller than ours, the attempt is taken back.
7. A request of several sequences ends when all of them have. One that is over stays so, whatever a later attempt says
   of it, and the node that still works on it is told.
8. An embedding takes one leg on one node. It is a function of the prompt alone, so another attempt is the same again.
9. A link that was cut costs nothing while both of its ends live: its node goes on, and once it is reached again each
   leg that has not ended is adopted there, from the tokens on that the client does not have. A node that does not have
   it (what was on its way may be lost, an old version ends what ran) says so, and the flight goes on by rule 6.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from baton.errors import (
    AttemptsExhausted,
    BatonError,
    Cancelled,
    ContinuedElsewhere,
    EngineFault,
    InvalidRequest,
    RepetitiveOutput,
    StreamDiverged,
    TransferCause,
    TransferFailed,
)
from baton.machine import Machine
from baton.messages.generation import Path
from baton.messages.ids import AttemptKey
from baton.messages.node import (
    ENDED_WELL,
    FINISH_REASONS,
    Abort,
    Adopt,
    Leg,
    NodeDescription,
    Outcome,
    RequestDelta,
    StageTimings,
    Submit,
)
from router.admission.request import ValidRequest
from router.flight.flight_leg import FlightLeg, Measured
from router.flight.flight_sequence import FlightSequence
from router.flight.flight_table import (
    FLIGHT_TABLE,
    TERMINAL,
    AbortLeg,
    AdoptLeg,
    AttemptCause,
    Cancel,
    Delta,
    Fail,
    Finish,
    FlightEffect,
    FlightEvent,
    FlightState,
    FlightStep,
    GiveUp,
    LegEnded,
    LetGo,
    LinkBack,
    MovedAway,
    NodeGone,
    Place,
    Placed,
    SequenceEnded,
    StopStringFound,
    SubmitLeg,
)
from router.placement.placement import Placement

MAX_ATTEMPTS = 3
MAX_REFUSALS = 8
MAX_SPARED = 64
"""Attempts that are lost together with nodes which this flight never used."""
REFILL_TOKENS = 256
"""New tokens at the client since the last failure after which the earlier failures are forgotten. A request whose
every attempt kills its node ends if the attempts bring fewer than that; a stream that outlives nodes hours apart brings
thousands."""
UNRELATED_LOSSES = 3
"""Lost nodes that a flight never used and that prove that the flight is not the cause: more than the two nodes that
one other request of the same kind may have broken."""


class Flight:
    """The state of one request; see the rules above."""

    def __init__(self, request: ValidRequest, flight_id: int = 0, takeover: int = 0) -> None:
        """`flight_id` (64 bits) tells its attempts from those of any other flight of the same request id; `takeover` is
        the number of the client's call that it serves, see `baton.messages.node.Adopt`.
        """
        self.request = request
        self.takeover = takeover
        self.flight_id = flight_id
        self.stale_events = 0
        """Messages of earlier attempts or after the end."""
        self._machine = Machine(f"flight {request.request_id}", FlightState.PLACING, FLIGHT_TABLE)
        self._sequences = [FlightSequence(index) for index in range(request.sampling_params.n)]
        self._attempt = 0
        self._key = AttemptKey(request.request_id, 0, flight_id)
        """Of the running attempt."""
        self._failures = 0
        self._refusals = 0
        self._spared = 0
        self._tokens_at_failure = 0
        """How many tokens the client had when an attempt failed last."""
        self._exclude: set[str] = set()
        self._placement: Placement | None = None
        self._legs: dict[str, FlightLeg] = {}
        self._flow: tuple[str, AttemptKey] | None = None
        """Who brings tokens that simply follow, and as whose; None: that is to be looked at again."""
        self._max_tokens = request.sampling_params.max_tokens
        self._decode_flows = False
        self._given: Sequence[int] = ()
        """Tokens that the running attempt is given with the prompt."""
        self._num_given = 0
        self._is_adopting = False
        """Not all has been told of the attempt that another router began."""
        self._unless_it_flows = ""
        """Why that attempt is lost if its decode leg has no token yet."""
        self._embedding = b""

    @property
    def state(self) -> FlightState:
        return self._machine.state

    @property
    def is_over(self) -> bool:
        return self._machine.state in TERMINAL

    @property
    def story(self) -> str:
        """Every state so far."""
        return self._machine.story

    @property
    def num_output_tokens(self) -> int:
        """Tokens given out so far, of all sequences."""
        return sum(sequence.num_tokens for sequence in self._sequences)

    @property
    def sequences(self) -> Sequence[FlightSequence]:
        """What came of each of its sequences so far."""
        return self._sequences

    @property
    def num_given(self) -> int:
        """How many of its tokens the nodes of the running attempt were given."""
        return self._num_given

    @property
    def key(self) -> AttemptKey:
        """The running attempt's name."""
        return self._key

    @property
    def incarnations(self) -> Set[str]:
        """The incarnations of the running attempt's nodes."""
        return self._legs.keys()

    def measured(self) -> Measured:
        """What the nodes of the running attempt have said of it so far."""
        found = Measured()
        for leg in self._legs.values():
            name, has_ended = leg.node.node_id, leg.outcome is not None
            if leg.leg is Leg.DECODE:
                found = found._replace(decode_node=name, decode=leg.timings, is_complete=has_ended)
            else:
                is_all = leg.leg is not Leg.PREFILL
                found = found._replace(prompt_node=name, prompt=leg.timings, is_complete=is_all and has_ended)
        return found

    def start(self, attempts: int = 0) -> list[FlightEffect]:
        """The first effect, after so many attempts of other flights. Call once."""
        self._attempt = attempts
        return [self._place(AttemptCause.RESUMED if attempts else AttemptCause.FIRST)]

    def adopt(self, key: AttemptKey, placement: Placement, num_given: int = 0) -> list[FlightEffect]:
        """The first effects of a flight that another router began, in place of `start`.

        `key` is the attempt that runs on these nodes, which tell it from its first token on, and were given so many of
        its tokens. Later attempts are this flight's own.
        """
        self._attempt, self._key = key.attempt, key
        legs = self._begin_attempt(placement)
        self._is_adopting, self._num_given = True, num_given
        return [self._adopt_leg(leg) for leg in legs]

    def _adopt_leg(self, leg: FlightLeg) -> AdoptLeg:
        known = tuple(sequence.num_tokens for sequence in self._sequences)
        adopt = Adopt(self._key, self.takeover, known if any(known) else ())
        return AdoptLeg(leg.node.incarnation, adopt, leg.num_sequences)

    @property
    def is_adopting(self) -> bool:
        """Whether `settle` is wanted: until the decode leg has told a token."""
        return self._is_adopting and not self.is_over and not self._has_all_of_prefill

    def settle(self, incarnation: str) -> list[FlightEffect]:
        """The node spoke of other things: if it took an adoption, it has told all that it had.

        A decode node that has no token may wait for a prefill node that never heard of the request.
        """
        self._flow = None
        leg = self._legs.get(incarnation)
        if not self.is_adopting or leg is None or not leg.taken or leg.leg is Leg.PREFILL:
            return []
        self._is_adopting = False
        if not self._unless_it_flows or self._has_all_of_prefill:
            return []
        return self._not_kept(self._unless_it_flows)

    def handle(self, event: FlightEvent) -> list[FlightEffect]:
        """Take an event. Raises IllegalEvent, and changes nothing, for one that can't happen now."""
        self._flow = None
        if self.is_over:
            self.stale_events += 1
            return []
        match event:
            case Placed(placement):
                return self._on_placed(placement)
            case Delta(incarnation, delta):
                return self._on_delta(incarnation, delta)
            case NodeGone(incarnation, reason, lost_together):
                return self._on_node_gone(incarnation, reason, lost_together)
            case LinkBack(incarnation):
                return self._on_link_back(incarnation)
            case StopStringFound(stop, index):
                return self._on_stop_string(self._sequences[index], stop)
            case Cancel(reason):
                self._machine.feed(FlightStep.CANCEL)
                return [*self._abort_all(reason), Fail(Cancelled(reason))]
            case GiveUp(error):
                return self._give_up(error)
            case LetGo(error):
                return self._leave(error)

    def takes_next(self, incarnation: str, delta: RequestDelta) -> bool:
        """Take a delta that brings the tokens which follow and nothing else, as nearly all do: they are for the client.

        False, and nothing taken, for any other one: it is an event for `handle`, whose only effect would be an
        EmitTokens for those that are taken here.
        """
        if delta.outcome is not None or delta.timings is not None or not delta.token_ids:
            return False
        # A flight's objects are many, and have left the processor's cache since its last token: look at few of them.
        flow = self._flow
        flows = flow is not None and delta.attempt is flow[1] and incarnation == flow[0]
        if not flows and not self._begin_flow(incarnation, delta.attempt):
            return False
        index = delta.sequence_index
        if index >= len(self._sequences) or delta.first_index + len(delta.token_ids) > self._max_tokens:
            return False
        return self._sequences[index].takes_next(delta)

    def _begin_flow(self, incarnation: str, key: AttemptKey) -> bool:
        """From now on, until the next event, tokens of this node and attempt are for the client as they come. False:
        they are not.
        """
        leg = self._legs.get(incarnation)
        if leg is None or not leg.is_running or key != self._key or self.state is not FlightState.STREAMING:
            return False
        leg.taken = True
        self._decode_flows = self._decode_flows or leg.leg is Leg.DECODE
        self._flow = incarnation, key
        return True

    def _place(self, cause: AttemptCause) -> Place:
        self._attempt += 1
        self._key = AttemptKey(self.request.request_id, self._attempt, self.flight_id)
        return Place(self._attempt, frozenset(self._exclude), cause)

    def _on_placed(self, placement: Placement) -> list[FlightEffect]:
        legs = self._begin_attempt(placement, self._known_tokens())
        return [SubmitLeg(leg.node.incarnation, self._submit(leg.leg)) for leg in legs]

    def _known_tokens(self) -> Sequence[int]:
        """What the nodes are given with the prompt. They take it for one sequence that needs no other state."""
        params = self.request.sampling_params
        if params.n > 1 or params.beam_width:
            return ()
        return tuple(self._sequences[0].token_ids)

    def _begin_attempt(self, placement: Placement, given: Sequence[int] = ()) -> Sequence[FlightLeg]:
        self._machine.feed(FlightStep.PLACED)
        self._placement = placement
        for sequence in self._sequences:
            sequence.begin_attempt(len(given))
        self._decode_flows = False
        self._given, self._num_given = given, len(given)
        self._is_adopting = False
        prefill, decode, num_sequences = placement.prefill, placement.decode, len(self._sequences)
        pair = [FlightLeg(prefill, Leg.PREFILL, 1), FlightLeg(decode, Leg.DECODE, num_sequences)] if prefill else []
        legs = pair or [FlightLeg(decode, Leg.EMBED if self.request.embeds else Leg.WHOLE, num_sequences)]
        self._legs = {leg.node.incarnation: leg for leg in legs}
        return legs

    def _submit(self, leg: Leg) -> Submit:
        prefill = self._placement.prefill if self._placement else None
        return Submit(
            attempt=self._key,
            leg=leg,
            prompt_token_ids=self.request.prompt_token_ids,
            sampling_params=self.request.sampling_params,
            priority=self.request.priority,
            cache_salt=self.request.cache_salt,
            kv_source=prefill.kv_source if prefill and leg is Leg.DECODE else None,
            output_token_ids=self._given,
            takeover=self.takeover,
        )

    def _on_delta(self, incarnation: str, delta: RequestDelta) -> list[FlightEffect]:
        leg = self._legs.get(incarnation) if delta.attempt == self._key else None
        if leg is None or not leg.is_running:
            self.stale_events += 1
            return []
        leg.taken = True
        if delta.timings is not None:
            leg.timings = delta.timings
        if self.request.embeds and (delta.token_ids or (delta.outcome in FINISH_REASONS and not delta.embedding)):
            return self._give_up(EngineFault(f"node {leg.node.node_id} did not embed what it was to embed"))
        self._embedding = delta.embedding
        if delta.sequence_index >= len(self._sequences):
            return self._give_up(EngineFault(f"node {leg.node.node_id} sent a sequence that nobody asked for"))
        sequence = self._sequences[delta.sequence_index]
        self._decode_flows = self._decode_flows or (leg.leg is Leg.DECODE and bool(delta.token_ids))
        effects: list[FlightEffect] = []
        if sequence.is_closed:
            effects += self._tell_over(leg, sequence) if delta.outcome is None else []
        else:
            last = delta.first_index + len(delta.token_ids)
            if delta.token_ids and last > self._max_tokens:
                return self._give_up(EngineFault(f"node {leg.node.node_id} sent a token {last - 1} nobody asked for"))
            try:
                tokens = sequence.take(delta)
            except StreamDiverged as error:
                return self._give_up(error)
            if delta.token_ids:
                self._machine.feed(FlightStep.TOKENS)
            effects += [tokens] if tokens is not None else []
        if delta.outcome is not None:
            if delta.outcome is Outcome.MOVED:
                return self._on_moved(leg, delta.takeover)
            if leg.note_outcome(delta.sequence_index, delta.outcome):
                effects += self._release(leg)
            if not (sequence.is_closed and delta.outcome is Outcome.ABORTED):
                effects += self._on_outcome(leg, delta)
        return effects if self.is_over else effects + self._finish_if_complete(sequence)

    def _on_outcome(self, leg: FlightLeg, delta: RequestDelta) -> list[FlightEffect]:
        node = leg.node
        match delta.outcome:
            case Outcome.ABORTED:
                why = f"node {node.node_id} gave it up: {delta.error or 'no reason'}"
                return self._retry(node.incarnation, why, AttemptCause.GIVEN_UP)
            case Outcome.KV_LOST:
                source = self._placement.prefill if self._placement and self._placement.prefill else node
                why = f"KV of {source.node_id} was lost: {delta.error}"
                lost = self._legs.get(source.incarnation, leg)
                return self._lose(lost, why, AttemptCause.KV_LOST, delta.transfer_cause)
            case Outcome.REFUSED:
                return self._refused(node, delta.error)
            case Outcome.IGNORED:
                return self._give_up(
                    InvalidRequest("prompt", delta.error or f"is too long for the KV cache of node {node.node_id}")
                )
            case Outcome.INVALID:
                field, _, reason = delta.error.partition(": ")
                return self._give_up(InvalidRequest(field, reason))
            case Outcome.REPETITION:
                return self._give_up(RepetitiveOutput(delta.error))
            case Outcome.UNKNOWN:
                return self._on_unknown(leg)
            case Outcome.ERROR:
                return self._give_up(_fault(node, delta))
            case _:
                return []

    def _on_unknown(self, leg: FlightLeg) -> list[FlightEffect]:
        """There was nothing to adopt. A prefill leg that ended long ago is not missed when its decode leg flows."""
        why = f"node {leg.node.node_id} has nothing of the attempt"
        if leg.leg is Leg.PREFILL and self._has_all_of_prefill:
            return []
        if leg.leg is Leg.PREFILL and self._is_adopting:
            self._unless_it_flows = why
            return []
        return self._not_kept(why)

    def _on_moved(self, leg: FlightLeg, takeover: int) -> list[FlightEffect]:
        """Whoever has it now speaks for it: an abort of ours could only do harm. Unless we serve the later call."""
        if 0 < takeover < self.takeover:
            return [self._adopt_leg(leg)]
        return self._leave(ContinuedElsewhere("continued at another router"))

    def _leave(self, error: BatonError) -> list[FlightEffect]:
        """Nothing is aborted: the attempt is another router's, or will be."""
        self._machine.feed(FlightStep.CANCEL)
        effects: list[FlightEffect] = []
        for leg in self._legs.values():
            effects += self._release(leg)
        return [*effects, MovedAway(error)]

    def _on_node_gone(self, incarnation: str, reason: str, lost_together: Set[str]) -> list[FlightEffect]:
        leg = self._legs.get(incarnation)
        if leg is None or leg.lost or self.state not in (FlightState.PREFILLING, FlightState.STREAMING):
            return []
        leg.lost = True
        if leg.leg is Leg.PREFILL and self._is_done_with_prefill(leg):
            return self._release(leg)
        if self._num_unrelated(lost_together) >= UNRELATED_LOSSES:
            return self._spare(incarnation, reason)
        return self._lose(leg, reason, AttemptCause.NODE_LOST)

    def _on_link_back(self, incarnation: str) -> list[FlightEffect]:
        leg = self._legs.get(incarnation)
        if leg is None or not leg.is_running:
            return []
        # Whatever was on its way when the link was cut may be lost: nothing is known of it until the node answers.
        leg.taken = False
        leg.told_sequences.clear()
        return [self._adopt_leg(leg)]

    def _num_unrelated(self, lost: Set[str]) -> int:
        """How many of these nodes no attempt of this flight was on."""
        used = self._exclude | self._legs.keys()
        return len(lost) - sum(incarnation in lost for incarnation in used)

    def _is_done_with_prefill(self, leg: FlightLeg) -> bool:
        """Whether the attempt can go on without its prefill node.

        Once handed off, the decode node knows best: either it has the blocks or it says KV_LOST. One that does
        something else without the blocks knows best as soon as the prefill node has the leg: if that was lost on its
        way the decode node waits, over a link that lives, for a prompt of which the prefill node has never heard.
        """
        if leg.outcome is Outcome.HANDED_OFF or self._has_all_of_prefill:
            return True
        return leg.taken and self._placement is not None and self._placement.decode.on_transfer_failure != "reroute"

    @property
    def _has_all_of_prefill(self) -> bool:
        return self._decode_flows and self._sequences[0].num_tokens > self._num_given

    def _lose(
        self, leg: FlightLeg, why: str, cause: AttemptCause, kv_cause: TransferCause | None = None
    ) -> list[FlightEffect]:
        if leg.taken:
            return self._retry(leg.node.incarnation, why, cause, kv_cause)
        return self._not_taken(leg.node.incarnation, FlightStep.LEG_LOST, why, cause, kv_cause)

    def _refused(self, node: NodeDescription, error: str) -> list[FlightEffect]:
        why = f"node {node.node_id} refused: {error}"
        return self._not_taken(node.incarnation, FlightStep.REFUSED, why, AttemptCause.REFUSED)

    def _not_kept(self, why: str) -> list[FlightEffect]:
        return self._not_taken(None, FlightStep.LEG_LOST, why, AttemptCause.NOT_KEPT)

    def _not_taken(
        self,
        exclude: str | None,
        step: FlightStep,
        why: str,
        cause: AttemptCause,
        kv_cause: TransferCause | None = None,
    ) -> list[FlightEffect]:
        self._refill_budget()
        self._refusals += 1
        if self._refusals > MAX_REFUSALS:
            return self._give_up(_exhausted(f"taken by none of {self._refusals} nodes; the last: {why}", kv_cause))
        self._machine.feed(step)
        return self._next_attempt(exclude, why, cause)

    def _retry(
        self, failed: str, why: str, cause: AttemptCause, kv_cause: TransferCause | None = None
    ) -> list[FlightEffect]:
        self._refill_budget()
        self._failures += 1
        if self._failures >= MAX_ATTEMPTS:
            return self._give_up(_exhausted(f"{self._failures} attempts failed; the last: {why}", kv_cause))
        self._machine.feed(FlightStep.LEG_LOST)
        return self._next_attempt(failed, why, cause)

    def _spare(self, failed: str, why: str) -> list[FlightEffect]:
        """The attempt was lost through no fault of its own."""
        self._refill_budget()
        self._spared += 1
        if self._spared > MAX_SPARED:
            story = f"{self._spared} attempts were lost with many nodes; the last: {why}"
            return self._give_up(AttemptsExhausted(story))
        self._machine.feed(FlightStep.LEG_LOST)
        return self._next_attempt(failed, why, AttemptCause.NODE_LOST)

    def _refill_budget(self) -> None:
        """An attempt failed: forget the failures before it if the client got enough since the last one."""
        num_tokens = self.num_output_tokens
        if num_tokens - self._tokens_at_failure >= REFILL_TOKENS:
            self._failures = self._refusals = self._spared = 0
            self._exclude.clear()
        self._tokens_at_failure = num_tokens

    def _next_attempt(self, exclude: str | None, why: str, cause: AttemptCause) -> list[FlightEffect]:
        aborts = self._abort_all(why)
        self._legs = {}
        if exclude is not None:
            self._exclude.add(exclude)
        return [*aborts, self._place(cause)]

    def _finish_if_complete(self, sequence: FlightSequence) -> list[FlightEffect]:
        try:
            end = sequence.end_if_complete()
        except StreamDiverged as error:
            return self._give_up(error)
        return self._close(sequence, FlightStep.ENDED, end.outcome.value, end.stop_token_id) if end else []

    def _on_stop_string(self, sequence: FlightSequence, stop: str) -> list[FlightEffect]:
        if sequence.is_closed:
            return []
        effects = self._close(sequence, FlightStep.STOP_STRING, "stop", stop)
        if not self.is_over:
            for leg in self._legs.values():
                if leg.is_running and sequence.index not in leg.ended_sequences:
                    effects += self._tell_over(leg, sequence)
        return effects

    def _close(
        self, sequence: FlightSequence, step: FlightStep, finish_reason: str, stop_reason: int | str | None
    ) -> list[FlightEffect]:
        is_last = all(other.is_closed for other in self._sequences if other is not sequence)
        if is_last:
            self._machine.feed(step)
        sequence.close(finish_reason, stop_reason)
        effects: list[FlightEffect] = []
        if len(self._sequences) > 1:
            effects.append(SequenceEnded(sequence.index, finish_reason, stop_reason))
        return effects + self._finish() if is_last else effects

    def _tell_over(self, leg: FlightLeg, sequence: FlightSequence) -> list[FlightEffect]:
        if leg.leg is Leg.PREFILL or sequence.index in leg.told_sequences:
            return []
        leg.told_sequences.add(sequence.index)
        abort = Abort(self._key, "its text is over", sequence.index, self.takeover)
        return [AbortLeg(leg.node.incarnation, abort)]

    def _finish(self) -> list[FlightEffect]:
        handed_over = self._decode_flows
        effects = self._end_legs(ENDED_WELL, spare_handed_off=handed_over)
        first = self._sequences[0]
        how = first.finish_reason, first.stop_reason
        return [*effects, Finish(*how, self._timings(), self._path(), self._embedding)]

    def _give_up(self, error: BatonError) -> list[FlightEffect]:
        self._machine.feed(FlightStep.GAVE_UP)
        return [*self._abort_all(str(error)), Fail(error)]

    def _abort_all(self, reason: str) -> list[FlightEffect]:
        return self._end_legs(reason, spare_handed_off=False)

    def _end_legs(self, reason: str, *, spare_handed_off: bool) -> list[FlightEffect]:
        told = [
            leg
            for leg in self._legs.values()
            if leg.may_hold_blocks and not (spare_handed_off and leg.outcome is Outcome.HANDED_OFF)
        ]
        abort = Abort(self._key, reason, takeover=self.takeover)
        effects: list[FlightEffect] = [AbortLeg(leg.node.incarnation, abort) for leg in told]
        for leg in self._legs.values():
            effects += self._release(leg)
        return effects

    def _release(self, leg: FlightLeg) -> list[FlightEffect]:
        if leg.released:
            return []
        leg.released = True
        return [LegEnded(leg.node.incarnation, self._key)]

    def _timings(self) -> StageTimings:
        """Prefill's figures from the node that computed the prompt, the transfer's from the one that pulled it."""
        nothing = StageTimings()
        by_leg = {leg.leg: leg.timings or nothing for leg in self._legs.values()}
        prompt = by_leg.get(Leg.PREFILL) or by_leg.get(Leg.WHOLE) or by_leg.get(Leg.EMBED, nothing)
        pulled = by_leg.get(Leg.DECODE, nothing)
        return StageTimings(
            queue_ms=prompt.queue_ms,
            prefill_ms=prompt.prefill_ms,
            transfer_ms=pulled.transfer_ms,
            cached_tokens=prompt.cached_tokens,
            external_tokens=pulled.external_tokens,
            kv_bytes=pulled.kv_bytes,
        )

    def _path(self) -> Path:
        placement = self._placement
        if placement is None:
            return Path("", "", self._attempt, "")
        prefill = placement.prefill.node_id if placement.prefill else ""
        return Path(prefill, placement.decode.node_id, self._attempt, placement.reason)


def _fault(node: NodeDescription, delta: RequestDelta) -> BatonError:
    """The error of a node that wants no other attempt."""
    why = delta.error or f"node {node.node_id} failed the request"
    return EngineFault(why) if delta.transfer_cause is None else TransferFailed(delta.transfer_cause, why)


def _exhausted(story: str, kv_cause: TransferCause | None) -> BatonError:
    """Why nothing more is tried; `kv_cause`: the last attempt failed because KV did not come."""
    return AttemptsExhausted(story) if kv_cause is None else TransferFailed(kv_cause, story)
