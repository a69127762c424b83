"""What a request is predicted to cost on each pair of nodes, or on one alone, and which is the cheapest. Pure.

All in milliseconds. On a pair a request costs

    queue      what the prefill node has to compute first, and the step that it is in
  + prefill    the prompt's tokens that the prefill node has not cached, in as many steps as they take
  + handoff    the bytes that are still to move when the prompt is computed: the decode node's cached blocks never move,
               and the others have moved while the prompt was computed, but for those of the last chunk
  + decode     the output, at the decode node's time per token with one more sequence in its batch
  + stall      what others lose: a share of the time that the prompt keeps its node busy

and where one node does it all, the same without a hand-off, and with a larger stall: every token of a prompt lengthens
a decode step for all the streams of that node.

The least sum wins among those that are predicted to meet the request's service level, if any are. Of those that cost
about the same the longest unchosen one wins. A pair is found in two steps, first the prefill node and then the decode
node for it, since nothing but the hand-off depends on both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from baton.messages.node import NodeDescription, Role
from baton.values import value
from router.placement.placement import Candidate, Demand, KVWords, kv_words
from router.placement.rates import StepRates

HANDOFF_MS = 2.0
"""Of a hand-off besides the bytes: a subscription, a confirmation, and the step that the request joins."""
_DEFAULT_CHUNK = 512
_OUTPUT_TOKENS = 128
"""What an output is taken to be at most: few are as long as they may."""
WORK_SHARE = 0.25
"""Of what a prompt takes to compute that others are taken to lose by it: of two ways that are as quick, the one with
less work leaves more to them, and keeps fewer copies of the same in caches."""
_NEWCOMER_S = 5.0
"""A node's share grows to its full size in so many seconds."""
_LEAST_SHARE = 0.1
_SHARES = 20
"""It grows in so many steps, between which its costs stay what they are: many decisions then remember the same ones."""
SAME_MS = 0.25
SAME_SHARE = 0.02
"""Costs that differ by less are alike."""


@value(frozen=True, slots=True)
class ServiceLevel:
    """What a request hopes for, in milliseconds from now."""

    first_token_ms: float = math.inf
    token_ms: float = math.inf


@dataclass(slots=True)
class NodeCosts:
    """What one more request meets on a node. Not frozen for the sake of speed, as `Candidate`; nobody changes it."""

    candidate: Candidate
    node: NodeDescription
    queue_ms: float
    step_ms: float
    """A step's time without the prompt tokens in it."""
    token_ms: float
    """Of each of those."""
    chunk: int
    """Prompt tokens of one step."""
    streams: float
    """Sequences that every step keeps waiting."""
    decode_ms: float
    """Per output token, with one more sequence."""
    ms_per_byte: float
    """Of KV that comes in."""
    kv_token_ms: float
    """Of the KV of one token that comes in."""
    kv: KVWords
    """What it must have in common with another node to exchange KV."""
    pending_tokens: int = 0
    """Of prompts that were sent there and that it had not reported."""
    share: float = 1.0
    """What it gets of what others get; see `newcomers_share`."""

    def prefill_ms(self, tokens: int) -> float:
        """Computing so many tokens of a prompt, from its turn on."""
        return -(-tokens // self.chunk) * self.step_ms + tokens * self.token_ms


@value(frozen=True, slots=True)
class Terms:
    """The parts of one way's cost."""

    prefill: str
    """The node's name; empty where the decode node does it all."""
    decode: str
    queue_ms: float
    cached_tokens: int
    """Of the prompt, where it is computed."""
    prefill_ms: float
    decode_cached_tokens: int
    handoff_ms: float
    decode_ms: float
    stall_ms: float
    token_ms: float
    """Predicted time per output token."""

    @property
    def first_token_ms(self) -> float:
        return self.queue_ms + self.prefill_ms

    @property
    def total_ms(self) -> float:
        return self.queue_ms + self.prefill_ms + self.handoff_ms + self.decode_ms + self.stall_ms


def node_costs(
    candidate: Candidate,
    pending_tokens: int,
    rates: StepRates,
    ms_per_byte: float,
    share: float = 1.0,
    *,
    prefills_only: bool = False,
    kv: KVWords | None = None,
) -> NodeCosts:
    """`pending_tokens`: of prompts that were sent there and that it has not reported yet. `share`: of what others get;
    see `newcomers_share`. `prefills_only`: its sequences are prompts, which keep nobody waiting. `kv`: its `kv_words`,
    for who has them.
    """
    streams = 0.0 if prefills_only else candidate.load / share
    context = 0.0 if prefills_only else candidate.context_tokens / share
    node = candidate.node
    chunk = chunk_of(node)
    step_ms = rates.overhead_ms(streams, context)
    queued = (candidate.uncomputed_tokens + pending_tokens) / share
    # With nothing queued it may still be somewhere in a step.
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
        step_ms + rates.sequence_ms,
        ms_per_byte,
        ms_per_byte * node.block_bytes / node.block_size,
        kv or kv_words(node),
        pending_tokens,
        share,
    )


def chunk_of(node: NodeDescription) -> int:
    """Prompt tokens of one step of a node."""
    return node.max_num_batched_tokens or _DEFAULT_CHUNK


def newcomers_share(age_s: float) -> float:
    """What a node gets of its full share so many seconds after it came: its caches are cold, its rates unknown."""
    return 1.0 if age_s >= _NEWCOMER_S else max(_LEAST_SHARE, int(age_s / _NEWCOMER_S * _SHARES) / _SHARES)


def share_grows_at(attached_at: float, now: float) -> float:
    """When the share of a node that came then is another one than now, at the earliest."""
    return attached_at + (int((now - attached_at) / _NEWCOMER_S * _SHARES) + 1) * _NEWCOMER_S / _SHARES


@value(frozen=True, slots=True)
class Question:
    """One request and all that is known when its nodes are chosen."""

    demand: Demand
    costs: Sequence[NodeCosts]
    """Of the nodes that it fits on."""
    cached: Mapping[str, int]
    """How many of the prompt's first tokens each incarnation has."""
    level: ServiceLevel
    alone_tokens: int
    """A decode node computes at most so many tokens of a prompt where a prefill node could."""
    passed_over: Set[str] = frozenset()
    """Incarnations that are taken only if nobody else of their kind is left."""
    pairs_passed_over: Set[tuple[str, str]] = frozenset()
    """Names of a prefill and a decode node."""

    def pair_terms(self, prefill: NodeCosts, decode: NodeCosts) -> Terms:
        """The cost of a pair."""
        tokens = self.demand.num_prompt_tokens
        there, here = self._cached(prefill), self._cached(decode, at_most=tokens)
        left = tokens - there
        prefill_ms = prefill.prefill_ms(left)
        return Terms(
            prefill=prefill.node.node_id,
            decode=decode.node.node_id,
            queue_ms=prefill.queue_ms,
            cached_tokens=there,
            prefill_ms=prefill_ms,
            decode_cached_tokens=here,
            handoff_ms=_handoff_ms(decode, tokens - here, min(left, prefill.chunk), prefill_ms),
            decode_ms=self.output_tokens * decode.decode_ms,
            stall_ms=WORK_SHARE * prefill_ms,
            token_ms=decode.decode_ms,
        )

    def alone_terms(self, node: NodeCosts) -> Terms:
        """The cost of a node that does it all."""
        there = self._cached(node)
        left = self.demand.num_prompt_tokens - there
        prefill_ms = node.prefill_ms(left)
        return Terms(
            prefill="",
            decode=node.node.node_id,
            queue_ms=node.queue_ms,
            cached_tokens=there,
            prefill_ms=prefill_ms,
            decode_cached_tokens=there,
            handoff_ms=0.0,
            decode_ms=self.output_tokens * node.decode_ms,
            stall_ms=WORK_SHARE * prefill_ms + node.streams * node.token_ms * left,
            token_ms=node.decode_ms,
        )

    def uncached(self, node: NodeCosts) -> int:
        """Tokens that the node would compute."""
        tokens = self.demand.num_prompt_tokens
        return max(1, tokens - self.cached.get(node.node.incarnation, 0))

    @property
    def output_tokens(self) -> int:
        return 0 if self.demand.embeds else min(self.demand.max_tokens, _OUTPUT_TOKENS)

    def _cached(self, node: NodeCosts, at_most: int | None = None) -> int:
        """The last token of a prompt is computed in any case: the first one of the output follows from it."""
        most = self.demand.num_prompt_tokens - 1 if at_most is None else at_most
        return min(self.cached.get(node.node.incarnation, 0), most)


def _handoff_ms(decode: NodeCosts, tokens: int, last_chunk: int, prefill_ms: float) -> float:
    """What is left of moving so many tokens' KV when the prompt is computed."""
    in_all, at_least = tokens * decode.kv_token_ms, min(tokens, last_chunk) * decode.kv_token_ms
    return HANDOFF_MS + max(at_least, in_all - prefill_ms)


@value(frozen=True, slots=True)
class Found:
    """The cheapest way."""

    prefill: NodeCosts | None
    decode: NodeCosts
    terms: Terms
    reason: str
    """Empty where there was no pair to choose."""


def cheapest(question: Question) -> Found | None:
    """None when there is no node at all. Who is passed over is taken when there is nobody else of its kind."""
    prefills = _allowed(question, Role.PREFILL)
    decodes = _allowed(question, Role.DECODE)
    if question.demand.embeds:
        return _cheapest_alone(question, prefills or decodes, False)
    pair = _cheapest_pair(question, prefills, decodes)
    alone = _cheapest_alone(question, decodes or prefills, pair is not None)
    if pair is None or alone is None:
        return pair or alone
    pair_key, alone_key = key_of(question, pair.terms), key_of(question, alone.terms)
    return alone if alone_key < pair_key else pair


def ways_beside(question: Question, found: Found) -> list[Terms]:
    """The way that was found, and for every other node the one that has it in place of one of those."""
    prefills = [cost for cost in question.costs if cost.node.role is Role.PREFILL]
    decodes = [cost for cost in question.costs if cost.node.role is Role.DECODE]
    if question.demand.embeds:
        return sorted(map(question.alone_terms, prefills or decodes), key=lambda terms: terms.total_ms)
    prefill = found.prefill or (_cheapest_pair(question, prefills, decodes) or found).prefill
    decode = found.decode
    pairs = {(cost.node.node_id, decode.node.node_id): (cost, decode) for cost in prefills}
    if prefill is not None:
        pairs |= {(prefill.node.node_id, cost.node.node_id): (prefill, cost) for cost in decodes}
    ways = [question.pair_terms(p, d) for p, d in pairs.values() if p.kv == d.kv]
    ways += [question.alone_terms(cost) for cost in decodes or prefills]
    return sorted(ways, key=lambda terms: terms.total_ms)


def _allowed(question: Question, role: Role) -> list[NodeCosts]:
    able = [cost for cost in question.costs if cost.node.role is role]
    if not question.passed_over:
        return able
    return [cost for cost in able if cost.node.incarnation not in question.passed_over] or able


def key_of(question: Question, terms: Terms) -> tuple[int, float]:
    """By which ways are compared: what the service level misses, then the cost."""
    level = question.level
    missed = (terms.first_token_ms > level.first_token_ms) + (terms.token_ms > level.token_ms)
    return missed, terms.total_ms


def _cheapest_pair(question: Question, prefills: Sequence[NodeCosts], decodes: Sequence[NodeCosts]) -> Found | None:
    kinds = {decode.kv for decode in decodes}
    able = [cost for cost in prefills if cost.kv in kinds]
    if not able:
        return None
    if question.pairs_passed_over:
        # One prefill node whose data path is dead for all decode nodes, say: its pairs fail, and it does not.
        able = [cost for cost in able if _has_partner(question, cost, decodes)] or able
    prefill = _best(able, _prefill_keys(question, able))
    partners = [decode for decode in decodes if decode.kv == prefill.kv] if len(kinds) > 1 else decodes
    if question.pairs_passed_over:
        name, bad = prefill.node.node_id, question.pairs_passed_over
        partners = [decode for decode in partners if (name, decode.node.node_id) not in bad] or partners
    left = question.uncached(prefill)
    prefill_ms, last_chunk = prefill.prefill_ms(left), min(left, prefill.chunk)
    decode = _best(partners, _decode_keys(question, partners, last_chunk, prefill_ms))
    return Found(prefill, decode, question.pair_terms(prefill, decode), "cheapest pair")


def _has_partner(question: Question, prefill: NodeCosts, decodes: Sequence[NodeCosts]) -> bool:
    """Whether a pair with it is not passed over."""
    name, bad = prefill.node.node_id, question.pairs_passed_over
    return any(decode.kv == prefill.kv and (name, decode.node.node_id) not in bad for decode in decodes)


def _cheapest_alone(question: Question, nodes: Sequence[NodeCosts], has_pair: bool) -> Found | None:
    if has_pair:
        most = question.alone_tokens
        nodes = [cost for cost, left in zip(nodes, _uncached(question, nodes), strict=True) if left <= most]
    if not nodes:
        return None
    node = _best(nodes, _alone_keys(question, nodes))
    return Found(None, node, question.alone_terms(node), "cheaper on one node" if has_pair else "")


# What the service level misses, then the cost, of the part of a way that a node decides. `Terms` has the same sums in
# their parts, and `cost_table` has them for all nodes at once, which is what a request waits for.


def _uncached(question: Question, costs: Sequence[NodeCosts], at_least: int = 1) -> list[int]:
    """Tokens of the prompt that each node has yet to compute, or to be given."""
    tokens, cached = question.demand.num_prompt_tokens, question.cached
    if not cached:
        return [tokens] * len(costs)
    return [max(at_least, tokens - cached.get(cost.node.incarnation, 0)) for cost in costs]


def _prefill_keys(question: Question, costs: Sequence[NodeCosts]) -> list[tuple[int, float]]:
    most_ms, work = question.level.first_token_ms, 1 + WORK_SHARE
    return [
        (
            cost.queue_ms + (work_ms := -(-left // cost.chunk) * cost.step_ms + left * cost.token_ms) > most_ms,
            cost.queue_ms + work * work_ms,
        )
        for cost, left in zip(costs, _uncached(question, costs), strict=True)
    ]


def _decode_keys(
    question: Question, costs: Sequence[NodeCosts], last_chunk: int, prefill_ms: float
) -> list[tuple[int, float]]:
    most_ms, outputs = question.level.token_ms, question.output_tokens
    return [
        (
            cost.decode_ms > most_ms,
            outputs * cost.decode_ms
            + HANDOFF_MS
            + max(min(left, last_chunk) * cost.kv_token_ms, left * cost.kv_token_ms - prefill_ms),
        )
        for cost, left in zip(costs, _uncached(question, costs, at_least=0), strict=True)
    ]


def _alone_keys(question: Question, costs: Sequence[NodeCosts]) -> list[tuple[int, float]]:
    level, outputs = question.level, question.output_tokens
    return [
        (
            (cost.queue_ms + (work_ms := cost.prefill_ms(left)) > level.first_token_ms)
            + (cost.decode_ms > level.token_ms),
            cost.queue_ms + (1 + WORK_SHARE) * work_ms + cost.streams * cost.token_ms * left + outputs * cost.decode_ms,
        )
        for cost, left in zip(costs, _uncached(question, costs), strict=True)
    ]


def _best(nodes: Sequence[NodeCosts], keys: Sequence[tuple[int, float]]) -> NodeCosts:
    """Of those that cost about the same, the longest unchosen."""
    missed, least = min(keys)
    bound = (missed, least + SAME_MS + SAME_SHARE * least)
    near = [cost for cost, key in zip(nodes, keys, strict=True) if key <= bound]
    return min(near, key=lambda cost: (cost.candidate.last_chosen, cost.node.incarnation))
