"""A router in virtual time: the real one except for clients' streams and links to nodes.

Clients read at once, nothing is tokenized, and no other router takes over. A client receives a token one message
latency after its node drew it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from operator import sub
from random import Random

from baton.bench.results.outcome import Outcome
from baton.bench.simulator.config import SimulationConfig
from baton.bench.simulator.encoders import EncodeNode, images_of
from baton.bench.simulator.events import Timeline
from baton.bench.simulator.handoff import Network
from baton.bench.simulator.node import SimulatedNode, TokenTimes
from baton.bench.simulator.policies import Fetch, SimulatedPlacer
from baton.bench.simulator.prompt import SimulatedPrompt
from baton.bench.workloads.workload import WorkloadRequest
from baton.errors import BatonError
from baton.messages.generation import Chunk, GenerateEvent
from baton.messages.ids import AttemptKey, scoped
from baton.messages.node import (
    Abort,
    Leg,
    MoveOut,
    NodeDescription,
    Role,
    RouterMessage,
    StageTimings,
    StepReport,
    Submit,
    WatchKVCache,
)
from baton.messages.sampling import SamplingParams
from baton.node.reports.reports import node_record
from baton.registry import NodeRecord
from router.admission.limits import DispatchLimits
from router.admission.request import ValidRequest
from router.admission.service_class import ServiceClass
from router.flight.active_request import ActiveRequest, ClientCall
from router.flight.answer import Answer
from router.flight.event_queue import EventQueue, FairQueue
from router.flight.flight_table import AttemptCause
from router.live_requests import LiveRequests
from router.placement.placement import Candidates
from router.placement.room import RoomRules
from router.placement.view import ClusterView
from router.stream_moves import StreamMoves

MODEL = "simulated"
_NO_TIMINGS = StageTimings()


@dataclass(slots=True)
class FirstTokenParts:
    """The parts of the time to first token, as sums over requests, in seconds."""

    count: int = 0
    router_s: float = 0.0
    """Time until nodes were chosen, and in a closed loop the time that a client waited for its turn."""
    queue_s: float = 0.0
    """Time on the node until the first chunk of the prompt started."""
    prefill_s: float = 0.0
    messages_s: float = 0.0
    transfer_s: float = 0.0
    """Time of the hand-off, which is not part of it: it lies between the first and the second token."""

    def add(self, other: FirstTokenParts) -> None:
        """Adds the sums of another cluster."""
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
    """Shows a few random nodes of each role, drawn anew for each decision.

    This is the power of a few choices (Mitzenmacher, IEEE TPDS 2001); its cost does not grow with the cluster.
    """

    def __init__(self, choices: int, rng: Random, rules: RoomRules) -> None:
        super().__init__(rules=rules)
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
        return Candidates((candidate for node in nodes if (candidate := node.candidate(self._rules))), None, None)


class SimulatedClient(EventQueue):
    """The client of one request: it reads every event as soon as the router puts it."""

    __slots__ = ("_ended", "_read", "is_over", "planned_s", "request", "request_id", "times")

    def __init__(
        self,
        request: WorkloadRequest,
        request_id: str,
        planned_s: float,
        turns: FairQueue,
        read: Callable[[SimulatedClient, Chunk], None],
        ended: Callable[[SimulatedClient, BatonError | None], None],
    ) -> None:
        super().__init__(turns)
        self.request = request
        self.request_id = request_id
        self.planned_s = planned_s
        self.times: list[float] = []
        """When its tokens arrived, in seconds."""
        self.is_over = False
        self._read = read
        self._ended = ended

    def put(self, event: GenerateEvent) -> None:
        if isinstance(event, Chunk):
            self._read(self, event)

    def end(self, error: BatonError | None = None) -> None:
        if type(error) is BatonError:
            # A bug in the router, which a real client would see as a failed request.
            raise error
        if not self.is_over:
            self.is_over = True
            self._ended(self, error)


class SimulatedRouter:
    """Sends simulated requests to simulated nodes, with the decisions of a real router."""

    def __init__(
        self,
        timeline: Timeline,
        network: Network,
        placer: SimulatedPlacer,
        rng: Random,
        config: SimulationConfig,
        ended: Callable[[Outcome], None],
    ) -> None:
        self.num_open = 0
        """Requests that have not ended."""
        self.parts = FirstTokenParts()
        self._timeline = timeline
        self._network = network
        self._block_size = config.sizes.block_size
        self._message_s = config.message_s
        self._ended = ended
        self._placer = placer
        rules, choices = RoomRules(config.kv_room, config.steps_ahead), config.choices
        self.view = ClusterView(rules=rules) if choices is None else SampledView(choices, rng, rules)
        self._nodes: dict[str, SimulatedNode] = {}
        self._encoders: dict[str, EncodeNode] = {}
        self._records: dict[str, NodeRecord] = {}
        self._images = partial(images_of, share=config.image_share, seed=config.seed)
        self._params: dict[int, SamplingParams] = {}
        self._turns = FairQueue()
        self._drawn: TokenTimes = {}
        """When the tokens of the report that is being read were drawn."""
        limits = config.limits or DispatchLimits(queue_wait_s=1e9, capacity_wait_s=1e9, max_queue=1 << 30)
        self._tenants = {tenant.name: tenant for tenant in config.tenants}
        self.requests = LiveRequests(self.view, self, timeline, rng, limits, placer=placer)
        self._moves = StreamMoves(self.requests, self.view, timeline)

    @property
    def num_retries(self) -> int:
        """The number of attempts that were not a request's first one."""
        attempts = self.requests.counters.attempts
        return attempts.total() - attempts[AttemptCause.FIRST]

    # Nodes.

    def attach(self, node: SimulatedNode) -> None:
        """A node has started, and the router is attached to it."""
        description = node.description
        self._nodes[node.incarnation] = node
        self._records[node.incarnation] = node_record(description, self._timeline.now, 10.0)
        self.view.registered(self._records.values())
        self.requests.on_attached(description)

    def attach_encoder(self, node: EncodeNode) -> None:
        """An encode node has started, and the router is attached to it."""
        self._encoders[node.incarnation] = node
        self._records[node.incarnation] = node_record(node.description, self._timeline.now, 10.0)
        self.view.registered(self._records.values())
        self.requests.on_attached(node.description)

    def lose(self, node: SimulatedNode) -> None:
        """The router notices that a node has died."""
        del self._nodes[node.incarnation], self._records[node.incarnation]
        self.view.registered(self._records.values())
        self.requests.on_lost(node.incarnation, "the node has died")

    def report(self, node: SimulatedNode, report: StepReport, times: TokenTimes) -> None:
        """A node reports a step. `times`, which is emptied: when the tokens in it were drawn."""
        self._drawn = times
        self.requests.on_report(node.incarnation, report)
        times.clear()

    def send(self, incarnation: str, message: RouterMessage) -> bool:
        """Send a message to a node: a submit arrives after `message_s`, any other message at once."""
        node = self._nodes.get(incarnation)
        if node is None:
            return False
        match message:
            case Submit():
                self._send(incarnation, message)
            case Abort(attempt):
                node.abort(attempt)
            case MoveOut():
                node.move_out(message)
            case WatchKVCache():
                report = StepReport((), node.load(), node.watch_kv_cache())
                self.requests.placer.on_report(incarnation, report, self._timeline.now)
            case other:
                raise AssertionError(f"a simulated node does not understand {other}")
        return True

    def _send(self, incarnation: str, submit: Submit) -> None:
        """Delivers a leg to its node one message latency later, or after the blocks that it fetches have arrived."""
        fetch = self._placer.pop_fetch(submit.attempt.request_id) if submit.kv_source is None else None
        if submit.held_prefix is not None:
            # A pull, which here begins when the router sends the leg, and not when it is the request's turn.
            fetch = Fetch(submit.held_prefix.peer.incarnation, incarnation, submit.held_prefix.num_tokens)
        if fetch is None or fetch.sink != incarnation:
            self._timeline.call_at(self._timeline.now + self._message_s, lambda: self._submit(incarnation, submit))
        else:
            self._fetch(fetch, submit)

    def _fetch(self, fetch: Fetch, submit: Submit) -> None:
        node, prompt = self._nodes[fetch.sink], submit.spec.prompt_token_ids
        assert isinstance(prompt, SimulatedPrompt)
        keys = prompt.block_keys[: fetch.num_tokens // self._block_size]

        def on_fetched() -> None:
            if keys and not node.is_gone:
                node.cache_fetched_blocks(keys)
            self._submit(fetch.sink, submit)

        cached = node.scheduler.kv_cache_manager.pool.keys
        missing = sum(key not in cached for key in keys)
        flow = self._network.flow(fetch.source, fetch.sink, on_fetched)
        flow.add(missing * node.description.block_bytes)
        if flow.due is None:
            self._timeline.call_at(self._timeline.now, on_fetched)

    def _submit(self, incarnation: str, submit: Submit) -> None:
        """A submit arrives; a leg that computes the prompt waits for rows that encode nodes make."""
        contents = submit.spec.contents if submit.leg is not Leg.DECODE else ()
        makers = [self._encoders[content.encoded_by.incarnation] for content in contents if content.encoded_by]
        if not makers:
            self._deliver(incarnation, submit)
        for maker in makers[:1]:  # a request has one image at most
            maker.encode(lambda: self._fetch_rows(incarnation, submit))

    def _fetch_rows(self, incarnation: str, submit: Submit) -> None:
        at = self._timeline.now + self._network.latency_s
        self._timeline.call_at(at, lambda: self._deliver(incarnation, submit))

    def _deliver(self, incarnation: str, submit: Submit) -> None:
        """A leg begins; one that was aborted meanwhile is dropped."""
        run, node = self.requests.find(submit.attempt.request_id), self._nodes.get(incarnation)
        if node is None or run is None or run.flight.is_over:
            return
        if submit.attempt in (run.flight.key, run.flight.moving_to):
            node.submit(submit)

    def move_streams(self) -> None:
        """Lets streams begin to leave nodes that are to be empty, and one that is full."""
        for incarnation in (*sorted(self.view.leaving()), self.view.crowded()):
            if incarnation in self._nodes:
                self._nodes[incarnation].report_progress()
        self._moves.look()

    # Requests.

    def arrive(self, request: WorkloadRequest, planned_s: float) -> None:
        """A request arrives now; its client has waited since `planned_s`."""
        request_id = scoped(request.tenant, f"r{request.index}")
        prompt = SimulatedPrompt(request.pieces, request.output_length, self._block_size, request_id)
        valid = ValidRequest(
            prompt,
            self._params_for(request.output_length),
            contents=self._images(request.index),
            request_id=request_id,
            model=MODEL,
        )
        client = SimulatedClient(request, request_id, planned_s, self._turns, self._read, self._end)
        self.num_open += 1
        self.requests.start(self.requests.open(valid, Answer(None, valid), client, self._call_of(request.tenant)))

    def _call_of(self, tenant: str) -> ClientCall:
        """The call of a client of this tenant, with what an API key says of the tenant."""
        load, now = self._tenants.get(tenant), self._timeline.now
        if load is None:
            return ClientCall(now)
        return ClientCall(now, service_class=ServiceClass[load.service_class.upper()], weight=load.weight)

    def _params_for(self, output_length: int) -> SamplingParams:
        length = max(1, output_length)
        params = self._params.get(length)
        if params is None:
            params = self._params[length] = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
        return params

    def _run_of(self, client: SimulatedClient) -> ActiveRequest:
        run = self.requests.find(client.request_id)
        assert run is not None
        return run

    def _read(self, client: SimulatedClient, chunk: Chunk) -> None:
        run, now, message_s = self._run_of(client), self._timeline.now, self._message_s
        drawn, count = self._pop_drawn(run.flight.key, chunk.first_index), len(chunk.token_ids)
        times = [time + message_s for time in (drawn if count == len(drawn) else drawn[-count:])]
        if len(times) < count:
            # These tokens were reported by another leg earlier, and are delivered only now.
            client.times += [now + message_s] * (count - len(times))
        client.times += times

    def _pop_drawn(self, attempt: AttemptKey, first_index: int) -> Sequence[float]:
        """When the tokens from `first_index` on were drawn, or the tokens of the report that they are part of."""
        drawn = self._drawn.pop((attempt, first_index), None)
        if drawn is not None:
            return drawn
        other = next((key for key in self._drawn if key[0] == attempt), None)
        return () if other is None else self._drawn.pop(other)

    def _end(self, client: SimulatedClient, error: BatonError | None) -> None:
        """A request ended. It is closed when the router is done with the event that ended it."""
        self.num_open -= 1
        ended_at = self._timeline.now
        self._timeline.call_soon(lambda: self._close(client, error, ended_at), "simulated-client")

    def _close(self, client: SimulatedClient, error: BatonError | None, ended_at: float) -> None:
        run, times, timings, prefill, decode = self._run_of(client), client.times, _NO_TIMINGS, "", ""
        if run.finish is not None:
            finish, _ = run.finish
            timings, prefill, decode = finish.timings, finish.path.prefill_node, finish.path.decode_node
            self._count_parts(client, run, timings)
        self.requests.close(run)
        self._ended(
            Outcome(
                index=client.request.index,
                planned_s=client.planned_s,
                sent_s=run.started,
                first_token_s=times[0] if times else None,
                finished_s=times[-1] if times and error is None else ended_at,
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

    def _count_parts(self, client: SimulatedClient, run: ActiveRequest, timings: StageTimings) -> None:
        assert run.placed_at is not None
        parts = self.parts
        parts.count += 1
        parts.router_s += run.placed_at - client.planned_s
        parts.queue_s += timings.queue_ms / 1e3
        parts.prefill_s += timings.prefill_ms / 1e3
        parts.messages_s += 2 * self._message_s
        parts.transfer_s += timings.transfer_ms / 1e3
