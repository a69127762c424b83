"""The placer: chooses the nodes of each request, learns from the reports of nodes, and remembers why it chose.

It gathers the inputs of a decision: rates (`rates`), caches (`cache_view`), breakers (`breaker`), and the work that was
sent a moment ago and is in no report yet. The decision itself is made by `cost_model` or `placement`. No I/O, no clock,
no task: the live requests call it on the event loop.
"""

from __future__ import annotations

import enum
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Literal

from baton.errors import BatonError, NoCapacity
from baton.messages.kv_cache import KVFormat
from baton.messages.node import HeldPrefix, NodeDescription, Outcome, RequestDelta, Role, StageTimings, StepReport
from baton.messages.node_model import TRANSCRIBES, Capability
from baton.observe.metrics import Distribution, Figure
from router.admission.ledger import Standing
from router.admission.request import ValidRequest
from router.placement.breaker import FAILURES, PAIR_FAILURES, Breakers
from router.placement.cache_view import NOTHING_CACHED, CacheView, PromptKeys, key_scheme_of, prompt_keys_of
from router.placement.cost_model import (
    Held,
    NodeCosts,
    PlacementQuery,
    ServiceLevel,
    Way,
    alternative_ways,
    cheapest,
    newcomer_share,
    node_costs,
)
from router.placement.cost_table import CostTable, RowMask
from router.placement.decisions import Choice, Decision, DecisionLog, Explanation, MeasuredTimes, decision_of, regret_ms
from router.placement.encoders import LoadedEncoder, with_rows
from router.placement.fleet_rates import FleetRates, UsualRates
from router.placement.placement import (
    Candidate,
    Demand,
    Origin,
    Placement,
    choose,
    choose_in_turn,
    choose_move,
    demand_of,
    fitting_nodes,
    kv_bits_of,
    may_serve,
    why_alone,
    why_embedded,
)
from router.placement.placement import with_room as only_with_room
from router.placement.reasons import ADOPTED, MOVED, Reason

ALONE_TOKENS = 512
_ENCODES = frozenset((Capability.IMAGE, Capability.TRANSCRIBE))
_FIRST_TOKEN_MARGIN = 0.9
"""A first token is to be predicted within this share of the asked-for time."""
_JUDGE_EVERY_S = 0.05
"""At most one decision in so many seconds is judged, since that costs as much as a placement."""


class Policy(enum.Enum):
    """How nodes are chosen: by predicted cost, by load, or in turn."""

    COST = "cost"
    LEAST_LOADED = "least-loaded"
    ROUND_ROBIN = "round-robin"


@dataclass(frozen=True, slots=True)
class PlacementSettings:
    """The settings of placement."""

    policy: Policy = Policy.COST
    require_disaggregation: bool = False
    """Whether requests are served by pairs of nodes only."""
    alone_tokens: int | None = None
    """A decode node computes at most so many tokens of a prompt while there are prefill nodes (policy COST). None:
    `ALONE_TOKENS` for requests without a target of their time per token, else any number that keeps the target."""
    target: ServiceLevel = field(default_factory=ServiceLevel)
    """What ways are compared with for requests that name no service level; no request is refused for it."""
    pulls: Literal["auto", "always", "off"] = "auto"
    """Whether nodes pull what others have cached of a prompt: where that is quicker, always, or never (policy COST)."""
    across: bool = False
    """Whether nodes of other numerics are paired where no pair of equal ones can serve a request, and continue streams
    that no node of their own numerics can."""


@dataclass(slots=True)
class _Live:
    """The running attempt of a request."""

    attempt: int
    placement: Placement
    expected: Sequence[tuple[str, Sequence[bytes]]] = ()
    """The prefixes that nodes are expected to have soon, as (incarnation, `PromptKeys.milestones`)."""
    has_failed: bool = False
    """Whether a failure was counted against its node; once is enough, as all sequences end with the one that failed."""


class Placer:
    """Chooses nodes for one router. Its methods are called in the order of events. Seconds on the router's clock."""

    def __init__(
        self,
        settings: PlacementSettings | None = None,
        log: DecisionLog | None = None,
        prompt_keys: Callable[[ValidRequest], PromptKeys] = prompt_keys_of,
    ) -> None:
        self._settings = settings or PlacementSettings()
        self._prompt_keys = prompt_keys
        self.log = log if log is not None else DecisionLog()
        self._rates = FleetRates()
        self._caches = CacheView()
        self._nodes = Breakers[str](FAILURES)
        self._pairs = Breakers[tuple[str, str]](PAIR_FAILURES)
        self._attached: dict[str, NodeDescription] = {}
        """Attached nodes, by incarnation."""
        self._live: dict[str, _Live] = {}
        self._num_live_on: Counter[str] = Counter()
        """How many live requests are on each incarnation."""
        self._prompts: dict[str, PromptKeys] = {}
        self._pending: dict[str, dict[tuple[str, int], int]] = {}
        """Uncomputed tokens of attempts that a node has not acknowledged, by incarnation."""
        self._kv_formats: dict[str, KVFormat] = {}
        """The format of the KV of each node that was a candidate, by incarnation."""
        self._table = CostTable(self._costs)
        self._judged_at = -math.inf

    @property
    def _predicts(self) -> bool:
        return self._settings.policy is Policy.COST

    @property
    def target(self) -> ServiceLevel:
        """The targets of requests that name none."""
        return self._settings.target

    @property
    def may_cross(self) -> bool:
        """Whether nodes of other numerics may continue streams."""
        return self._settings.across

    def usual_rates(self, incarnation: str) -> UsualRates:
        """What nodes like this one usually need for a step."""
        return self._rates.usual(incarnation)

    # --- reports of nodes ---

    def on_attached(self, description: NodeDescription) -> bool:
        """A node is attached; returns whether it must be asked for its cache (WatchKVCache)."""
        incarnation = description.incarnation
        self._attached[incarnation] = description
        if description.role is not Role.ENCODE:
            self._rates.attach(description)
        # An encode node has no KV cache, but rows.
        has_keys = self._predicts and key_scheme_of(description) is not None
        if not (has_keys or description.can & _ENCODES):
            return False
        self._caches.watch(incarnation)
        return True

    def on_report(self, incarnation: str, report: StepReport, now: float) -> bool:
        """Take a node's report, before its tokens are processed; returns whether to ask for its cache again."""
        if report.step is not None and self._predicts:
            self._rates.add_step(incarnation, report.step, now)
        self._table.mark_stale(incarnation)
        pending = self._pending.get(incarnation)
        for delta in report.deltas:
            if pending:
                pending.pop((delta.attempt.request_id, delta.attempt.attempt), None)
            if delta.outcome is not None:
                self._note_leg_end(incarnation, delta, now)
        if report.kv_cache is not None and self._caches.updated(incarnation, report.kv_cache):
            self._caches.watch(incarnation)
            return True
        return False

    def on_lost(self, incarnation: str, now: float) -> None:
        """A node is lost."""
        node = self._attached.pop(incarnation, None)
        if node is not None and self._num_live_on[incarnation]:
            self._nodes.failed(node.node_id, now)
        self._caches.forget(incarnation)
        self._rates.forget(incarnation)
        self._pending.pop(incarnation, None)
        self._kv_formats.pop(incarnation, None)
        self._table.mark_stale(incarnation)

    def _note_leg_end(self, incarnation: str, delta: RequestDelta, now: float) -> None:
        live = self._live.get(delta.attempt.request_id)
        node = self._attached.get(incarnation)
        if live is None or node is None or live.attempt != delta.attempt.attempt:
            return
        prefill, decode = live.placement.prefill, live.placement.decode
        pair = (prefill.node_id, decode.node_id) if prefill is not None else None
        match delta.outcome:
            case Outcome.ERROR if pair is not None and delta.transfer_cause is not None:
                self._pairs.failed(pair, now)
            case Outcome.REFUSED | Outcome.ERROR:
                if not live.has_failed:
                    live.has_failed = True
                    self._nodes.failed(node.node_id, now)
            case Outcome.KV_LOST if pair is not None:
                self._pairs.failed(pair, now)
            case Outcome.HANDED_OFF:
                self._nodes.succeeded(node.node_id, now)
            case Outcome.STOP | Outcome.LENGTH:
                self._nodes.succeeded(node.node_id, now)
                if pair is not None and incarnation == decode.incarnation:
                    self._pairs.succeeded(pair, now)
        pulled = live.placement.held_prefix is not None and incarnation == live.placement.prompt_node.incarnation
        read = pair is not None and incarnation == decode.incarnation
        if delta.timings is not None and (read or pulled):
            self._rates.add_transfer(incarnation, delta.timings, now)

    # --- requests ---

    def choose(
        self,
        candidates: Sequence[Candidate],
        request: ValidRequest,
        exclude: Set[str],
        attempt: int,
        waited_s: float,
        now: float,
        *,
        with_room: bool = False,
        origin: Origin | None = None,
        encoders: Sequence[LoadedEncoder] = (),
    ) -> Choice:
        """Choose nodes for an attempt; `placed` is called if it goes there.

        `waited_s`: since the request arrived. `with_room`: full nodes are left out, unless all of their role are full.
        `origin`: where the stream began, if its client has tokens. `encoders`: the encode nodes that take work. All
        nodes of an attempt are of one version. Raises NoCapacity with the reason if there is no node, InvalidRequest if
        none is large enough.
        """

        def chosen(demand: Demand, exclude: Set[str]) -> Choice:
            if self._predicts:
                return self._cheapest(candidates, request, demand, exclude, attempt, waited_s, now, with_room)
            may_be_chosen = _may_be_chosen(candidates, demand, with_room)
            pick = choose if self._settings.policy is Policy.LEAST_LOADED else choose_in_turn
            placement = pick(may_be_chosen, demand, exclude, across=self._settings.across)
            return Choice(placement, request, attempt, origin=demand.origin)

        def checked(origin: Origin | None) -> Choice:
            demand = demand_of(request, origin)
            choice = chosen(demand, exclude)
            if not request.embeds:
                if exclude and choice.placement.prefill is None and self._settings.require_disaggregation:
                    # A node at which the request has failed is better than none of its role.
                    choice = chosen(demand, frozenset())
                self._check_kind(choice.placement)
            return choice

        try:
            choice = checked(origin)
        except NoCapacity:
            if origin is None or origin.widened is None:
                raise
            # No node with the bits that the stream has can go on with it.
            choice = checked(origin.widened)
        if request.contents:
            having = [(content.digest, self._caches.holders(content)) for content in request.contents]
            placed = with_rows(choice.placement, having, self._attached, self._num_live_on, encoders)
            choice = replace(choice, placement=placed)
        return choice

    def why_not_ready(self, candidates: Sequence[Candidate], model: str) -> str:
        """Why no request to this model could be served now, however small; empty if one could."""
        if not candidates:
            return "no node can serve"
        nodes = [candidate.node for candidate in may_serve(candidates, None) if candidate.node.model == model]
        can, across = frozenset[Capability]().union(*(node.can for node in nodes)), self._settings.across
        try:
            if Capability.TRANSCRIBE in can:
                self._check_kind(choose(candidates, Demand(model, 1, 1, needs=TRANSCRIBES), across=across))
            elif Capability.GENERATE in can or not can:
                self._check_kind(choose(candidates, Demand(model, 1, 1), across=across))
            else:
                # A model that gives vectors alone needs no decode node.
                choose(candidates, Demand(model, 1, 0, embeds=True, needs=frozenset()))
        except BatonError as error:
            return str(error)
        return ""

    def _check_kind(self, placement: Placement) -> None:
        if placement.prefill is None and self._settings.require_disaggregation:
            raise NoCapacity(f"{placement.reason.text}, and disaggregation is required")

    def placed(self, choice: Choice, now: float, standing: Standing | None = None) -> None:
        """The attempt is sent to the nodes of this choice. `standing`: that of its tenant, which is remembered."""
        request, placement = choice.request, choice.placement
        self._end_attempt(request.request_id)
        live = self._add_live(request.request_id, choice.attempt, placement)
        prefill, decode = placement.prefill, placement.decode
        for node in (prefill, decode):
            if node is not None:
                self._nodes.chosen(node.node_id, now)
        if prefill is not None:
            self._pairs.chosen((prefill.node_id, decode.node_id), now)
        if choice.way is not None:
            left = len(request.prompt_token_ids) - choice.way.terms.cached_tokens
            incarnation = (prefill or decode).incarnation
            self._pending.setdefault(incarnation, {})[request.request_id, choice.attempt] = left
            self._table.mark_stale(incarnation)
            live.expected = self._expect(request, placement)
        if self.log.is_recording:
            self.log.add(decision_of(choice, self._settings.policy.value, now, standing))

    def choose_move(
        self,
        candidates: Sequence[Candidate],
        request: ValidRequest,
        source: NodeDescription,
        origin: Origin | None,
        now: float,
        kv_bits: str = "",
    ) -> NodeDescription:
        """Choose the node to which a request's stream is moved from `source`. `origin`: where it began. `kv_bits`: see
        `Submit.kv_bits`, of its leg there.

        Raises NoCapacity with the reason if there is none.
        """
        bad = self._nodes.not_allowed(now)
        allowed = [c for c in candidates if c.node.node_id not in bad] if bad else candidates
        return choose_move(allowed, demand_of(request, origin), source, kv_bits=kv_bits)

    def moved(self, request: ValidRequest, attempt: int, placement: Placement, now: float) -> None:
        """The attempt has the request's stream, which was moved to its node."""
        self.adopted(request, attempt, placement, now, reason=MOVED)

    def adopted(
        self,
        request: ValidRequest,
        attempt: int,
        placement: Placement,
        now: float,
        reason: Reason = ADOPTED,
    ) -> None:
        """The attempt runs on these nodes already, for another router: its tokens are in their reports."""
        self._end_attempt(request.request_id)
        self._add_live(request.request_id, attempt, placement)
        choice = Choice(replace(placement, reason=reason), request, attempt)
        self.log.add(decision_of(choice, self._settings.policy.value, now))

    def end(self, request_id: str) -> None:
        """The request has ended, or no attempt of it runs any more. Idempotent."""
        self._end_attempt(request_id)
        self._prompts.pop(request_id, None)

    def note_times(self, request_id: str, timings: StageTimings, first_token_ms: float, now: float) -> None:
        """The request ended well; called before `end`."""
        live = self._live.get(request_id)
        decision = self.log.last(request_id, live.attempt) if live is not None else None
        if live is None or decision is None:
            return
        decision.measured = MeasuredTimes(timings, first_token_ms)
        if decision.query is None or now < self._judged_at + _JUDGE_EVERY_S:
            return
        self._judged_at = now
        self.log.add_regret(self._judge(decision, now)[1])

    def explain(self, request_id: str, now: float) -> Sequence[Explanation]:
        """Why a request was placed as it was, attempt by attempt; empty if it is unknown or too long ago."""
        return [self._explain(decision, now) for decision in self.log.decisions_of(request_id)]

    def open_breakers(self, now: float) -> frozenset[str]:
        """The breakers that are not closed: of nodes by name, of pairs by both names."""
        pairs = (f"{prefill}->{decode}" for prefill, decode in self._pairs.open_ones(now))
        return frozenset((*self._nodes.open_ones(now), *pairs))

    @property
    def is_idle(self) -> bool:
        """Whether nothing but decisions is kept of any request."""
        return not (self._live or self._prompts or any(self._pending.values()) or self._caches.num_expected)

    def figures(self, now: float) -> Iterable[Figure | Distribution]:
        """The metrics, for the metrics page."""
        yield from self.log.figures()
        text = "Breakers that are not closed."
        yield Figure("router_breakers_open", text, self._nodes.num_open(now), {"of": "node"})
        yield Figure("router_breakers_open", text, self._pairs.num_open(now), {"of": "pair"})
        yield Figure("router_cached_blocks", "Blocks of which nodes told, over all nodes.", self._caches.num_keys, {})

    # --- internals ---

    def _cheapest(
        self,
        candidates: Sequence[Candidate],
        request: ValidRequest,
        demand: Demand,
        exclude: Set[str],
        attempt: int,
        waited_s: float,
        now: float,
        with_room: bool,
    ) -> Choice:
        table = self._table
        table.set_candidates(candidates)
        able = table.fitting_rows(demand, exclude, with_room=with_room)
        if (able is not None and not able.any()) or not candidates:
            # This call raises NoCapacity or InvalidRequest with the reason.
            fitting_nodes(_may_be_chosen(candidates, demand, with_room), demand, exclude)
        table.refresh(able, now)
        query = self._query(able, request, demand, waited_s, now)
        way = table.cheapest(query, able)
        if way is not None and way.reason is None and not demand.embeds and self._settings.across:
            # There is no pair of equal numerics.
            query = replace(query, across=True)
            way = table.cheapest(query, able)
        if way is None:
            raise NoCapacity(f"no node that serves {demand.model} is up")
        reason = way.reason
        if reason is None:
            why = why_embedded if demand.embeds else why_alone
            fitting = fitting_nodes(_may_be_chosen(candidates, demand, with_room), demand, exclude)
            reason = why(candidates, *_by_role(fitting), exclude)
        held_prefix = None
        if way.terms.pulled_tokens and query.held is not None:
            held_prefix = HeldPrefix(query.held.node.as_peer, query.held.num_tokens)
        prefill, decode = way.prefill.node if way.prefill else None, way.decode.node
        kv_bits = kv_bits_of(prefill, decode) if prefill is not None else ""
        placement = Placement(prefill, decode, reason, held_prefix=held_prefix, kv_bits=kv_bits)
        return Choice(placement, request, attempt, query, way, demand.origin)

    def _query(
        self, able: RowMask, request: ValidRequest, demand: Demand, waited_s: float, now: float
    ) -> PlacementQuery:
        prompt = self._prompts.get(request.request_id)
        if prompt is None:
            prompt = self._prompts[request.request_id] = self._prompt_keys(request)
        costs, level = self._table.costs(able), _level(request, waited_s, self._settings.target)
        # A prompt is computed as a whole if its log-probabilities are wanted, or all of its hidden states.
        takes_all_rows = request.pooling is not None and request.pooling.takes_all_rows
        uses_cache = request.sampling_params.prompt_logprobs is None and not takes_all_rows
        cached = self._caches.cached_by_scheme(prompt, self._table.key_schemes) if uses_cache else NOTHING_CACHED
        return PlacementQuery(
            demand=demand,
            costs=costs,
            cached=cached.soon,
            held=self._held(cached.on_device, demand) if self._settings.pulls != "off" else None,
            level=level,
            alone_tokens=self._alone_tokens(level),
            now=now,
            may_stay=self._may_stay(demand, level),
            passed_over=self._passed_over(costs, now),
            pairs_passed_over=self._pairs.not_allowed(now),
        )

    def _kv_format(self, node: NodeDescription) -> KVFormat:
        """The format of a node's KV, which is made once for each incarnation."""
        known = self._kv_formats.get(node.incarnation)
        return known or self._kv_formats.setdefault(node.incarnation, KVFormat.of(node))

    def _held(self, cached: Mapping[str, int], demand: Demand) -> Held | None:
        """The node that has most of the prompt cached, the least loaded of several; None: no node has any of it."""
        if not cached:
            return None
        most = max(cached.values())
        having = [node for name, count in cached.items() if count == most and (node := self._attached.get(name))]
        # A decode node has only its answers' states, if the model has states: prefill nodes come first.
        node = min(having, key=lambda one: (one.role is Role.DECODE, self._num_live_on[one.incarnation]), default=None)
        if node is None or (
            demand.origin is not None and not demand.origin.is_mixed and demand.origin.bits != node.bits
        ):
            return None
        return Held(node, self._kv_format(node), most, always=self._settings.pulls == "always")

    def _alone_tokens(self, level: ServiceLevel) -> int:
        """How many tokens of a prompt a decode node may compute while there are prefill nodes."""
        if self._settings.require_disaggregation:
            return 0
        if self._settings.alone_tokens is not None:
            return self._settings.alone_tokens
        return ALONE_TOKENS if level.token_ms == math.inf else sys.maxsize

    def _may_stay(self, demand: Demand, level: ServiceLevel) -> bool:
        """Whether a prefill node may decode the request: not while nothing says which pace is too slow for its streams.

        Nor may one continue a stream that has begun, which may be that of a single node.
        """
        has_target = level.token_ms < math.inf and not self._settings.require_disaggregation
        return has_target and not demand.embeds and demand.origin is None

    def _costs(self, candidate: Candidate, now: float, prefills_only: bool) -> NodeCosts:
        incarnation = candidate.node.incarnation
        pending = self._pending.get(incarnation)
        rates, work = self._rates.steps_and_work(incarnation, now)
        return node_costs(
            candidate,
            sum(pending.values()) if pending else 0,
            rates,
            self._rates.ms_per_byte(incarnation, now),
            newcomer_share(now - candidate.attached_at),
            prefills_only=prefills_only,
            known_kv_format=self._kv_format(candidate.node),
            work=work,
        )

    def _passed_over(self, costs: Sequence[NodeCosts], now: float) -> Set[str]:
        bad = self._nodes.not_allowed(now)
        return {cost.node.incarnation for cost in costs if cost.node.node_id in bad} if bad else bad

    def _expect(self, request: ValidRequest, placement: Placement) -> Sequence[tuple[str, Sequence[bytes]]]:
        """Note that the prompt's first blocks will be on its nodes, so that similar prompts follow it."""
        # The keys are not kept: there may be thousands of requests, and few are placed again.
        prompt = self._prompts.pop(request.request_id, None)
        expected: list[tuple[str, Sequence[bytes]]] = []
        if prompt is None or len(self._attached) <= 2:
            return expected
        # What is cached under keys of its own is no use to other prompts' nodes.
        for node in (placement.prefill, placement.decode if not placement.kv_bits else None):
            fields = key_scheme_of(node) if node is not None else None
            if node is not None and fields is not None:
                milestones = prompt.milestones(fields)
                self._caches.expect(node.incarnation, milestones)
                expected.append((node.incarnation, milestones))
        return expected

    def _add_live(self, request_id: str, attempt: int, placement: Placement) -> _Live:
        live = self._live[request_id] = _Live(attempt, placement)
        self._num_live_on.update(_incarnations(placement))
        return live

    def _end_attempt(self, request_id: str) -> None:
        """Forget the running attempt of a request."""
        live = self._live.pop(request_id, None)
        if live is None:
            return
        for incarnation in _incarnations(live.placement):
            self._num_live_on[incarnation] -= 1
            if not self._num_live_on[incarnation]:
                del self._num_live_on[incarnation]
        for incarnation, keys in live.expected:
            self._caches.expect_no_more(incarnation, keys)
        for incarnation in _incarnations(live.placement):
            pending = self._pending.get(incarnation)
            if pending:
                pending.pop((request_id, live.attempt), None)
                self._table.mark_stale(incarnation)

    def _judge(self, decision: Decision, now: float) -> tuple[Way, float]:
        """The cheapest way in hindsight, and the regret. The decision must have a query and measured times."""
        assert decision.query is not None
        assert decision.way is not None
        assert decision.measured is not None
        query = replace(decision.query, costs=[self._with_present_rates(costs, now) for costs in decision.query.costs])
        best = cheapest(query)
        assert best is not None
        by_incarnation = {costs.node.incarnation: costs for costs in query.costs}
        decode, prefill = by_incarnation[decision.way.decode.node.incarnation], decision.way.prefill
        if prefill is None:
            taken = query.alone_terms(decode)
        else:
            taken = query.pair_terms(by_incarnation[prefill.node.incarnation], decode)
        return best, regret_ms(taken, decision.measured, best)

    def _with_present_rates(self, costs: NodeCosts, now: float) -> NodeCosts:
        """A node's costs at the load of then and the rates of now."""
        incarnation = costs.node.incarnation
        rates, ms_per_byte = self._rates.steps(incarnation, now), self._rates.ms_per_byte(incarnation, now)
        is_prefill = costs.node.role is Role.PREFILL
        return node_costs(
            costs.candidate, costs.pending_tokens, rates, ms_per_byte, prefills_only=is_prefill, work=costs.work
        )

    def _explain(self, decision: Decision, now: float) -> Explanation:
        if decision.query is None or decision.way is None:
            return Explanation(decision)
        ways = alternative_ways(decision.query, decision.way)
        if decision.measured is None:
            return Explanation(decision, ways)
        best, regret = self._judge(decision, now)
        return Explanation(decision, ways, best.terms, regret)


def _may_be_chosen(candidates: Sequence[Candidate], demand: Demand, with_room: bool) -> Sequence[Candidate]:
    """The nodes of versions that may serve the request; with room, unless all of a role are full."""
    candidates = may_serve(candidates, demand.origin)
    return only_with_room(candidates) if with_room else candidates


def _by_role(candidates: Sequence[Candidate]) -> tuple[list[Candidate], list[Candidate]]:
    """The prefill nodes and the decode nodes."""
    return (
        [candidate for candidate in candidates if candidate.node.role is Role.PREFILL],
        [candidate for candidate in candidates if candidate.node.role is Role.DECODE],
    )


def _incarnations(placement: Placement) -> tuple[str, ...]:
    prefill, decode = placement.prefill, placement.decode
    return (decode.incarnation,) if prefill is None else (prefill.incarnation, decode.incarnation)


def _level(request: ValidRequest, waited_s: float, target: ServiceLevel) -> ServiceLevel:
    """The times with which ways are compared."""
    level = target.of(request)
    return ServiceLevel(level.first_token_ms * _FIRST_TOKEN_MARGIN - waited_s * 1e3, level.token_ms)
