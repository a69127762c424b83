"""The flight: one client request as its router sees it, from admission to its end, over all attempts to compute it.

Pure: events in, effects out, no clock and no I/O (`router.live_requests` carries the effects out). More than 500 lines,
since each rule is about the same few fields; what concerns one attempt or one sequence alone is beside it. The rules:

1. Both legs of an attempt are sent at the same time. The first token comes from the prefill leg, the others from the
   decode leg. Whichever stream is faster, tokens leave in the order of their indices.
2. Tokens are a function of the request alone. So whatever dies, at whatever time: a new attempt on other nodes gets the
   prompt with the tokens that the client already has, and continues behind them. Where nodes can't be given those
   (several sequences, beams) they run the whole request again: tokens that the client has are compared and dropped. A
   difference ends the flight with an error.
3. Messages of an earlier attempt, and all that come after the end, change nothing; they are counted.
4. When an attempt is over, the nodes that still work on it are sent aborts by the same event.
5. A budget of attempts (`AttemptBudget`) ends a request that breaks its nodes. An attempt that a node refuses, or that
   is lost with a node which never acknowledged it, costs a refusal and not a failure. An attempt that is lost together
   with several nodes which this flight never used costs neither: no request can do that, so the network or the router
   was at fault. Those are bounded, too, so that nothing is tried for ever. Progress refills the budget: when the
   client got `REFILL_TOKENS` new tokens since the last failure, counting starts anew. A request that kills each of its
   nodes after fewer tokens than that still ends. An error inside the engine is final, because it would come back.
6. An attempt that another router began is adopted from its nodes, which replay all that they computed; nodes that don't
   know it cost nothing but a refusal. The router that serves the client's latest call owns an attempt: each flight has
   that call's number (`takeover`), and its messages carry it. An attempt that another router adopted is no longer ours:
   nothing is retried or aborted. But where that router's number is smaller than ours, the attempt is taken back.
7. A request of several sequences ends when all of them have ended. A sequence that has ended stays so, whatever a later
   attempt says of it, and the node that still works on it is sent an abort for it.
8. An embedding takes one leg on one node. It is a function of the prompt alone, so another attempt gives the same.
9. A link that was cut costs nothing while both of its ends live: its node goes on, and once it is reached again each
   leg that has not ended is adopted there, from the first token on that the client does not have. A node that does not
   have the leg (the submission may have been lost, an old version ends its legs) says so, and the flight goes on by
   rule 6.
10. Log-probabilities of the prompt come from the node that computes it, with its first token, and are given to the
   client once, before all tokens: until then tokens of the decode leg are held back, and the prefill leg is needed. A
   node that is given output tokens does not compute them again, since the client has them.
11. Tokens are a function of the request only among nodes with equal bits. Once the client has a token, or the
   log-probabilities of the prompt, each further attempt goes to nodes that the stream's `Origin` allows. Until then any
   version may serve the request. Where the operator permits it (`may_cross`), a single sequence goes on at nodes of
   other numerics once none of its own is left, and is not bit-exact from there on.
12. While a single sequence is decoded, it may be moved to another node (`flight_move`), which costs no attempt. What
   fails before the stream is handed over ends the move, and the stream goes on where it is; what fails afterwards is a
   failure of the attempt that has it then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import replace

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
from baton.messages.ids import AttemptKey
from baton.messages.node import ENDED_WELL, FINISH_REASONS, Adopt, Leg, NodeDescription, Outcome, RequestDelta
from baton.messages.sampling import TokenLogprobs
from baton.messages.speculation import NO_DRAFTS, DraftCounts
from router.admission.request import ValidRequest
from router.flight.flight_attempt import Attempt, AttemptBudget, AttemptTimings, FlightLeg
from router.flight.flight_move import PendingMove
from router.flight.flight_sequence import FlightSequence
from router.flight.flight_table import (
    FLIGHT_TABLE,
    TERMINAL,
    AdoptLeg,
    AttemptCause,
    Cancel,
    Delta,
    EmitPromptLogprobs,
    Fail,
    Finish,
    FlightEffect,
    FlightEvent,
    FlightState,
    FlightStep,
    GiveUp,
    LeaveToOtherRouter,
    LinkBack,
    MovedAway,
    MoveEnded,
    MoveTo,
    NodeGone,
    Place,
    Placed,
    SequenceEnded,
    StopMove,
    StopStringFound,
)
from router.placement.placement import Origin, Placement

MIN_UNRELATED_NODES = 3
"""So many lost nodes that a flight never used prove that the flight is not the cause: more than the two nodes that one
other request of the same kind may have broken."""


class Flight:
    """The state of one request; the rules are in the module's docstring."""

    __slots__ = (
        "_attempt",
        "_budget",
        "_checked_source",
        "_embedding",
        "_has_given_prompt_logprobs",
        "_lacks_prompt_logprobs",
        "_machine",
        "_max_tokens",
        "_may_cross",
        "_move",
        "_number",
        "_origin",
        "_sequences",
        "flight_id",
        "num_stale_events",
        "request",
        "takeover",
    )

    def __init__(
        self, request: ValidRequest, flight_id: int = 0, takeover: int = 0, *, may_cross: bool = False
    ) -> None:
        """`flight_id` (64 bits) tells this flight's attempts from those of any other flight of the same request id;
        `takeover` is the number of the client's call that it serves, see `baton.messages.node.Adopt`. `may_cross`:
        whether nodes of other numerics may continue its stream.
        """
        self.request = request
        self.takeover = takeover
        self.flight_id = flight_id
        self.num_stale_events = 0
        """Events about earlier attempts, and events after the end."""
        self._machine = Machine(f"flight {request.request_id}", FlightState.PLACING, FLIGHT_TABLE)
        params = request.sampling_params
        self._lacks_prompt_logprobs = (
            params.prompt_logprobs is not None and request.num_prompt_tokens > 1 and not request.embeds
        )
        """Whether the client waits for the log-probabilities of the prompt. A prompt of one token has none."""
        held = self._lacks_prompt_logprobs
        self._sequences = [FlightSequence(index, is_held=held) for index in range(params.n)]
        self._number = 0
        """The number of the latest attempt."""
        self._attempt = Attempt(request, AttemptKey(request.request_id, 0, flight_id))
        """The running attempt, or the next one, which has no nodes yet."""
        self._budget = AttemptBudget()
        # Several sequences are computed again and compared, which would end the stream at the first other token.
        self._may_cross = may_cross and params.n == 1 and not params.beam_width
        self._origin: Origin | None = None
        """Where the tokens of earlier attempts came from; None: there are none yet."""
        self._has_given_prompt_logprobs = False
        self._checked_source: tuple[str, AttemptKey] | None = None
        """The node and attempt whose next tokens need no further check; None: a source is to be checked first."""
        self._move: PendingMove | None = None
        self._max_tokens = request.sampling_params.max_tokens
        self._embedding = b""

    @property
    def state(self) -> FlightState:
        return self._machine.state

    @property
    def is_over(self) -> bool:
        return self._machine.state in TERMINAL

    @property
    def history(self) -> str:
        """Every state so far, and the event that led to each."""
        return self._machine.history

    @property
    def num_output_tokens(self) -> int:
        """Number of tokens given to the client so far, of all sequences."""
        return sum(sequence.num_tokens for sequence in self._sequences)

    @property
    def draft_counts(self) -> DraftCounts:
        """What became of the drafts of all sequences, in the attempts that this flight has followed."""
        return sum((sequence.draft_counts for sequence in self._sequences), NO_DRAFTS)

    @property
    def sequences(self) -> Sequence[FlightSequence]:
        """The output so far, by sequence."""
        return self._sequences

    @property
    def num_given(self) -> int:
        """Number of output tokens that the nodes of the running attempt were given with the prompt."""
        return self._attempt.num_given

    @property
    def key(self) -> AttemptKey:
        """The key of the latest attempt."""
        return self._attempt.key

    @property
    def incarnations(self) -> Set[str]:
        """The incarnations of the running attempt's nodes, and of that to which the stream is moved."""
        running = self._attempt.legs.keys()
        return running if self._move is None else running | {self._move.leg.node.incarnation}

    def keys_on(self, incarnation: str) -> Sequence[AttemptKey]:
        """The keys of the attempts that this node has a leg of, or is to have one."""
        attempts = [self._attempt] if self._move is None else [self._attempt, self._move.attempt]
        return [attempt.key for attempt in attempts if incarnation in attempt.legs]

    @property
    def decoder(self) -> NodeDescription | None:
        """The node that decodes in the running attempt; None: there is none."""
        legs = list(self._attempt.legs.values())
        return legs[-1].node if legs else None

    @property
    def moving_to(self) -> AttemptKey | None:
        """The attempt to which the stream is being moved; None: it stays."""
        return None if self._move is None else self._move.key

    @property
    def origin(self) -> Origin | None:
        """Where the stream began; None: the client has nothing yet that nodes computed."""
        placement = self._attempt.placement
        # What its nodes were given came from those of an earlier attempt.
        num_before = 0 if self._origin is None else self._attempt.num_given
        has_begun = self.num_output_tokens > num_before or self._has_given_prompt_logprobs
        return self.origin_with(placement) if has_begun and placement is not None else self._origin

    def origin_with(self, placement: Placement) -> Origin:
        """Where the stream began if these nodes add to it: mixed, if they compute under other numerics."""
        origin = self._origin or Origin.of(placement.decode, across=self._may_cross)
        is_mixed = placement.kv_bits != "" or placement.decode.bits != origin.bits
        return replace(origin, is_mixed=True) if is_mixed and not origin.is_mixed else origin

    @property
    def bit_exact(self) -> bool:
        """Whether the tokens that the client has are a function of the request alone; before the first one whether
        those of the running attempt will be."""
        placement = self._attempt.placement
        origin = self.origin or (self.origin_with(placement) if placement is not None else None)
        return origin is None or not (origin.is_mixed or origin.incarnation)

    @property
    def kv_bits(self) -> str:
        """See `Submit.kv_bits`, of the running attempt's leg that decodes."""
        return self._attempt.placement.kv_bits if self._attempt.placement is not None else ""

    def why_not_movable(self) -> str:
        """Why the stream can't be moved to another node now; empty: it can."""
        params = self.request.sampling_params
        if self.request.embeds:
            return "an embedding has no stream"
        if params.n > 1 or params.beam_width:
            return "a request of several sequences stays on its node"
        if self._move is not None:
            return "it is being moved already"
        if self.state is not FlightState.STREAMING or self._attempt.is_adopting or self._lacks_prompt_logprobs:
            return "it does not stream now"
        *_, leg = self._attempt.legs.values()
        if not leg.is_running or (leg.kind is Leg.DECODE and not self._attempt.decode_has_sent_tokens):
            return "it does not stream now"
        if not self.request.prompt_token_ids:
            return "this router has not got its prompt"
        if self._sequences[0].num_tokens + 1 >= params.max_tokens:
            return "it is about to end"
        return "" if leg.node.takes_moves else f"the version of node {leg.node.node_id} moves no streams"

    def attempt_timings(self) -> AttemptTimings:
        """The timings of the running attempt that its nodes have reported so far."""
        return self._attempt.timings()

    def start(self, num_earlier_attempts: int = 0, origin: Origin | None = None) -> list[FlightEffect]:
        """The first effect of a new flight, after so many attempts of other flights of this request. Call once.

        `origin`: where the stream began, if the client has tokens of those attempts.
        """
        self._number, self._origin = num_earlier_attempts, origin
        return [self._place(AttemptCause.RESUMED if num_earlier_attempts else AttemptCause.FIRST)]

    def adopt(
        self, key: AttemptKey, placement: Placement, num_given: int = 0, origin: Origin | None = None
    ) -> list[FlightEffect]:
        """The first effects of a flight that another router began, in place of `start`.

        `key` is the attempt that runs on the nodes of `placement`. They were given `num_given` output tokens with the
        prompt, and replay those that they computed. Later attempts are this flight's own. `origin`: as in `start`.
        """
        self._number, self._origin = key.attempt, origin
        self._begin_attempt(Attempt(self.request, key, placement, num_given=num_given), 0)
        return [self._adopt_leg(leg) for leg in self._attempt.legs.values()]

    def _adopt_leg(self, leg: FlightLeg) -> AdoptLeg:
        known = tuple(sequence.num_tokens for sequence in self._sequences)
        adopt = Adopt(self._attempt.key, self.takeover, known if any(known) else ())
        return AdoptLeg(leg.node.incarnation, adopt, leg.num_sequences)

    @property
    def is_adopting(self) -> bool:
        """Whether `end_adoption` may still decide something: until the decode leg has sent a token."""
        return self._attempt.is_adopting and not self.is_over and not self._is_prefill_done

    def end_adoption(self, incarnation: str) -> list[FlightEffect]:
        """The node has reported on other requests: if it adopted the leg, it has replayed all that it had of it.

        A decode node that has no token may be waiting for a prefill node that has never received the request.
        """
        self._checked_source = None
        leg = self._attempt.legs.get(incarnation)
        if not self.is_adopting or leg is None or not leg.is_acknowledged or leg.kind is Leg.PREFILL:
            return []
        self._attempt.is_adopting = False
        if not self._attempt.why_prefill_unknown or self._is_prefill_done:
            return []
        return self._on_not_adopted(self._attempt.why_prefill_unknown)

    def handle(self, event: FlightEvent) -> list[FlightEffect]:
        """Take an event. Raises IllegalEvent, and changes nothing, for one that can't happen in this state."""
        self._checked_source = None
        if self.is_over:
            self.num_stale_events += 1
            return []
        match event:
            case Placed(placement, turn):
                return self._on_placed(placement, turn)
            case Delta(incarnation, delta):
                return self._on_delta(incarnation, delta)
            case NodeGone(incarnation, reason, lost_together):
                return self._on_node_gone(incarnation, reason, lost_together)
            case LinkBack(incarnation):
                return self._on_link_back(incarnation)
            case MoveTo(node, most_tokens):
                return self._on_move_to(node, most_tokens)
            case StopMove(to, reason):
                return self._end_move(reason) if self._move is not None and self._move.key == to else []
            case StopStringFound(stop, index):
                return self._on_stop_string(self._sequences[index], stop)
            case Cancel(reason):
                self._machine.feed(FlightStep.CANCEL)
                return [*self._abort_all(reason), Fail(Cancelled(reason))]
            case GiveUp(error):
                return self._give_up(error)
            case LeaveToOtherRouter(error):
                return self._leave_to_other_router(error)

    def take_if_next(self, incarnation: str, delta: RequestDelta) -> bool:
        """Take a delta that has the next tokens of a sequence and nothing else, as nearly all deltas have.

        True: its tokens are for the client now. False: nothing was taken, and the delta is an event for `handle`. For a
        delta that is taken here, the only effect of `handle` would have been EmitTokens.
        """
        if delta.outcome is not None or delta.timings is not None or not delta.token_ids:
            return False
        # A flight's objects are many, and have left the processor's cache since its last token: look at few of them.
        source = self._checked_source
        is_checked = source is not None and delta.attempt is source[1] and incarnation == source[0]
        if not is_checked and not self._check_source(incarnation, delta.attempt):
            return False
        index = delta.sequence_index
        if index >= len(self._sequences) or delta.first_index + len(delta.token_ids) > self._max_tokens:
            return False
        return self._sequences[index].take_if_next(delta)

    def _check_source(self, incarnation: str, key: AttemptKey) -> bool:
        """Whether tokens of this node and attempt are for the client; if so, they are until the next event."""
        leg = self._attempt.legs.get(incarnation)
        if leg is None or not leg.is_running or key != self._attempt.key or self.state is not FlightState.STREAMING:
            return False
        if self._lacks_prompt_logprobs:
            return False
        leg.is_acknowledged = True
        self._attempt.decode_has_sent_tokens |= leg.kind is Leg.DECODE
        self._checked_source = incarnation, key
        return True

    def _place(self, cause: AttemptCause) -> Place:
        self._number += 1
        self._origin = self.origin
        place = Place(self._number, frozenset(self._budget.excluded), cause, self._origin)
        key = AttemptKey(self.request.request_id, self._number, self.flight_id)
        # The new attempt has no legs yet. It keeps the nodes of the last one, whose last text may still end the flight.
        self._attempt = Attempt(self.request, key, before=self._attempt)
        return place

    def _on_placed(self, placement: Placement, turn: float | None) -> list[FlightEffect]:
        given = self._known_tokens()
        self._begin_attempt(Attempt(self.request, self._attempt.key, placement, given), len(given))
        return self._attempt.submissions(self.takeover, turn)

    def _known_tokens(self) -> Sequence[int]:
        """The output tokens that nodes are given with the prompt: only a single sequence without beams is continued."""
        params = self.request.sampling_params
        if params.n > 1 or params.beam_width:
            return ()
        return tuple(self._sequences[0].token_ids)

    def _begin_attempt(self, attempt: Attempt, num_known: int) -> None:
        """Begin an attempt that sends all tokens but the first `num_known` ones."""
        self._machine.feed(FlightStep.PLACED)
        self._attempt = attempt
        for sequence in self._sequences:
            sequence.begin_attempt(num_known)

    def _on_move_to(self, node: NodeDescription, most_tokens: int) -> list[FlightEffect]:
        if self.why_not_movable() or self.decoder is None or self.decoder.incarnation == node.incarnation:
            self.num_stale_events += 1
            return []
        self._number += 1
        key = AttemptKey(self.request.request_id, self._number, self.flight_id)
        given, num_prompt = self._known_tokens(), self.request.num_prompt_tokens
        cut_by = num_prompt + min(len(given) + most_tokens, self._max_tokens)
        self._move = PendingMove(self._attempt, key, node, given, cut_by)
        return self._move.begin(self.takeover)

    def _on_delta_of_move(self, move: PendingMove, delta: RequestDelta) -> list[FlightEffect]:
        move.leg.is_acknowledged = True
        if delta.outcome is None or delta.outcome in FINISH_REASONS:
            move.early.append(delta)
            return []
        move.leg.outcome = delta.outcome
        return self._end_move(f"node {move.leg.node.node_id}: {delta.error or delta.outcome.value}")

    def _end_move(self, why: str, *, is_over: bool = False) -> list[FlightEffect]:
        """Let the stream go on where it is, if it is being moved. `is_over`: the running attempt is over, too."""
        move, self._move = self._move, None
        return [] if move is None else move.end(why, self.takeover, is_over=is_over)

    def _on_handed_over(self, leg: FlightLeg) -> list[FlightEffect]:
        """The node that had the stream has ended it, for the node to which it is moved."""
        move = self._move
        if move is None:
            # The router that wanted the move has lost this flight, or has given the move up too late.
            return self._on_not_adopted(f"node {leg.node.node_id} has handed its stream over to nobody")
        self._move = None
        self._machine.feed(FlightStep.HANDED_OVER)
        effects = self._attempt.end(ENDED_WELL, self.takeover, keep_handed_off=True)
        self._origin = self.origin
        self._attempt = move.attempt
        # What the other node did not get with its leg it got with the KV.
        move.attempt.num_given = self._sequences[0].num_tokens
        self._sequences[0].begin_attempt(move.attempt.num_given)
        effects.append(MoveEnded(move.key, move.attempt.placement))
        for delta in move.early:
            effects += self._on_delta(move.leg.node.incarnation, delta) if not self.is_over else []
        return effects

    def _on_delta(self, incarnation: str, delta: RequestDelta) -> list[FlightEffect]:
        if (move := self._move) is not None and (delta.attempt, incarnation) == (move.key, move.leg.node.incarnation):
            return self._on_delta_of_move(move, delta)
        leg = self._attempt.legs.get(incarnation) if delta.attempt == self._attempt.key else None
        if leg is None or not leg.is_running:
            self.num_stale_events += 1
            return []
        leg.is_acknowledged = True
        if delta.timings is not None:
            leg.timings = delta.timings
        if delta.prompt_timings is not None:
            leg.prompt_timings = delta.prompt_timings
        if self.request.embeds and (delta.token_ids or (delta.outcome in FINISH_REASONS and not delta.embedding)):
            return self._give_up(EngineFault(f"node {leg.node.node_id} did not embed the prompt"))
        self._embedding = delta.embedding
        if delta.sequence_index >= len(self._sequences):
            return self._give_up(EngineFault(f"node {leg.node.node_id} sent a sequence that nobody asked for"))
        sequence = self._sequences[delta.sequence_index]
        self._attempt.decode_has_sent_tokens |= leg.kind is Leg.DECODE and bool(delta.token_ids)
        effects: list[FlightEffect] = []
        changed: Sequence[FlightSequence] = (sequence,)
        if delta.prompt_logprobs and self._lacks_prompt_logprobs:
            effects, changed = self._emit_held(delta.prompt_logprobs), self._sequences
        elif delta.token_ids and self._lacks_prompt_logprobs and leg.kind is not Leg.DECODE:
            error = f"node {leg.node.node_id} sent no log-probabilities of the prompt; its version may be too old"
            return self._give_up(EngineFault(error))
        if sequence.is_closed:
            effects += self._abort_sequence(leg, sequence) if delta.outcome is None else []
        else:
            end = delta.first_index + len(delta.token_ids)
            if delta.token_ids and end > self._max_tokens:
                return self._give_up(EngineFault(f"node {leg.node.node_id} sent a token {end - 1} nobody asked for"))
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
                effects += self._attempt.end_leg(leg)
            if not (sequence.is_closed and delta.outcome is Outcome.ABORTED):
                effects += self._on_outcome(leg, delta)
        for changed_sequence in changed:
            effects += self._finish_if_complete(changed_sequence) if not self.is_over else []
        return effects

    def _emit_held(self, prompt_logprobs: Sequence[TokenLogprobs]) -> list[FlightEffect]:
        """The prompt's log-probabilities and the tokens that were held back until they came."""
        self._lacks_prompt_logprobs, self._has_given_prompt_logprobs = False, True
        held = [sequence.take_held() for sequence in self._sequences]
        return [EmitPromptLogprobs(prompt_logprobs), *(tokens for tokens in held if tokens is not None)]

    def _on_outcome(self, leg: FlightLeg, delta: RequestDelta) -> list[FlightEffect]:
        node = leg.node
        match delta.outcome:
            case Outcome.ABORTED:
                why = f"node {node.node_id} gave it up: {delta.error or 'no reason'}"
                return self._retry(self._budget.charge_failure, node.incarnation, why, AttemptCause.GIVEN_UP)
            case Outcome.KV_LOST:
                placement = self._attempt.placement
                source = placement.prefill if placement and placement.prefill else node
                why = f"KV of {source.node_id} was lost: {delta.error}"
                lost = self._attempt.legs.get(source.incarnation, leg)
                return self._on_leg_lost(lost, why, AttemptCause.KV_LOST, delta.transfer_cause)
            case Outcome.HANDED_OFF if leg.kind is not Leg.PREFILL:
                return self._on_handed_over(leg)
            case Outcome.REFUSED:
                return self._on_refused(node, delta.error, AttemptCause.REFUSED)
            case Outcome.ADAPTER_UNAVAILABLE:
                return self._on_refused(node, delta.error, AttemptCause.ADAPTER_UNAVAILABLE)
            case Outcome.IGNORED:
                return self._give_up(
                    InvalidRequest("prompt", delta.error or f"is too long for the KV cache of node {node.node_id}")
                )
            case Outcome.INVALID:
                return self._give_up(InvalidRequest(delta.error_field, delta.error))
            case Outcome.REPETITION:
                return self._give_up(RepetitiveOutput(delta.error))
            case Outcome.UNKNOWN:
                return self._on_unknown(leg)
            case Outcome.ERROR:
                return self._give_up(_final_error(node, delta))
            case _:
                return []

    def _on_unknown(self, leg: FlightLeg) -> list[FlightEffect]:
        """The node has nothing to adopt. A prefill leg that ended long ago is not needed once its decode leg sends."""
        why = f"node {leg.node.node_id} has nothing of the attempt"
        if leg.kind is Leg.PREFILL and self._is_prefill_done:
            return []
        if leg.kind is Leg.PREFILL and self._attempt.is_adopting:
            self._attempt.why_prefill_unknown = why
            return []
        return self._on_not_adopted(why)

    def _on_moved(self, leg: FlightLeg, takeover: int) -> list[FlightEffect]:
        """Another router has adopted the leg. It is taken back if this flight serves the client's later call.

        Otherwise nothing is aborted: the attempt serves the client through the other router.
        """
        if 0 < takeover < self.takeover:
            return [self._adopt_leg(leg)]
        return self._leave_to_other_router(ContinuedElsewhere("continued at another router"))

    def _leave_to_other_router(self, error: BatonError) -> list[FlightEffect]:
        """End here without aborts: the attempt is another router's, or will be."""
        self._machine.feed(FlightStep.CANCEL)
        return [*self._end_move(str(error), is_over=True), *self._attempt.end_legs(), MovedAway(error)]

    def _on_node_gone(self, incarnation: str, reason: str, lost_together: Set[str]) -> list[FlightEffect]:
        effects: list[FlightEffect] = []
        if (move := self._move) is not None and incarnation == move.leg.node.incarnation:
            move.leg.is_lost = True
            effects = self._end_move(reason)
        return effects + self._on_leg_gone(incarnation, reason, lost_together)

    def _on_leg_gone(self, incarnation: str, reason: str, lost_together: Set[str]) -> list[FlightEffect]:
        leg = self._attempt.legs.get(incarnation)
        if leg is None or leg.is_lost or self.state not in (FlightState.PREFILLING, FlightState.STREAMING):
            return []
        leg.is_lost = True
        if leg.kind is Leg.PREFILL and self._can_go_on_without(leg):
            return self._attempt.end_leg(leg)
        if self._num_unrelated(lost_together) >= MIN_UNRELATED_NODES:
            return self._retry(self._budget.charge_unrelated_loss, incarnation, reason, AttemptCause.NODE_LOST)
        return self._on_leg_lost(leg, reason, AttemptCause.NODE_LOST)

    def _on_link_back(self, incarnation: str) -> list[FlightEffect]:
        effects: list[FlightEffect] = []
        if (move := self._move) is not None and incarnation == move.leg.node.incarnation:
            effects = move.adopt(self.takeover)
        leg = self._attempt.legs.get(incarnation)
        if leg is None or not leg.is_running:
            return effects
        # Messages that were on their way when the link was cut may be lost: the node's answer says what it has.
        leg.is_acknowledged = False
        leg.aborted_sequences.clear()
        return [*effects, self._adopt_leg(leg)]

    def _num_unrelated(self, lost: Set[str]) -> int:
        """How many of these nodes no attempt of this flight was on."""
        used = self._budget.excluded | self._attempt.legs.keys()
        return len(lost) - sum(incarnation in lost for incarnation in used)

    def _can_go_on_without(self, leg: FlightLeg) -> bool:
        """Whether the attempt can go on without its prefill leg, whose node is gone.

        Once the prompt is handed off, the decode node decides: either it has the blocks, or it reports KV_LOST. A
        decode node that does not reroute (`on_transfer_failure`) decides as soon as the prefill node has acknowledged
        the leg. Before that it might wait, over a link that lives, for a prompt that the prefill node never received.
        """
        if self._lacks_prompt_logprobs:
            return False
        if leg.outcome is Outcome.HANDED_OFF or self._is_prefill_done:
            return True
        placement = self._attempt.placement
        # No node computes the prompt of a stream again that began under other numerics.
        reroutes = placement is None or placement.decode.on_transfer_failure == "reroute" or placement.kv_bits != ""
        return leg.is_acknowledged and not reroutes

    @property
    def _is_prefill_done(self) -> bool:
        return self._attempt.is_prefill_done(self._sequences[0].num_tokens)

    def _on_leg_lost(
        self, leg: FlightLeg, why: str, cause: AttemptCause, kv_cause: TransferCause | None = None
    ) -> list[FlightEffect]:
        charge = self._budget.charge_failure if leg.is_acknowledged else self._budget.charge_refusal
        return self._retry(charge, leg.node.incarnation, why, cause, kv_cause=kv_cause)

    def _on_refused(self, node: NodeDescription, error: str, cause: AttemptCause) -> list[FlightEffect]:
        why, charge = f"node {node.node_id} refused: {error}", self._budget.charge_refusal
        return self._retry(charge, node.incarnation, why, cause, step=FlightStep.REFUSED)

    def _on_not_adopted(self, why: str) -> list[FlightEffect]:
        return self._retry(self._budget.charge_refusal, None, why, AttemptCause.NOT_KEPT)

    def _retry(
        self,
        charge: Callable[[int], str],
        exclude: str | None,
        why: str,
        cause: AttemptCause,
        *,
        step: FlightStep = FlightStep.LEG_LOST,
        kv_cause: TransferCause | None = None,
    ) -> list[FlightEffect]:
        """Begin another attempt in place of one that failed or was refused; give up if the budget is spent.

        `charge`: of the budget. `exclude`: the node at fault. `kv_cause`: why KV was lost, if it was.
        """
        if spent := charge(self.num_output_tokens):
            message = f"{spent}; the last: {why}"
            error = AttemptsExhausted(message) if kv_cause is None else TransferFailed(kv_cause, message)
            return self._give_up(error)
        self._machine.feed(step)
        aborts = self._abort_all(why)
        if exclude is not None:
            self._budget.excluded.add(exclude)
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
            for leg in self._attempt.legs.values():
                if leg.is_running and sequence.index not in leg.ended_sequences:
                    effects += self._abort_sequence(leg, sequence)
        return effects

    def _close(
        self, sequence: FlightSequence, step: FlightStep, finish_reason: str, stop_reason: int | str | None
    ) -> list[FlightEffect]:
        is_last = all(sibling.is_closed for sibling in self._sequences if sibling is not sequence)
        if is_last:
            self._machine.feed(step)
        sequence.close(finish_reason, stop_reason)
        effects: list[FlightEffect] = []
        if len(self._sequences) > 1:
            effects.append(SequenceEnded(sequence.index, finish_reason, stop_reason))
        return effects + self._finish() if is_last else effects

    def _abort_sequence(self, leg: FlightLeg, sequence: FlightSequence) -> list[FlightEffect]:
        return self._attempt.abort_sequence(leg, sequence.index, self.takeover)

    def _finish(self) -> list[FlightEffect]:
        attempt, first = self._attempt, self._sequences[0]
        effects = self._end_move(ENDED_WELL, is_over=True)
        effects += attempt.end(ENDED_WELL, self.takeover, keep_handed_off=attempt.decode_has_sent_tokens)
        reasons = first.finish_reason, first.stop_reason
        timings, path = attempt.stage_timings(), attempt.path()
        return [*effects, Finish(*reasons, timings, path, self._embedding, self.bit_exact)]

    def _give_up(self, error: BatonError) -> list[FlightEffect]:
        self._machine.feed(FlightStep.GAVE_UP)
        return [*self._abort_all(str(error)), Fail(error)]

    def _abort_all(self, reason: str) -> list[FlightEffect]:
        return [*self._end_move(reason, is_over=True), *self._attempt.end(reason, self.takeover)]


def _final_error(node: NodeDescription, delta: RequestDelta) -> BatonError:
    """The error of a node after which no other attempt is made."""
    why = delta.error or f"node {node.node_id} failed the request"
    return EngineFault(why) if delta.transfer_cause is None else TransferFailed(delta.transfer_cause, why)
