"""A router in virtual time: real flights, placement, view and waiting room; the shell around them is the simulator's.

It is `router.dispatcher.Dispatcher` without a loop: nobody reads slowly, nothing is tokenized, no other router takes
over. A client sees a token one message's time after its node drew it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from operator import sub
from random import Random

from baton.bench.results.outcome import Outcome
from baton.bench.simulator.events import Timeline
from baton.bench.simulator.network import Network
from baton.bench.simulator.node import SimulatedNode, TokenTimes
from baton.bench.simulator.policies import Fetch, FetchingPlacer
from baton.bench.simulator.prompt import SimulatedPrompt
from baton.bench.workloads import WorkloadRequest
from baton.errors import BatonError
from baton.messages.node import LoadReport, NodeDescription, Role, StageTimings, StepReport, Submit
from baton.messages.sampling import SamplingParams
from baton.node.reports.reports import node_record
from baton.registry import NodeRecord
from router.admission.request import ValidRequest
from router.flight.active_request import ActiveRequest
from router.flight.answer import Answer
from router.flight.event_queue import EventQueue
from router.flight.fair_queue import FairQueue
from router.flight.flight_table import (
    AbortLeg,
    Delta,
    EmitTokens,
    Fail,
    Finish,
    FlightEffect,
    FlightEvent,
    GiveUp,
    LegEnded,
    NodeGone,
    Place,
    Placed,
    SubmitLeg,
)
from router.limits import DispatchLimits
from router.placement.placement import Candidates
from router.placement.placer import Placer
from router.placement.view import ClusterView
from router.waiting_room import WaitingRoom

MODEL = "simulated"
_NO_TIMINGS = StageTimings()


@dataclass(slots=True)
class Client:
    """Who waits for one request's tokens."""

    request: WorkloadRequest
    planned_s: float
    run: ActiveRequest
    times: list[float] = field(default_factory=list)
    """When its tokens came."""


@dataclass(slots=True)
class FirstTokenParts:
    """Where the time to first tokens went, in sums over requests. Seconds."""

    count: int = 0
    router_s: float = 0.0
    """Until nodes were found; with it what a client waited for a place, in a closed loop."""
    queue_s: float = 0.0
    """At the node, until its prompt's first chunk began."""
    prefill_s: float = 0.0
    messages_s: float = 0.0
    transfer_s: float = 0.0
    """Not in it: between first and second token."""

    def add(self, other: FirstTokenParts) -> None:
        """Those of another cluster, too."""
        for part in fields(self):
            setattr(self, part.name, getattr(self, part.name) + getattr(other, part.name))

    def means_ms(self) -> dict[str, float]:
        count = max(1, self.count)
        return {
            "router": self.router_s / count * 1e3,
            "queue": self.queue_s / count * 1e3,
            "prefill": self.prefill_s / count * 1e3,
            "messages": self.messages_s / count * 1e3,
        }


class SampledView(ClusterView):
    """Shows so many nodes of each role, drawn anew each time it is asked: the power of a few choices (Mitzenmacher,
    IEEE TPDS 2001), at a cost that does not grow with the cluster.
    """

    def __init__(self, choices: int, rng: Random) -> None:
        super().__init__()
        self._choices = choices
        self._rng = rng
        self._by_role: dict[Role, list[str]] = {}

    def attached(self, description: NodeDescription, now: float) -> None:
        super().attached(description, now)
        self._by_role.setdefault(description.role, []).append(description.incarnation)

    def detached(self, incarnation: str, reason: str, now: float) -> None:
        super().detached(incarnation, reason, now)
        for names in self._by_role.values():
            if incarnation in names:
                names.remove(incarnation)

    def candidates(self) -> Candidates:
        drawn = [self._rng.sample(names, min(self._choices, len(names))) for names in self._by_role.values()]
        nodes = [self._nodes[name] for names in drawn for name in names]
        return Candidates((one for node in nodes if (one := self._candidate(node))), None, None)


class SimulatedRouter:
    """Takes requests and hears of nodes, at once."""

    def __init__(
        self,
        timeline: Timeline,
        network: Network,
        placer: Placer,
        rng: Random,
        limits: DispatchLimits,
        block_size: int,
        message_s: float,
        choices: int | None,
        ended: Callable[[Outcome], None],
    ) -> None:
        self.num_retries = 0
        self.parts = FirstTokenParts()
        self.placer = placer
        self._timeline = timeline
        self._network = network
        self._rng = rng
        self._block_size = block_size
        self._message_s = message_s
        self._ended = ended
        self._view = ClusterView() if choices is None else SampledView(choices, rng)
        self._nodes: dict[str, SimulatedNode] = {}
        self._records: dict[str, NodeRecord] = {}
        self._clients: dict[str, Client] = {}
        self._params: dict[int, SamplingParams] = {}
        self._unread: tuple[Answer, EventQueue] | None = None
        """What a client would read; here nobody does, and one serves all."""
        self._room_came = False
        self._waiting = WaitingRoom(
            self._view,
            placer,
            timeline,
            rng,
            limits,
            place=self._place_again,
            give_up=lambda run, error: self._feed(self._client(run), GiveUp(error)),
        )

    @property
    def num_open(self) -> int:
        return len(self._clients)

    # Nodes.

    def attach(self, node: SimulatedNode) -> None:
        """A node is there."""
        description, now = node.description, self._timeline.now
        self._nodes[node.incarnation] = node
        self._records[node.incarnation] = node_record(description, now, 10.0)
        self._view.registered(self._records.values())
        self._view.attached(description, now)
        if self.placer.on_attached(description):
            update = node.watch_kv_cache()
            self.placer.on_report(node.incarnation, StepReport((), LoadReport(), update), now)
        self._serve()

    def lose(self, node: SimulatedNode) -> None:
        """A node is gone, and the router notices."""
        incarnation, now = node.incarnation, self._timeline.now
        del self._nodes[incarnation], self._records[incarnation]
        self._view.registered(self._records.values())
        self._view.detached(incarnation, "it is gone", now)
        self.placer.on_lost(incarnation, now)
        for client in list(self._clients.values()):
            self._feed(client, NodeGone(incarnation, "it is gone"))

    def heard(self, node: SimulatedNode, report: StepReport, times: TokenTimes) -> None:
        """A step of a node."""
        incarnation, now = node.incarnation, self._timeline.now
        if self.placer.on_report(incarnation, report, now):
            update = node.watch_kv_cache()
            self.placer.on_report(incarnation, StepReport((), report.load, update), now)
        for delta in report.deltas:
            drawn = times.pop((delta.attempt, delta.first_index), ())
            client = self._clients.get(delta.attempt.request_id)
            if client is None:
                continue
            if delta.outcome is None and client.run.flight.takes_next(incarnation, delta):
                self._emit(client, len(delta.token_ids), drawn)
            else:
                self._feed(client, Delta(incarnation, delta), drawn)
        self._view.reported(incarnation, report.load)
        if self._waiting and not self._view.is_full(incarnation):
            self._serve()

    # Requests.

    def arrive(self, request: WorkloadRequest, planned_s: float) -> None:
        """A request comes, now; its client waits since `planned_s`."""
        now = self._timeline.now
        request_id = f"r{request.index}"
        prompt = SimulatedPrompt(request.pieces, request.output_length, self._block_size, request_id)
        valid = ValidRequest(request_id, MODEL, prompt, self._params_for(request.output_length))
        if self._unread is None:
            self._unread = (Answer(None, valid), EventQueue(FairQueue()))
        run = ActiveRequest(valid, self._rng.getrandbits(64), *self._unread, now)
        client = self._clients[request_id] = Client(request, planned_s, run)
        self._perform(client, run.flight.start())

    def _params_for(self, output_length: int) -> SamplingParams:
        length = max(1, output_length)
        params = self._params.get(length)
        if params is None:
            params = self._params[length] = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
        return params

    def _client(self, run: ActiveRequest) -> Client:
        return self._clients[run.request.request_id]

    def _feed(self, client: Client, event: FlightEvent, drawn: Sequence[float] = ()) -> None:
        self._perform(client, client.run.flight.handle(event), drawn)
        if self._room_came and self._waiting:
            self._serve()

    def _serve(self) -> None:
        self._room_came = False
        self._waiting.serve()

    def _place_again(self, run: ActiveRequest, place: Place) -> None:
        client = self._client(run)
        self._perform(client, self._place(client, place))

    def _perform(self, client: Client, effects: Sequence[FlightEffect], drawn: Sequence[float] = ()) -> None:
        """Do what the flight says, in order. `drawn`: when the last ones of the tokens in it were drawn."""
        pending = deque(effects)
        while pending:
            match pending.popleft():
                case Place() as place:
                    pending.extend(self._place(client, place))
                case SubmitLeg(incarnation, submit):
                    self._view.dispatched(incarnation, submit.attempt, submit.num_sequences)
                    self._send(client, incarnation, submit)
                case AbortLeg(incarnation, abort):
                    node = self._nodes.get(incarnation)
                    if node is not None:
                        node.abort(abort.attempt)
                case LegEnded(incarnation, attempt):
                    self._view.released(incarnation, attempt)
                    self._room_came = True
                case EmitTokens(token_ids=tokens):
                    self._emit(client, len(tokens), drawn)
                case Finish() as finish:
                    self._finish(client, finish)
                case Fail(error):
                    self._end(client, error)
                case other:
                    raise AssertionError(f"nobody asked for {other}")

    def _place(self, client: Client, place: Place) -> Sequence[FlightEffect]:
        run = client.run
        choice = self._waiting.seat(run, place)
        if choice is None:
            return ()
        if isinstance(choice, GiveUp):
            return run.flight.handle(choice)
        self.num_retries += place.attempt > 1
        if run.placed_at is None:
            self._waiting.placed(run, self._timeline.now)
        return run.flight.handle(Placed(choice.placement))

    def _send(self, client: Client, incarnation: str, submit: Submit) -> None:
        """A leg gets to its node one message later; blocks that it wants from elsewhere get there first."""
        fetch = None
        if isinstance(self.placer, FetchingPlacer) and submit.kv_source is None:
            fetch = self.placer.take_fetch(submit.attempt.request_id)
        if fetch is None or fetch.sink != incarnation:
            self._timeline.call_at(
                self._timeline.now + self._message_s, lambda: self._submit(client, incarnation, submit)
            )
        else:
            self._fetch(client, fetch, submit)

    def _fetch(self, client: Client, fetch: Fetch, submit: Submit) -> None:
        node, prompt = self._nodes[fetch.sink], submit.prompt_token_ids
        assert isinstance(prompt, SimulatedPrompt)
        keys = prompt.block_keys[: fetch.num_tokens // self._block_size]

        def came() -> None:
            if keys and not node.is_gone:
                node.take_in(keys)
            self._submit(client, fetch.sink, submit)

        here = node.scheduler.kv_cache_manager.pool.keys
        missing = sum(key not in here for key in keys)
        flow = self._network.flow(fetch.source, fetch.sink, came)
        flow.add(missing * node.description.block_bytes)
        if flow.due is None:
            self._timeline.call_at(self._timeline.now, came)

    def _submit(self, client: Client, incarnation: str, submit: Submit) -> None:
        if client.run.flight.is_over or client.run.flight.key != submit.attempt:
            return
        node = self._nodes.get(incarnation)
        if node is None:
            self._feed(client, NodeGone(incarnation, "its stream is closed"))
        else:
            node.submit(submit)

    def _emit(self, client: Client, count: int, drawn: Sequence[float]) -> None:
        run, now = client.run, self._timeline.now
        message_s = self._message_s
        times = [time + message_s for time in (drawn if count == len(drawn) else drawn[-count:])]
        if len(times) < count:
            # Tokens that came by another leg earlier, and only now make sense.
            client.times += [now + message_s] * (count - len(times))
        client.times += times
        if run.first_token_at is None:
            run.first_token_at = client.times[0]

    def _finish(self, client: Client, finish: Finish) -> None:
        run, timings, parts = client.run, finish.timings, self.parts
        assert run.placed_at is not None
        parts.count += 1
        parts.router_s += run.placed_at - client.planned_s
        parts.queue_s += timings.queue_ms / 1e3
        parts.prefill_s += timings.prefill_ms / 1e3
        parts.messages_s += 2 * self._message_s
        parts.transfer_s += timings.transfer_ms / 1e3
        first = run.started if run.first_token_at is None else run.first_token_at
        self._waiting.ended(run, first)
        self._end(client, None, timings, finish.path.prefill_node, finish.path.decode_node)

    def _end(
        self,
        client: Client,
        error: BatonError | None,
        timings: StageTimings = _NO_TIMINGS,
        prefill: str = "",
        decode: str = "",
    ) -> None:
        run, times = client.run, client.times
        run.wanted = None
        self._waiting.leave(run)
        self._waiting.gone(run)
        self.placer.over(run.request.request_id)
        del self._clients[run.request.request_id]
        self._room_came = True
        now = self._timeline.now
        self._ended(
            Outcome(
                index=client.request.index,
                planned_s=client.planned_s,
                sent_s=run.started,
                first_token_s=times[0] if times else None,
                finished_s=times[-1] if times and error is None else now,
                input_length=client.request.input_length,
                output_length=len(times),
                gaps=list(map(sub, times[1:], times)),
                cached_tokens=timings.cached_tokens,
                attempts=run.flight.key.attempt,
                error=None if error is None else str(error) or type(error).__name__,
                prefill_node=prefill,
                decode_node=decode,
                queue_s=timings.queue_ms / 1e3,
                prefill_s=timings.prefill_ms / 1e3,
            )
        )
