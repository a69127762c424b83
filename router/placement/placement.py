"""Chooses the nodes of a request by their load alone, and says why: pure functions, and the values they work on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace
from typing import NamedTuple

from baton.errors import ContextLengthExceeded, NoCapacity
from baton.messages.ids import Peer
from baton.messages.kv_cache import KVFormat
from baton.messages.node import HeldPrefix, NodeDescription, Role
from baton.messages.node_model import GENERATES, Capability, in_order
from baton.values import value
from router.admission.request import ValidRequest
from router.placement.reasons import (
    ACROSS_NUMERICS,
    EMBEDDING,
    IN_TURN,
    LEAST_LOADED,
    Reason,
    no_node_left,
    no_pair_agrees,
)
from router.placement.room import Lack


@dataclass(slots=True)
class Candidate:
    """A node that can be given work, as the view sees it now.

    Treat it as frozen. It is not, because one is made for each report, and that would take several times as long.
    """

    node: NodeDescription
    load: float
    """Number of sequences on the node, including those that it has not reported yet."""
    last_chosen: int
    """The number of the router's latest dispatch to it; among equal loads the node that was unused for longest wins."""
    lack: Lack | None = None
    """Why a further request would only wait there; None: it has room."""
    uncomputed_tokens: int = 0
    """Tokens of prompts that wait or are being computed there, as it reported."""
    context_tokens: int = 0
    """Tokens of its running sequences in the KV cache."""
    attached_at: float = 0.0
    """Seconds on the router's clock."""
    adapters: frozenset[str] = frozenset()
    """Digests of the adapters that it acknowledges."""
    is_left_out: bool = False
    """Whether it gets no new requests, only begun streams of its version, see `router.placement.versions`."""


class Candidates(tuple[Candidate, ...]):
    """The nodes that take work, and which of them have changed since the candidates before these."""

    marker: object
    """Identifies these candidates."""
    earlier: object
    """The marker of the candidates before these."""
    changed: Sequence[Candidate] | None
    """The candidates that have changed since then; None: nodes came or went."""

    def __new__(cls, nodes: Iterable[Candidate], earlier: object, changed: Sequence[Candidate] | None) -> Candidates:
        made = super().__new__(cls, nodes)
        made.marker, made.earlier, made.changed = object(), earlier, changed
        return made

    def changed_since(self, before: Sequence[Candidate]) -> Sequence[Candidate] | None:
        """The candidates that have changed since `before`; None if that is not known, or if nodes came or went."""
        return self.changed if isinstance(before, Candidates) and before.marker is self.earlier else None


@value(frozen=True, slots=True)
class Origin:
    """Where a stream that has begun came from, which decides the nodes that may continue it.

    A token is a function of the request alone only among nodes with equal bits. A node that is not bit-exact promises
    nothing, so a stream that it began is decoded by this node alone. Any prefill node with its bits may compute the
    prompt for it, as it did for the first tokens.

    Where the operator lets nodes of other numerics take part, the rest of the family continues the stream once none of
    its own bits does, and any node of the family one that was never bit-exact (`is_mixed`).
    """

    bits: str
    """`NodeDescription.bits` of the nodes that began it."""
    incarnation: str = ""
    """The node that decoded it, where that is not bit-exact; empty: any node with these bits continues it."""
    family: str = ""
    """`NodeDescription.family` of the nodes that may continue it though they compute other bits; empty: none may."""
    is_mixed: bool = False
    """Whether nodes of several numerics have computed it, or are to continue it: it is not bit-exact."""

    @classmethod
    def of(cls, node: NodeDescription, *, across: bool = False, is_mixed: bool = False) -> Origin:
        """The origin of a stream that this node decodes. `across`: nodes of other numerics may continue it."""
        family = node.family if across else ""
        return cls(node.bits, "" if node.bit_exact else node.incarnation, family, is_mixed)

    @property
    def widened(self) -> Origin | None:
        """The same for a stream that goes on at any node of its family; None: no more nodes may continue it so."""
        return replace(self, is_mixed=True) if self.family and not self.is_mixed else None

    def allows(self, node: NodeDescription) -> bool:
        """Whether this node may decode the rest of the stream."""
        if self.is_mixed and self.family and self.family == node.family:
            return True
        return node.bits == self.bits and self.incarnation in ("", node.incarnation)

    @property
    def who(self) -> str:
        """The nodes that may continue the stream, for people."""
        if self.is_mixed and self.family:
            return f"nodes with the KV of those with the bits {self.bits}, of any numerics"
        return f"{self.incarnation}, which is not bit-exact" if self.incarnation else f"nodes with the bits {self.bits}"

    @property
    def why_only(self) -> str:
        """Why others may not continue the stream, for people."""
        return f"the stream has begun, and goes on with the same tokens only at {self.who}"


@value(frozen=True, slots=True)
class Demand:
    """The properties of a request that decide on which nodes it fits."""

    model: str
    num_prompt_tokens: int
    max_tokens: int
    embeds: bool = False
    """Whether an embedding is wanted, and no output."""
    needs: frozenset[Capability] = GENERATES
    """What its nodes must be able to do."""
    adapter: str = ""
    """Digest of the adapter that the nodes must acknowledge; empty: none."""
    pools: bool = False
    """Whether its vector is another than nodes make that don't read `Submit.pooling`."""
    origin: Origin | None = None
    """Where its stream began; None: its client has no token yet, so that any version may serve it."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens of prompt and output."""
        return self.num_prompt_tokens if self.embeds else self.num_prompt_tokens + self.max_tokens

    @property
    def num_stored_tokens(self) -> int:
        """Number of tokens whose KV is stored: the last one of an output is never fed back."""
        return self.num_tokens if self.embeds else self.num_tokens - 1


class NodeSize(NamedTuple):
    """The properties of a node that decide which requests can ever fit on it."""

    model: str
    max_model_len: int
    kv_tokens: int
    """How many tokens' KV its cache holds."""
    can: frozenset[Capability]
    takes_pooling: bool = True
    bits: str = ""
    family: str = ""

    def holds(self, demand: Demand) -> bool:
        """Whether an idle node of this size could serve the request."""
        is_long_enough = demand.num_tokens <= self.max_model_len and demand.num_stored_tokens <= self.kv_tokens
        can = demand.needs <= self.can and (self.takes_pooling or not demand.pools)
        origin = demand.origin
        continues = origin is None or origin.bits == self.bits or (origin.family != "" and origin.family == self.family)
        return self.model == demand.model and is_long_enough and can and continues


def size_of(node: NodeDescription) -> NodeSize:
    """A node's size."""
    kv_tokens = node.num_blocks * node.block_size
    return NodeSize(node.model, node.max_model_len, kv_tokens, node.can, node.takes_pooling, node.bits, node.family)


@value(frozen=True, slots=True)
class Placement:
    """The nodes of one attempt, and why they were chosen. Without a prefill node, `decode` runs the whole request."""

    prefill: NodeDescription | None
    decode: NodeDescription
    reason: Reason
    holders: Sequence[tuple[str, Peer]] = ()
    """Contents of the prompt of which the node that computes it has no rows, by digest, each with a node that has."""
    held_prefix: HeldPrefix | None = None
    """From where the node that computes the prompt pulls its beginning; None: it computes what it has not cached."""
    encoders: Sequence[tuple[str, Peer]] = ()
    """Others of these contents, each with the encode node that makes rows of it."""
    kv_bits: str = ""
    """See `Submit.kv_bits` of its decode leg."""

    @property
    def prompt_node(self) -> NodeDescription:
        """The node that computes the prompt."""
        return self.prefill or self.decode


def kv_bits_of(prefill: NodeDescription, decode: NodeDescription, before: str = "") -> str:
    """`Submit.kv_bits` of a leg of `decode` that gets KV of `prefill`. `before`: that of the leg whose KV it is."""
    if prefill.bits == decode.bits:
        return before
    if not before:
        return prefill.bits
    return hashlib.sha256(f"{before}+{prefill.bits}".encode()).hexdigest()[: len(prefill.bits)]


def choose(
    candidates: Sequence[Candidate], demand: Demand, exclude: Set[str] = frozenset(), *, across: bool = False
) -> Placement:
    """The least loaded pair that fits. Raises NoCapacity with the reason if there is none, and InvalidRequest if the
    nodes are there but too small.

    `candidates` are the nodes that take work; `exclude` has incarnations on which this request failed before, which are
    chosen only if there is no other node: they take work now, so they may only have been away. The KV formats of a pair
    must fit. `across`: where none of equal numerics do, those of a pair of other numerics may. One node alone runs the
    request only if no node of the other role is there.
    """
    fitting = fitting_nodes(candidates, demand, exclude)
    prefills = sorted((c for c in fitting if c.node.role is Role.PREFILL), key=_order)
    decodes = sorted((c for c in fitting if c.node.role is Role.DECODE), key=_order)
    if demand.embeds:
        return Placement(None, (prefills or decodes)[0].node, why_embedded(candidates, prefills, decodes, exclude))
    best_prefill = _best_by_kv(prefills)
    best_decode = _best_by_kv(decodes)
    for crosses in (False, True) if across else (False,):
        pairs = [
            (prefill, decode)
            for theirs, decode in best_decode.items()
            for ours, prefill in best_prefill.items()
            if ours.fits(theirs, across=crosses)
        ]
        if pairs:
            prefill, decode = min(
                pairs, key=lambda pair: (pair[0].load + pair[1].load, _order(pair[1]), _order(pair[0]))
            )
            kv_bits = kv_bits_of(prefill.node, decode.node)
            return Placement(prefill.node, decode.node, ACROSS_NUMERICS if crosses else LEAST_LOADED, kv_bits=kv_bits)
    alone = (decodes or prefills)[0]
    return Placement(None, alone.node, why_alone(candidates, prefills, decodes, exclude))


def choose_move(
    candidates: Sequence[Candidate], demand: Demand, source: NodeDescription, *, kv_bits: str = ""
) -> NodeDescription:
    """The decode node to which a stream of `source` is moved: the least loaded one that has room.

    One of other numerics only if the stream's origin permits it, and no node of equal numerics takes streams at all.
    `kv_bits`: see `Submit.kv_bits`, of the stream's leg. Raises NoCapacity with the reason if there is none, and what
    `fitting_nodes` raises.
    """
    origin = demand.origin
    try:
        # A stream that is mixed already is no more so at a node of its present node's numerics.
        return _choose_move(candidates, demand, source, kv_bits, across=False)
    except _NobodyTakesIt:
        if origin is None or not origin.family:
            raise
        return _choose_move(candidates, replace(demand, origin=origin.widened or origin), source, kv_bits, across=True)


class _NobodyTakesIt(NoCapacity):
    """No node takes streams of this kind, however much room there is."""


def _choose_move(
    candidates: Sequence[Candidate], demand: Demand, source: NodeDescription, kv_bits: str, *, across: bool
) -> NodeDescription:
    own = KVFormat.of(source)
    others = [c for c in candidates if c.node.role is Role.DECODE and c.node.incarnation != source.incarnation]
    if not others:
        raise NoCapacity("there is no other decode node")
    try:
        fitting = fitting_nodes(others, demand, frozenset())
    except NoCapacity as error:
        raise _NobodyTakesIt(str(error)) from error
    able = [c for c in fitting if c.node.takes_moves and c.node.block_size == source.block_size]
    # A node without a family does not know `Submit.kv_bits`.
    able = [c for c in able if KVFormat.of(c.node).fits(own, across=across) and (c.node.family or not kv_bits)]
    if not able:
        raise _NobodyTakesIt(f"no other decode node takes streams of {source.node_id}: their versions or KV differ")
    with_room = [c for c in able if not takes_no_stream(c)]
    if not with_room:
        raise NoCapacity("all other decode nodes are full")
    return min(with_room, key=_order).node


def choose_in_turn(
    candidates: Sequence[Candidate], demand: Demand, exclude: Set[str] = frozenset(), *, across: bool = False
) -> Placement:
    """The pair of nodes that were unused for longest, however loaded they are; otherwise as `choose`."""
    idle = [replace(candidate, load=0.0) for candidate in candidates]
    placement = choose(idle, demand, exclude, across=across)
    return replace(placement, reason=IN_TURN) if placement.reason is LEAST_LOADED else placement


def fitting_nodes(candidates: Sequence[Candidate], demand: Demand, exclude: Set[str]) -> list[Candidate]:
    """Nodes on which the request fits, without those in `exclude` unless there is no other; raises as `choose`."""
    candidates = may_serve(candidates, demand.origin)
    tokens, stored, model = demand.num_tokens, demand.num_stored_tokens, demand.model
    able = [
        c
        for c in candidates
        if (n := c.node).model == model and tokens <= n.max_model_len and stored <= n.num_blocks * n.block_size
        if demand.needs <= n.can and (n.takes_pooling or not demand.pools)
        if not demand.adapter or demand.adapter in c.adapters
    ]
    if demand.origin is not None and (only := demand.origin.incarnation):
        exclude = exclude - {only}
        able = able if any(c.node.incarnation == only for c in able) else []
    if able:
        return [c for c in able if c.node.incarnation not in exclude] or able if exclude else able
    if demand.origin is not None and not candidates:
        raise NoCapacity(f"{demand.origin.why_only}, of which none takes work")
    if demand.adapter and not any(demand.adapter in c.adapters for c in candidates):
        raise NoCapacity(f"no node that is up acknowledges the adapter {demand.adapter:.12}")
    if demand.pools and not any(c.node.takes_pooling for c in candidates if c.node.model == model):
        raise NoCapacity(f"no node that pools as asked for with {model} is up: those that are have an earlier version")
    if any(c.node.model == model and demand.needs <= c.node.can for c in candidates):
        whole = "comes" if demand.embeds else "with max_tokens comes"
        reason = f"{whole} to {tokens} tokens, more than any node's KV cache holds"
        most = max(c.node.num_blocks * c.node.block_size for c in candidates if c.node.model == model)
        if demand.num_prompt_tokens > most:
            raise ContextLengthExceeded("prompt", reason, demand.num_prompt_tokens, most)
        raise ContextLengthExceeded("prompt", reason, tokens, most, num_output_tokens=tokens - demand.num_prompt_tokens)
    raise NoCapacity(f"no node that {_what_is_needed(demand)} {demand.model} is up")


def may_serve(candidates: Sequence[Candidate], origin: Origin | None) -> Sequence[Candidate]:
    """The nodes that may serve a new request (None), or continue a stream of this origin."""
    if origin is not None:
        decoding = [c for c in candidates if origin.allows(c.node)]
        if not origin.incarnation or not any(c.node.role is Role.DECODE for c in decoding):
            return decoding
        return [c for c in candidates if c.node.role is Role.PREFILL and c.node.bits == origin.bits] + decoding
    served_by = [c for c in candidates if not c.is_left_out]
    return candidates if len(served_by) == len(candidates) else served_by


def _what_is_needed(demand: Demand) -> str:
    """Describes what a node must be able to do, in front of the model's name."""
    return "serves" if demand.needs == GENERATES else f"can {' and '.join(in_order(demand.needs))} with"


def takes_no_stream(candidate: Candidate) -> bool:
    """Whether a node lacks room for another stream, be its prompt computed there or not."""
    return candidate.lack is not None and candidate.lack is not Lack.TOKENS


def with_room(candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """The nodes that are not full, or all of a role if all of it are full; `candidates` itself if none is full.

    Prompts that a decode node has to compute keep no hand-off from it.
    """
    hands_over = any(candidate.node.role is Role.PREFILL for candidate in candidates)
    open_ones = [
        candidate
        for candidate in candidates
        if candidate.lack is None
        or (hands_over and candidate.node.role is Role.DECODE and not takes_no_stream(candidate))
    ]
    if len(open_ones) == len(candidates):
        return candidates
    open_roles = {candidate.node.role for candidate in open_ones}
    return [*open_ones, *(candidate for candidate in candidates if candidate.node.role not in open_roles)]


def _best_by_kv(best_first: Sequence[Candidate]) -> dict[KVFormat, Candidate]:
    """The best node of each KV format."""
    best: dict[KVFormat, Candidate] = {}
    for candidate in best_first:
        best.setdefault(KVFormat.of(candidate.node), candidate)
    return best


def disagreement(node: NodeDescription, others: Sequence[NodeDescription], *, across: bool = False) -> str:
    """Why the node can't exchange KV with any node of the other role; empty if it can. `across`: or with one of other
    numerics.

    Such a pair is never chosen, so no link between the two is ever opened, or refused.
    """
    own, partners = KVFormat.of(node), [partner for partner in others if partner.role is not node.role]
    if not partners or any(KVFormat.of(partner).fits(own, across=across) for partner in partners):
        return ""
    first = partners[0]
    names = KVFormat.of(node).misfits(KVFormat.of(first))
    here, there = (" ".join(f"{name}={getattr(description, name)}" for name in names) for description in (node, first))
    return f"agrees with no {first.role.value} node on its KV: {node.node_id} [{here}], {first.node_id} [{there}]"


def _order(candidate: Candidate) -> tuple[float, int, str]:
    return (candidate.load, candidate.last_chosen, candidate.node.incarnation)


def why_embedded(
    candidates: Sequence[Candidate],
    prefills: Sequence[Candidate],
    decodes: Sequence[Candidate],
    exclude: Set[str],
) -> Reason:
    """Why an embedding is computed by this node: a prefill node does it while there is one."""
    return EMBEDDING if prefills else why_alone(candidates, prefills, decodes, exclude)


def why_alone(
    candidates: Sequence[Candidate],
    prefills: Sequence[Candidate],
    decodes: Sequence[Candidate],
    exclude: Set[str],
) -> Reason:
    """Why a request runs on one node: there is no pair."""
    if prefills and decodes:
        return no_pair_agrees(KVFormat.of(prefills[0].node), KVFormat.of(decodes[0].node))
    missing = Role.PREFILL if decodes else Role.DECODE
    failed = sum(1 for c in candidates if c.node.role is missing and c.node.incarnation in exclude)
    note = f" ({failed} failed this request)" if failed else ""
    return no_node_left(missing, note_of_left_out(candidates, missing) + note)


def note_of_left_out(candidates: Sequence[Candidate], role: Role) -> str:
    """Which nodes of a role that has none for new requests are up all the same, to follow this; empty: none."""
    names = [c.node.node_id for c in candidates if c.is_left_out and c.node.role is role]
    if not names:
        return ""
    return f" but {names[0]}, which is Incompatible" if len(names) == 1 else f" but {len(names)} that are Incompatible"


def demand_of(request: ValidRequest, origin: Origin | None = None) -> Demand:
    """The properties of a request that decide on which nodes it fits. `origin`: where its stream began, if it has."""
    max_tokens = request.sampling_params.max_tokens
    return Demand(
        request.model,
        request.num_prompt_tokens,
        max_tokens,
        embeds=request.embeds,
        needs=request.needs,
        adapter=request.adapter,
        pools=request.pooling is not None and not request.pooling.is_plain,
        origin=origin,
    )
