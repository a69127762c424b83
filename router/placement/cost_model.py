"""Predicts what a request costs on each pair of nodes, or on one node alone, and finds the cheapest way. Pure.

A *way* is a pair of nodes or a node alone. All costs are in milliseconds. On a pair a request costs

    queue      the work that the prefill node has to do first, and the rest of the step that it is in
  + prefill    computing the prompt tokens that the prefill node has not cached, in as many steps as they take, after it
               has pulled those that another node has cached, where that is quicker than to compute them
  + handoff    moving the bytes that are left when the prompt is computed: the decode node's cached blocks never move,
               and the others have moved while the prompt was computed, except for those of the last chunk
  + decode     computing the output, at the decode node's time per token with one more sequence in its batch: the time
               of a step, divided by the tokens that a sequence gets from it (more than one where drafts are right)
  + stall      the time that other requests lose: a share of the time for which the prompt keeps its node busy

and on one node alone the same without a hand-off and with a larger stall: every prompt token lengthens a decode step
for all streams of that node.

The way wins that is predicted to miss the fewest targets of the service level, the cheapest of several. There are the
time to the first token, the time per token of the request, and that of the streams beside which its prompt is computed:
prompts take a share of the node's time, which leaves less to its streams (`NodeCosts.pace_ms`). Among ways that cost
about the same the one wins whose nodes were unused for longest.

A prefill node decodes what its prompt began (it *stays*) while no decode node has room for another stream, or all of
them are close to the target and it would be quicker there.

A pair is found in two steps, first the prefill node and then the decode node for it, since nothing but the hand-off
depends on both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial

from baton.messages.kv_cache import KVFormat
from baton.messages.node import NodeDescription, Role
from baton.messages.operator import PlacementWay
from baton.values import value
from router.admission.request import ValidRequest
from router.placement.fleet_rates import NO_WORK, MixedWork, decay, stream_ms
from router.placement.placement import Candidate, Demand, takes_no_stream
from router.placement.rates import StepRates
from router.placement.reasons import ACROSS_NUMERICS, CHEAPER_ALONE, CHEAPEST_PAIR, STAYS, Reason
from router.placement.room import Lack

HANDOFF_MS = 2.0
"""The cost of a hand-off beside its bytes: a subscription, a confirmation, and the step that the request joins."""
PULL_MS = 4.0
"""The cost of a pull beside its bytes: the question, a confirmation, and the time until the next step begins."""
_DEFAULT_CHUNK = 512
_OUTPUT_TOKENS = 128
"""The longest output that is assumed: few outputs are as long as they may be."""
WORK_SHARE = 0.25
"""The share of a prompt's computing time that other requests are assumed to lose by it. So of two ways that are as
quick, the one with less work wins: it leaves more to the others and caches fewer copies of the same blocks."""
_NEWCOMER_S = 5.0
"""A new node's share of the load grows to its full size in so many seconds."""
_LEAST_SHARE = 0.1
_SHARES = 20
"""The share grows in so many steps, between which its costs stay the same and can be kept by many decisions."""
_CLOSE = 0.8
"""From this share of the target on, the time per token of streams on decode nodes is close to it."""
LEAST_LEFT = 0.02
"""The least share of a node's time that prompts are assumed to leave to its streams."""
SAME_MS = 0.25
SAME_SHARE = 0.02
"""Costs that differ by less than the sum of both count as the same."""


@value(frozen=True, slots=True)
class ServiceLevel:
    """The latency targets of a request, in milliseconds from now."""

    first_token_ms: float = math.inf
    token_ms: float = math.inf

    def of(self, request: ValidRequest) -> ServiceLevel:
        """The targets of a request: those that its client named, and these for the others."""
        first = self.first_token_ms if request.ttft_slo_ms is None else request.ttft_slo_ms
        return ServiceLevel(first, self.token_ms if request.tpot_slo_ms is None else request.tpot_slo_ms)


@dataclass(slots=True)
class NodeCosts:
    """The cost terms of one more request on a node. Treat it as frozen; like `Candidate` it is not, for speed."""

    candidate: Candidate
    node: NodeDescription
    queue_ms: float
    step_ms: float
    """The duration of a step without the prompt tokens in it."""
    token_ms: float
    """The time that each prompt token adds to a step."""
    chunk: int
    """The most prompt tokens of one step."""
    streams: float
    """Number of decoding sequences, which every longer step delays."""
    decode_ms: float
    """The time per output token with one more sequence: a step's duration divided by `tokens_per_step`."""
    ms_per_byte: float
    """The time per byte of KV that the node reads from another one."""
    kv_token_ms: float
    """The time for the KV of one token that the node reads from another one."""
    kv_format: KVFormat
    """The format that another node's must fit to exchange KV with it."""
    pending_tokens: int = 0
    """Tokens of prompts that were sent to the node and are not in its reports yet."""
    share: float = 1.0
    """The share of the load that the node gets, 1 being a full share; see `newcomer_share`."""
    tokens_per_step: float = 1.0
    """The tokens that a sequence gets from a step."""
    work: MixedWork = NO_WORK
    """What the node has reported of the prompts that it computes beside its streams."""
    waiting_ms: float = 0.0
    """The time that the prompts take that it has still to compute."""
    stream_ms: float = 1.0
    """The duration of a usual stream without any prompts in its steps."""

    def pace_ms(self, more_ms: float, now: float) -> float:
        """The time per output token of the streams here if prompts take so much more of the node's time.

        Steps with prompts are longer. What matters to a stream is the share of prompts in all the time that it lasts.
        """
        worked_ms = self.work.prompt_ms * decay((now - self.work.at) * 1e3, self.stream_ms)
        share = (worked_ms + self.waiting_ms + more_ms) / self.stream_ms
        return self.decode_ms / max(LEAST_LEFT, 1.0 - share)

    def prefill_ms(self, tokens: int, pulled: int = 0) -> float:
        """The time to compute so many tokens of a prompt, once it is its turn, and to pull so many before that."""
        compute_ms = -(-tokens // self.chunk) * self.step_ms + tokens * self.token_ms
        return compute_ms + PULL_MS + pulled * self.kv_token_ms if pulled else compute_ms


def node_costs(
    candidate: Candidate,
    pending_tokens: int,
    rates: StepRates,
    ms_per_byte: float,
    share: float = 1.0,
    *,
    prefills_only: bool = False,
    known_kv_format: KVFormat | None = None,
    work: MixedWork = NO_WORK,
) -> NodeCosts:
    """Compute the cost terms of a node.

    `pending_tokens`: of prompts that were sent there and are not in its reports yet. `share`: see `newcomer_share`.
    `prefills_only`: its sequences are prompts, which longer steps do not delay, except for those that decoded in its
    last step. `known_kv_format`: the format of the node's KV, if the caller has it. `work`: what it has reported.
    """
    if prefills_only:
        streams = min(candidate.load, float(work.sequences)) / share
        context = work.context_tokens / share if streams else 0.0
    else:
        streams, context = candidate.load / share, candidate.context_tokens / share
    node = candidate.node
    chunk = chunk_of(node)
    step_ms = rates.overhead_ms(streams, context)
    queued = (candidate.uncomputed_tokens + pending_tokens) / share
    # With nothing queued, the node may still be in the middle of a step.
    queue_ms = (
        math.ceil(queued / chunk) * step_ms + queued * rates.token_ms if queued else step_ms / 2 * (candidate.load > 0)
    )
    # Positional, as this is made for many nodes in every choice.
    return NodeCosts(
        candidate,
        node,
        queue_ms,
        step_ms,
        rates.token_ms,
        chunk,
        streams,
        (step_ms + rates.sequence_ms * rates.rows) / rates.tokens,
        ms_per_byte,
        ms_per_byte * node.block_bytes / node.block_size,
        known_kv_format or KVFormat.of(node),
        pending_tokens,
        share,
        rates.tokens,
        work,
        queued * rates.token_ms,
        stream_ms(step_ms, rates),
    )


def chunk_of(node: NodeDescription) -> int:
    """The most prompt tokens of one step of a node."""
    return node.max_num_batched_tokens or _DEFAULT_CHUNK


def newcomer_share(age_s: float) -> float:
    """The share that a node gets so many seconds after it was attached: its caches are cold, its rates unknown."""
    return 1.0 if age_s >= _NEWCOMER_S else max(_LEAST_SHARE, int(age_s / _NEWCOMER_S * _SHARES) / _SHARES)


def share_grows_at(attached_at: float, now: float) -> float:
    """When the share of a node that was attached at `attached_at` grows next."""
    return attached_at + (int((now - attached_at) / _NEWCOMER_S * _SHARES) + 1) * _NEWCOMER_S / _SHARES


@value(frozen=True, slots=True)
class Held:
    """The node that has most of a prompt cached, from which others may pull it."""

    node: NodeDescription
    kv_format: KVFormat
    """The format of the node's KV: nodes with the same one may pull."""
    num_tokens: int
    """How many of the prompt's first tokens it has."""
    always: bool = False
    """Whether it is pulled even where that is not quicker."""


@value(frozen=True, slots=True)
class PlacementQuery:
    """A request, and everything that is known when its nodes are chosen."""

    demand: Demand
    costs: Sequence[NodeCosts]
    """The costs of the nodes on which the request fits."""
    cached: Mapping[str, int]
    """How many of the prompt's first tokens each incarnation has cached."""
    level: ServiceLevel
    alone_tokens: int
    """A decode node computes at most so many tokens of a prompt while there is a pair."""
    now: float = 0.0
    """Seconds on the router's clock."""
    held: Held | None = None
    """Which node may be pulled from; None: none has anything of the prompt."""
    may_stay: bool = False
    """Whether a prefill node may decode, while no decode node has room for another stream."""
    passed_over: Set[str] = frozenset()
    """Incarnations that are chosen only if no other node of their role is left."""
    pairs_passed_over: Set[tuple[str, str]] = frozenset()
    """Pairs that are passed over, by the names of prefill and decode node."""
    across: bool = False
    """Whether pairs may be of other numerics, since there is none of equal ones. The decode node then finds nothing of
    the prompt in its cache: what it has of others' is under keys of its own."""

    def pair_terms(self, prefill: NodeCosts, decode: NodeCosts) -> PlacementWay:
        """The cost of a pair."""
        tokens = self.demand.num_prompt_tokens
        there, pulled = self._cached(prefill), self.pulled(prefill)
        here = 0 if self.across else self._cached(decode, at_most=tokens)
        left = tokens - there - pulled
        prefill_ms = prefill.prefill_ms(left, pulled)
        handoff_ms = _handoff_ms(decode, tokens - here, min(left, prefill.chunk), prefill_ms)
        decode_ms = self.output_tokens * decode.decode_ms
        stall_ms = WORK_SHARE * prefill_ms + prefill.streams * prefill.token_ms * left
        return PlacementWay(
            prefill_node=prefill.node.node_id,
            decode_node=decode.node.node_id,
            queue_ms=prefill.queue_ms,
            cached_tokens=there,
            prefill_ms=prefill_ms,
            decode_cached_tokens=here,
            handoff_ms=handoff_ms,
            decode_ms=decode_ms,
            stall_ms=stall_ms,
            token_ms=decode.decode_ms,
            total_ms=prefill.queue_ms + prefill_ms + handoff_ms + decode_ms + stall_ms,
            tokens_per_step=decode.tokens_per_step,
            pulled_tokens=pulled,
        )

    def alone_terms(self, node: NodeCosts) -> PlacementWay:
        """The cost of one node that does it all."""
        there, pulled = self._cached(node), self.pulled(node)
        left = self.demand.num_prompt_tokens - there - pulled
        prefill_ms = node.prefill_ms(left, pulled)
        decode_ms = self.output_tokens * node.decode_ms
        stall_ms = WORK_SHARE * prefill_ms + node.streams * node.token_ms * left
        return PlacementWay(
            prefill_node="",
            decode_node=node.node.node_id,
            queue_ms=node.queue_ms,
            cached_tokens=there,
            prefill_ms=prefill_ms,
            decode_cached_tokens=there,
            handoff_ms=0.0,
            decode_ms=decode_ms,
            stall_ms=stall_ms,
            token_ms=node.decode_ms,
            total_ms=node.queue_ms + prefill_ms + decode_ms + stall_ms,
            tokens_per_step=node.tokens_per_step,
            pulled_tokens=pulled,
        )

    def uncached(self, node: NodeCosts) -> int:
        """How many tokens of the prompt the node would compute."""
        return self.demand.num_prompt_tokens - self._cached(node) - self.pulled(node)

    def pulled(self, node: NodeCosts) -> int:
        """How many tokens of the prompt the node would pull, if that is quicker than to compute them."""
        held = self.held
        if held is None or node.kv_format != held.kv_format:
            return 0
        more = min(held.num_tokens, self.demand.num_prompt_tokens - 1) - self._cached(node)
        pays = held.always or more * (node.token_ms - node.kv_token_ms) > PULL_MS
        return more if more > 0 and pays else 0

    def missed(self, prefill: NodeCosts | None, decode: NodeCosts, first_token_ms: float) -> int:
        """How many targets a way misses: the two of the request, and that of the streams beside which its prompt is
        computed. A stream that joins others hardly slows them.
        """
        level, late = self.level, first_token_ms > self.level.first_token_ms
        if level.token_ms == math.inf:
            return int(late)
        if prefill is None:
            return late + 2 * (decode.pace_ms(self.uncached(decode) * decode.token_ms, self.now) > level.token_ms)
        slow, more_ms = decode.pace_ms(0.0, self.now) > level.token_ms, self.uncached(prefill) * prefill.token_ms
        return late + slow + (prefill.streams > 0.0 and prefill.pace_ms(more_ms, self.now) > level.token_ms)

    @property
    def output_tokens(self) -> int:
        return 0 if self.demand.embeds else min(self.demand.max_tokens, _OUTPUT_TOKENS)

    def _cached(self, node: NodeCosts, at_most: int | None = None) -> int:
        """How many tokens are cached there. A prompt's last token is always computed: it gives the first output."""
        most = self.demand.num_prompt_tokens - 1 if at_most is None else at_most
        return min(self.cached.get(node.node.incarnation, 0), most)


def _handoff_ms(decode: NodeCosts, tokens: int, last_chunk: int, prefill_ms: float) -> float:
    """The time that moving the KV of so many tokens takes beyond the computing of the prompt."""
    in_all, at_least = tokens * decode.kv_token_ms, min(tokens, last_chunk) * decode.kv_token_ms
    return HANDOFF_MS + max(at_least, in_all - prefill_ms)


@value(frozen=True, slots=True)
class Way:
    """A way to serve a request, with its cost."""

    prefill: NodeCosts | None
    decode: NodeCosts
    terms: PlacementWay
    reason: Reason | None
    """None if there was no pair to compare with."""

    def key(self, query: PlacementQuery) -> tuple[int, float]:
        """The key by which ways are compared: which targets are missed, then the cost."""
        return query.missed(self.prefill, self.decode, self.terms.first_token_ms), self.terms.total_ms


def is_close(query: PlacementQuery, pair: Way) -> bool:
    """Whether a stream on the decode node of this pair would be nearly as slow as its target."""
    return pair.decode.pace_ms(0.0, query.now) > _CLOSE * query.level.token_ms


def is_quicker(query: PlacementQuery, stay: Way, pair: Way) -> bool:
    """Whether a stream would better stay on the prefill node of `stay` than go to the decode node of `pair`.

    It would if that one has no room for it, or if it misses no target here and is the quicker.
    """
    if takes_no_stream(pair.decode.candidate):
        return True
    here, more_ms = stay.decode, query.uncached(stay.decode) * stay.decode.token_ms
    return not stay.key(query)[0] and here.pace_ms(more_ms, query.now) < pair.decode.pace_ms(0.0, query.now)


def may_keep_stream(candidate: Candidate) -> bool:
    """Whether a stream may stay on this prefill node: half of its seats are for prompts of others."""
    seats = candidate.node.max_num_seqs
    return candidate.lack is None and (not seats or 2 * candidate.load < seats)


def cheapest(query: PlacementQuery) -> Way | None:
    """The cheapest way; None if there is no node at all.

    Nodes that are passed over are chosen only if no other one of their role is left.
    """
    prefills = _allowed(query, Role.PREFILL)
    decodes = _allowed(query, Role.DECODE)
    if query.demand.embeds:
        return _cheapest_alone(query, prefills or decodes, False)
    pair = _cheapest_pair(query, prefills, decodes)
    if query.may_stay and pair is not None:
        stay = _cheapest_alone(query, [cost for cost in prefills if may_keep_stream(cost.candidate)], False)
        is_crowded = all(takes_no_stream(cost.candidate) for cost in decodes) or is_close(query, pair)
        if is_crowded and stay is not None and is_quicker(query, stay, pair):
            return replace(stay, reason=STAYS)
    alone = _cheapest_alone(query, decodes or prefills, pair is not None)
    if pair is None or alone is None:
        return pair or alone
    return alone if alone.key(query) < pair.key(query) else pair


def alternative_ways(query: PlacementQuery, way: Way) -> list[PlacementWay]:
    """The costs of the chosen way and of those that differ from it in one node, the cheapest first."""
    prefills = [cost for cost in query.costs if cost.node.role is Role.PREFILL]
    decodes = [cost for cost in query.costs if cost.node.role is Role.DECODE]
    if query.demand.embeds:
        return sorted(map(query.alone_terms, prefills or decodes), key=lambda terms: terms.total_ms)
    pair = way if way.prefill is not None else _cheapest_pair(query, prefills, decodes) or way
    prefill, decode = pair.prefill, pair.decode if way.reason is STAYS else way.decode
    pairs = {(cost.node.node_id, decode.node.node_id): (cost, decode) for cost in prefills}
    if prefill is not None:
        pairs |= {(prefill.node.node_id, cost.node.node_id): (prefill, cost) for cost in decodes}
    across = query.across
    ways = [query.pair_terms(p, d) for p, d in pairs.values() if p.kv_format.fits(d.kv_format, across=across)]
    ways += [query.alone_terms(cost) for cost in decodes or prefills]
    ways += [way.terms] if way.reason is STAYS else []
    return sorted(ways, key=lambda terms: terms.total_ms)


def _allowed(query: PlacementQuery, role: Role) -> list[NodeCosts]:
    able = [cost for cost in query.costs if cost.node.role is role]
    if not query.passed_over:
        return able
    return [cost for cost in able if cost.node.incarnation not in query.passed_over] or able


def _cheapest_pair(query: PlacementQuery, prefills: Sequence[NodeCosts], decodes: Sequence[NodeCosts]) -> Way | None:
    kinds, fits = {decode.kv_format for decode in decodes}, partial(KVFormat.fits, across=query.across)
    able = [cost for cost in prefills if cost.kv_format in kinds or any(fits(cost.kv_format, kind) for kind in kinds)]
    if not able:
        return None
    if query.pairs_passed_over:
        # The data path of one prefill node may be dead to all decode nodes: its pairs fail, though the node does not.
        able = [cost for cost in able if _has_partner(query, cost, decodes)] or able
    prefill = _best(able, _prefill_keys(query, able))
    partners = decodes
    if len(kinds) > 1:
        partners = [decode for decode in decodes if fits(decode.kv_format, prefill.kv_format)]
    if query.pairs_passed_over:
        name, bad = prefill.node.node_id, query.pairs_passed_over
        partners = [decode for decode in partners if (name, decode.node.node_id) not in bad] or partners
    left = query.uncached(prefill)
    prefill_ms, last_chunk = prefill.prefill_ms(left, query.pulled(prefill)), min(left, prefill.chunk)
    decode = _best(partners, _decode_keys(query, partners, last_chunk, prefill_ms))
    return Way(prefill, decode, query.pair_terms(prefill, decode), reason_of_pair(query))


def reason_of_pair(query: PlacementQuery) -> Reason:
    """Why a pair is chosen."""
    return ACROSS_NUMERICS if query.across else CHEAPEST_PAIR


def _has_partner(query: PlacementQuery, prefill: NodeCosts, decodes: Sequence[NodeCosts]) -> bool:
    """Whether any pair with this prefill node is not passed over."""
    name, bad = prefill.node.node_id, query.pairs_passed_over
    return any(
        decode.kv_format.fits(prefill.kv_format, across=query.across) and (name, decode.node.node_id) not in bad
        for decode in decodes
    )


def _cheapest_alone(query: PlacementQuery, nodes: Sequence[NodeCosts], has_pair: bool) -> Way | None:
    if has_pair:
        most, able = query.alone_tokens, ((cost, query.uncached(cost)) for cost in nodes)
        nodes = [cost for cost, left in able if left <= most and cost.candidate.lack is not Lack.TOKENS]
    if not nodes:
        return None
    node = _best(nodes, _alone_keys(query, nodes))
    return Way(None, node, query.alone_terms(node), CHEAPER_ALONE if has_pair else None)


# The keys below are like `Way.key`, for the part of a way that depends on one node. `PlacementWay` has the parts of the
# same sums, and `cost_table` computes them for all nodes at once.


def _to_read(query: PlacementQuery, costs: Sequence[NodeCosts]) -> list[int]:
    """Number of prompt tokens whose KV each decode node has to read."""
    tokens, cached = query.demand.num_prompt_tokens, {} if query.across else query.cached
    return [max(0, tokens - cached.get(cost.node.incarnation, 0)) for cost in costs]


def _prompt_work(query: PlacementQuery, costs: Sequence[NodeCosts]) -> list[tuple[int, float]]:
    """Number of prompt tokens that each node has to compute, and the time for them and for what it pulls."""
    return [(left := query.uncached(cost), cost.prefill_ms(left, query.pulled(cost))) for cost in costs]


def _prefill_keys(query: PlacementQuery, costs: Sequence[NodeCosts]) -> list[tuple[int, float]]:
    most_ms, work = query.level.first_token_ms, 1 + WORK_SHARE
    return [
        (
            (cost.queue_ms + work_ms > most_ms)
            + (cost.streams > 0.0 and cost.pace_ms(left * cost.token_ms, query.now) > query.level.token_ms),
            cost.queue_ms + work * work_ms + cost.streams * cost.token_ms * left,
        )
        for cost, (left, work_ms) in zip(costs, _prompt_work(query, costs), strict=True)
    ]


def _decode_keys(
    query: PlacementQuery, costs: Sequence[NodeCosts], last_chunk: int, prefill_ms: float
) -> list[tuple[int, float]]:
    most_ms, outputs = query.level.token_ms, query.output_tokens
    return [
        (
            most_ms < math.inf and cost.pace_ms(0.0, query.now) > most_ms,
            outputs * cost.decode_ms
            + HANDOFF_MS
            + max(min(left, last_chunk) * cost.kv_token_ms, left * cost.kv_token_ms - prefill_ms),
        )
        for cost, left in zip(costs, _to_read(query, costs), strict=True)
    ]


def _alone_keys(query: PlacementQuery, costs: Sequence[NodeCosts]) -> list[tuple[int, float]]:
    level, outputs = query.level, query.output_tokens
    return [
        (
            (cost.queue_ms + work_ms > level.first_token_ms)
            + 2 * (level.token_ms < math.inf and cost.pace_ms(left * cost.token_ms, query.now) > level.token_ms),
            cost.queue_ms + (1 + WORK_SHARE) * work_ms + cost.streams * cost.token_ms * left + outputs * cost.decode_ms,
        )
        for cost, (left, work_ms) in zip(costs, _prompt_work(query, costs), strict=True)
    ]


def _best(nodes: Sequence[NodeCosts], keys: Sequence[tuple[int, float]]) -> NodeCosts:
    """Among the nodes that cost about the same, the one that was unused for longest."""
    missed, least = min(keys)
    bound = (missed, least + SAME_MS + SAME_SHARE * least)
    near = [cost for cost, key in zip(nodes, keys, strict=True) if key <= bound]
    return min(near, key=lambda cost: (cost.candidate.last_chosen, cost.node.incarnation))
