"""One client request as the router sees it. Pure: events in, effects out, no clock and no I/O.

The rules:

1. Both legs of an attempt are sent at the same time. The first token comes from the prefill leg, the others from the
   decode leg; which stream is faster does not matter, tokens leave in the order of their indices.
2. Tokens are a function of the request alone. So whatever dies, at whatever time: a new attempt replays the request on
   other nodes, what the client already has is dropped, and compared. A difference ends the flight with an error.
3. Messages of an earlier attempt, and all that come after the end, change nothing; they are counted.
4. Whoever still works on an attempt that is over is told so in the same breath.
5. An attempt that a node refuses, or that is lost with a node which never said that it had it (several may die at
   once, and are found dead one by one), costs none of the budget; an error inside the engine is final, because it
   would come back.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.engine.request import Leg
from baton.errors import AttemptsExhausted, BatonError, Cancelled, EngineFault, InvalidRequest, StreamDiverged
from baton.ids import AttemptKey
from baton.machine import Machine
from baton.rpc.messages import Abort, NodeDescription, Outcome, Path, RequestDelta, StageTimings, Submit
from router.flight_table import (
    FLIGHT_TABLE,
    TERMINAL,
    AbortLeg,
    Cancel,
    Delta,
    EmitTokens,
    Fail,
    Finish,
    FlightEffect,
    FlightEvent,
    FlightState,
    FlightStep,
    GiveUp,
    LegEnded,
    NodeGone,
    Place,
    Placed,
    StopStringFound,
    SubmitLeg,
)
from router.output_merge import OutputMerge
from router.placement import Placement
from router.request import ValidRequest

MAX_ATTEMPTS = 3
MAX_REFUSALS = 8


@dataclass(slots=True)
class _Leg:
    """One node's part of the running attempt."""

    node: NodeDescription
    leg: Leg
    outcome: Outcome | None = None
    taken: bool = False
    """The node has said something of it, if only that it is there."""
    lost: bool = False
    released: bool = False
    """Was said to be ended: it counts no more towards its node's load."""
    timings: StageTimings | None = None

    @property
    def is_running(self) -> bool:
        return self.outcome is None and not self.lost

    @property
    def may_hold_blocks(self) -> bool:
        """A computed prompt stays on offer until a decode node has it, also when its first token was the last one."""
        if self.lost or self.outcome is None:
            return not self.lost
        return self.leg is Leg.PREFILL and self.outcome in (Outcome.HANDED_OFF, Outcome.STOP, Outcome.LENGTH)


@dataclass(frozen=True, slots=True)
class _End:
    """What the node said of the output's end; it may be known before all tokens are."""

    num_tokens: int
    outcome: Outcome
    stop_token_id: int | None


class Flight:
    """The state of one request; see the rules above."""

    def __init__(self, request: ValidRequest, flight_id: int = 0) -> None:
        """`flight_id` (64 bits) tells its attempts from those of any other flight of the same request id."""
        self.request = request
        self._flight_id = flight_id
        self.stale_events = 0
        """Messages of earlier attempts or after the end."""
        self._machine = Machine(f"flight {request.request_id}", FlightState.PLACING, FLIGHT_TABLE)
        self._merge = OutputMerge()
        self._attempt = 0
        self._failures = 0
        self._refusals = 0
        self._exclude: set[str] = set()
        self._placement: Placement | None = None
        self._legs: dict[str, _Leg] = {}
        self._num_attempt_tokens = 0
        self._decode_flows = False
        self._end: _End | None = None

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
        """Tokens given out so far."""
        return len(self._merge.token_ids)

    def start(self) -> list[FlightEffect]:
        """The first effect. Call once."""
        return [self._place()]

    def handle(self, event: FlightEvent) -> list[FlightEffect]:
        """Take an event. Raises IllegalEvent, and changes nothing, for one that can't happen now."""
        if self.is_over:
            self.stale_events += 1
            return []
        match event:
            case Placed(placement):
                return self._on_placed(placement)
            case Delta(incarnation, delta):
                return self._on_delta(incarnation, delta)
            case NodeGone(incarnation, reason):
                return self._on_node_gone(incarnation, reason)
            case StopStringFound(stop):
                return self._finish(FlightStep.STOP_STRING, "stop", stop)
            case Cancel(reason):
                self._machine.feed(FlightStep.CANCEL)
                return [*self._abort_all(reason), Fail(Cancelled(reason))]
            case GiveUp(error):
                return self._give_up(error)

    def _place(self) -> Place:
        self._attempt += 1
        return Place(self._attempt, frozenset(self._exclude))

    def _on_placed(self, placement: Placement) -> list[FlightEffect]:
        self._machine.feed(FlightStep.PLACED)
        self._placement = placement
        self._merge.begin_attempt()
        self._num_attempt_tokens = 0
        self._decode_flows = False
        self._end = None
        prefill, decode = placement.prefill, placement.decode
        pair = [_Leg(prefill, Leg.PREFILL), _Leg(decode, Leg.DECODE)] if prefill else []
        legs = pair or [_Leg(decode, Leg.WHOLE)]
        self._legs = {leg.node.incarnation: leg for leg in legs}
        return [SubmitLeg(leg.node.incarnation, self._submit(leg.leg)) for leg in legs]

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
        )

    @property
    def _key(self) -> AttemptKey:
        return AttemptKey(self.request.request_id, self._attempt, self._flight_id)

    def _on_delta(self, incarnation: str, delta: RequestDelta) -> list[FlightEffect]:
        leg = self._legs.get(incarnation) if delta.attempt == self._key else None
        if leg is None or not leg.is_running:
            self.stale_events += 1
            return []
        leg.taken = True
        if delta.timings is not None:
            leg.timings = delta.timings
        effects: list[FlightEffect] = []
        if delta.token_ids:
            last = delta.first_index + len(delta.token_ids)
            if last > self.request.sampling_params.max_tokens:
                return self._give_up(EngineFault(f"node {leg.node.node_id} sent a token {last - 1} nobody asked for"))
            try:
                run = self._merge.add(delta.first_index, delta.token_ids, delta.logprobs)
            except StreamDiverged as error:
                return self._give_up(error)
            self._machine.feed(FlightStep.TOKENS)
            self._num_attempt_tokens = max(self._num_attempt_tokens, last)
            self._decode_flows = self._decode_flows or leg.leg is Leg.DECODE
            self._note_end(delta)
            if run is not None:
                stopped = self._stopped_by_token and self._is_complete
                effects.append(EmitTokens(run.first_index, run.token_ids, run.logprobs, stopped))
        else:
            self._note_end(delta)
        if delta.outcome is not None:
            leg.outcome = delta.outcome
            effects += self._release(leg)
            effects += self._on_outcome(leg, delta)
        return effects if self.is_over else effects + self._finish_if_complete()

    def _note_end(self, delta: RequestDelta) -> None:
        if delta.outcome in (Outcome.STOP, Outcome.LENGTH):
            num_tokens = max(self._num_attempt_tokens, delta.first_index)
            self._end = _End(num_tokens, delta.outcome, delta.stop_token_id)

    @property
    def _stopped_by_token(self) -> bool:
        return self._end is not None and self._end.stop_token_id is not None

    @property
    def _is_complete(self) -> bool:
        return self._end is not None and self.num_output_tokens >= self._end.num_tokens

    def _on_outcome(self, leg: _Leg, delta: RequestDelta) -> list[FlightEffect]:
        node = leg.node
        match delta.outcome:
            case Outcome.ABORTED:
                return self._retry(node.incarnation, f"node {node.node_id} gave it up: {delta.error or 'no reason'}")
            case Outcome.KV_LOST:
                source = self._placement.prefill if self._placement and self._placement.prefill else node
                why = f"KV of {source.node_id} was lost: {delta.error}"
                return self._lose(self._legs.get(source.incarnation, leg), why)
            case Outcome.REFUSED:
                return self._refused(node, delta.error)
            case Outcome.IGNORED:
                return self._give_up(
                    InvalidRequest("prompt", delta.error or f"is too long for the KV cache of node {node.node_id}")
                )
            case Outcome.ERROR:
                return self._give_up(EngineFault(delta.error or f"node {node.node_id} failed the request"))
            case _:
                return []

    def _on_node_gone(self, incarnation: str, reason: str) -> list[FlightEffect]:
        leg = self._legs.get(incarnation)
        if leg is None or leg.lost or self.state not in (FlightState.PREFILLING, FlightState.STREAMING):
            return []
        leg.lost = True
        if leg.leg is Leg.PREFILL and self._is_done_with_prefill(leg):
            return self._release(leg)
        return self._lose(leg, reason)

    def _is_done_with_prefill(self, leg: _Leg) -> bool:
        """Whether the attempt can go on without its prefill node.

        Once handed off, the decode node knows best: either it has the blocks or it says KV_LOST.
        """
        return leg.outcome is Outcome.HANDED_OFF or (self._decode_flows and self.num_output_tokens > 0)

    def _lose(self, leg: _Leg, cause: str) -> list[FlightEffect]:
        if leg.taken:
            return self._retry(leg.node.incarnation, cause)
        return self._not_taken(leg.node, FlightStep.LEG_LOST, cause)

    def _refused(self, node: NodeDescription, why: str) -> list[FlightEffect]:
        return self._not_taken(node, FlightStep.REFUSED, f"node {node.node_id} refused: {why}")

    def _not_taken(self, node: NodeDescription, step: FlightStep, cause: str) -> list[FlightEffect]:
        self._refusals += 1
        if self._refusals > MAX_REFUSALS:
            return self._give_up(AttemptsExhausted(f"taken by none of {self._refusals} nodes; the last: {cause}"))
        self._machine.feed(step)
        return self._next_attempt(node.incarnation, cause)

    def _retry(self, failed: str, cause: str) -> list[FlightEffect]:
        self._failures += 1
        if self._failures >= MAX_ATTEMPTS:
            return self._give_up(AttemptsExhausted(f"{self._failures} attempts failed; the last: {cause}"))
        self._machine.feed(FlightStep.LEG_LOST)
        return self._next_attempt(failed, cause)

    def _next_attempt(self, exclude: str, cause: str) -> list[FlightEffect]:
        aborts = self._abort_all(cause)
        self._legs = {}
        self._exclude.add(exclude)
        return [*aborts, self._place()]

    def _finish_if_complete(self) -> list[FlightEffect]:
        end = self._end
        if end is None or not self._is_complete:
            return []
        if self.num_output_tokens > end.num_tokens:
            return self._give_up(
                StreamDiverged(f"a later attempt ended after {end.num_tokens} tokens, {self.num_output_tokens} are out")
            )
        return self._finish(FlightStep.ENDED, end.outcome.value, end.stop_token_id)

    def _finish(self, step: FlightStep, finish_reason: str, stop_reason: int | str | None) -> list[FlightEffect]:
        self._machine.feed(step)
        handed_over = self._decode_flows
        effects = self._end_legs("finished", spare_handed_off=handed_over)
        return [*effects, Finish(finish_reason, stop_reason, self._timings(), self._path())]

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
        effects: list[FlightEffect] = [AbortLeg(leg.node.incarnation, Abort(self._key, reason)) for leg in told]
        for leg in self._legs.values():
            effects += self._release(leg)
        return effects

    def _release(self, leg: _Leg) -> list[FlightEffect]:
        if leg.released:
            return []
        leg.released = True
        return [LegEnded(leg.node.incarnation, self._key)]

    def _timings(self) -> StageTimings:
        """Prefill's figures from the node that computed the prompt, the transfer's from the one that pulled it."""
        nothing = StageTimings()
        by_leg = {leg.leg: leg.timings or nothing for leg in self._legs.values()}
        prompt = by_leg.get(Leg.PREFILL) or by_leg.get(Leg.WHOLE, nothing)
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
