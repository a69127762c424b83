"""The router's view of the cluster: which nodes are registered and attached, and how busy each is. No I/O."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import cast

from cachetools import FIFOCache

from baton.engine.sequences.sequence_group import most_at_once
from baton.messages.adapters import AdapterReport
from baton.messages.ids import AttemptKey
from baton.messages.kv_cache import KVFormat
from baton.messages.node import LoadReport, NodeDescription, Role
from baton.messages.node_model import Capability, in_order
from baton.messages.operator import NodeStatus
from baton.registry import DesiredState, NodeRecord
from router.listeners import Listeners
from router.placement.encoders import LoadedEncoder
from router.placement.known_node import KnownNode, NodeState, Partners, has_free_seat
from router.placement.placement import (
    Candidate,
    Candidates,
    Demand,
    NodeSize,
    Origin,
    disagreement,
    may_serve,
    size_of,
)
from router.placement.room import DEFAULT_RULES, Lack, RoomRules
from router.placement.versions import Registered, Serving, left_out, serving_versions, version_of

LOST_SHOWN_S = 60.0
"""How long a lost node is still shown to operators."""
CROWDED_BY = 0.4
"""A node that is full is crowded if another one has so much more of its blocks and seats free, as a share."""
SIZE_REMEMBERED_S = 600.0
"""For so long after a node was lost, requests that fit only on a node of its size are told to come again, and not that
they are too large: long enough to replace a machine and load a model."""
_MOST_SIZES = 64
"""How many different sizes of nodes are remembered."""


class ClusterView:
    """All known incarnations of nodes. Its only writer is the router's event loop."""

    def __init__(
        self,
        clock: Callable[[], float] = lambda: 0.0,
        rules: RoomRules = DEFAULT_RULES,
        *,
        needs_pairs: bool = False,
        across: bool = False,
    ) -> None:
        """`clock`: seconds on the router's clock; without one, the version of most nodes serves at each moment.

        `rules`: which nodes have room. `needs_pairs`: whether requests are served by pairs of nodes alone. `across`:
        whether nodes pair across numerics.
        """
        self._has_prefills: bool | None = None
        """Whether any attached node is a prefill node; None: not known."""
        self.num_full: Counter[Lack] = Counter()
        """How often a node with room came to have none, by what it lacked."""
        self._clock = clock
        self._rules = rules
        self._needs_pairs = needs_pairs
        self._across = across
        self._nodes: dict[str, KnownNode] = {}
        self._ordered: dict[str, int] | None = None
        """The place of each incarnation in a stable order; None: to be computed, since nodes came or went."""
        self._slots: list[Candidate | None] = []
        """The candidate at each place; None for a node that takes no work."""
        self._with_free_seats: set[str] = set()
        """The candidates that decode and have seats that nothing has yet."""
        self._changed: set[str] = set()
        """Incarnations whose candidates are to be made again."""
        self._described: tuple[NodeDescription, ...] | None = None
        self._left_out: Mapping[str, str] = {}
        """Why nodes that take work get no new requests, by incarnation."""
        self._is_left_out_known = True
        """False: which nodes take work has changed since."""
        self._serving: Mapping[str, Serving] = {}
        """The version of each model that gets new requests."""
        self._passes_at = math.inf
        """When new requests pass over to another version of a model, if nothing changes until then."""
        self._served_by: tuple[NodeDescription, ...] | None = None
        """What `served_by` returned last; None: to be found out again."""
        self._abilities: dict[str, set[frozenset[Capability]]] | None = None
        """What `abilities` returns for each model; None: to be found out again."""
        self._candidates = Candidates((), None, None)
        """The candidates that `candidates` returned last."""
        self._sizes: FIFOCache[NodeSize, float] = FIFOCache(_MOST_SIZES)
        """When a node of each size was attached or lost last."""
        self._forget_at = math.inf
        """Before this time `forget_lost` has nothing to drop."""
        self._chosen = 0
        self.num_adapter_reports = 0
        """How often nodes have said which adapters they acknowledge."""
        self._desired = DesiredState()
        self.on_cordoned_work: Listeners[[]] = Listeners()
        """Called when a cordoned node has reported how much work it has left, or is gone."""

    def registered(self, records: Iterable[NodeRecord]) -> None:
        """Take the records that are in the registry now. Attached nodes stay, whatever the registry says."""
        current, known = {record.incarnation: record for record in records}, set(self._nodes)
        for incarnation, record in current.items():
            node = self._nodes.get(incarnation)
            if node is None:
                self._nodes[incarnation] = KnownNode(record, self._desired.is_cordoned(record.name))
            else:
                if node.record.state != record.state:
                    self._candidate_changed(node)
                    self._takers_changed()
                node.record = record
                node.registered = True
        for incarnation, node in self._nodes.items():
            node.registered = incarnation in current
        names = {record.name for record in current.values()}
        for incarnation, node in list(self._nodes.items()):
            if not node.registered and not node.attached and node.record.name in names:
                del self._nodes[incarnation]
        self._forget_at = -math.inf
        self._described = None
        if self._nodes.keys() != known:
            self._ordered = None

    def desired(self, desired: DesiredState) -> None:
        """Take the state that operators want nodes to have."""
        self._desired = desired
        self._described = None
        self._takers_changed()
        for node in self._nodes.values():
            node.cordoned = desired.is_cordoned(node.record.name)
            self._candidate_changed(node)

    def attached(self, description: NodeDescription, now: float) -> None:
        """The stream to a node is open."""
        self.forget_lost(now)
        node = self._nodes.get(description.incarnation)
        if node is None:
            return
        node.description = description
        node.version = description.model, description.bits, KVFormat.of(description)
        node.attached = True
        self._described = None
        self._takers_changed()
        node.attached_at = now
        node.lost_at = None
        node.detail = node.notice = ""
        node.adapters, node.refused_adapters = frozenset(), {}
        node.forget_ours()
        if node.runs_legs:
            self._note_size(description, now)
        node.load = LoadReport(total_blocks=description.num_blocks, free_blocks=description.num_blocks)
        node.others = 0
        self._candidate_changed(node)

    def reported(self, incarnation: str, load: LoadReport) -> None:
        """Take a node's report of its load."""
        node = self._nodes.get(incarnation)
        if node is None:
            return
        if node.load.draining is not load.draining:
            self._takers_changed()
        node.load = load
        # Legs that we sent a moment ago are not in the report yet: a count below ours says nothing about others.
        node.others = max(0, load.running + load.waiting + load.waiting_for_remote_kvs - node.ours)
        self._candidate_changed(node)
        if node.cordoned:
            self.on_cordoned_work()

    def step_reported(self, incarnation: str) -> None:
        """A node reports a step, or that it has nothing to compute: what was sent for a while is in its load now.

        To be called before what the report brings about is sent.
        """
        node = self._nodes.get(incarnation)
        if node is not None:
            node.unreported.step_reported()

    def noticed(self, incarnation: str, notice: str) -> None:
        """Take a node's message for operators; empty: it has none any more."""
        node = self._nodes.get(incarnation)
        if node is not None:
            node.notice = notice

    def adapters_reported(self, incarnation: str, report: AdapterReport) -> None:
        """Take which of the router's adapters a node acknowledges."""
        node = self._nodes.get(incarnation)
        if node is None:
            return
        node.adapters = frozenset(status.digest for status in report.adapters if not status.refusal)
        node.refused_adapters = {status.digest: status.refusal for status in report.adapters if status.refusal}
        self.num_adapter_reports += 1
        self._candidate_changed(node)

    def acknowledging(self, digest: str) -> Sequence[str]:
        """The names of the attached nodes that acknowledge an adapter."""
        return [n.record.name for n in self._nodes.values() if n.attached and digest in n.adapters]

    def adapter_refusals(self) -> Iterator[tuple[str, str, str]]:
        """For each attached node and each adapter that it refuses: its name, the digest and the reason."""
        for node in self._nodes.values():
            if node.attached and node.runs_legs:
                for digest, reason in node.refused_adapters.items():
                    yield node.record.name, digest, reason

    def is_acknowledged(self, digest: str, origin: Origin | None = None) -> bool:
        """Whether a node that gets new requests, or may continue a stream of this origin, acknowledges this adapter."""
        origin = origin and (origin.widened or origin)
        nodes = may_serve(self.candidates(), origin)
        return any(
            digest in registered.adapters for registered in nodes if origin is None or origin.allows(registered.node)
        )

    def abilities(self, model: str) -> Set[frozenset[Capability]]:
        """What the nodes that get new requests to this model can do, each combination once; empty: there are none."""
        left_out = self._why_left_out()
        if self._abilities is None:
            self._abilities = {}
            for incarnation, node in self._nodes.items():
                if node.description is None or not node.runs_legs:
                    continue
                if incarnation not in left_out and node.state is NodeState.READY:
                    self._abilities.setdefault(node.description.model, set()).add(node.description.can)
        return self._abilities.get(model, frozenset())

    def awaits_answer(self, digest: str, incarnations: Set[str]) -> bool:
        """Whether one of these nodes is attached and has not said whether it acknowledges this adapter."""
        nodes = [node for incarnation, node in self._nodes.items() if incarnation in incarnations and node.attached]
        return any(digest not in node.adapters and digest not in node.refused_adapters for node in nodes)

    def may_be_acknowledged(self, digest: str) -> bool:
        """Whether a node may acknowledge this adapter soon: it has not said so yet, or there is no node at present."""
        nodes = [node for node in self._nodes.values() if node.attached and node.runs_legs]
        return not nodes or any(digest not in node.adapters and digest not in node.refused_adapters for node in nodes)

    def detached(self, incarnation: str, reason: str, now: float) -> None:
        """The stream to a node is gone, or the node does not answer."""
        node = self._nodes.get(incarnation)
        if node is None:
            return
        node.attached = False
        self._described = None
        self._takers_changed()
        self._candidate_changed(node)
        node.forget_ours()
        node.detail = reason
        if node.description is not None and node.runs_legs:
            self._note_size(node.description, now)
        if node.lost_at is None:
            node.lost_at = now
            self._forget_at = -math.inf
        if node.cordoned:
            self.on_cordoned_work()

    def _takers_changed(self) -> None:
        """Other nodes take work than before, or nodes with other descriptions."""
        self._is_left_out_known = False
        self._served_by = self._abilities = self._has_prefills = None

    def _candidate_changed(self, node: KnownNode) -> None:
        """The node's candidate has changed, and is made again when it is needed."""
        self._changed.add(node.record.incarnation)

    def _note_size(self, description: NodeDescription, now: float) -> None:
        self._sizes[size_of(description)] = now

    def could_hold(self, demand: Demand, now: float) -> bool:
        """Whether a node that is attached, or was so within `SIZE_REMEMBERED_S`, is large enough for the request."""
        return any(size.holds(demand) for size in self.sizes(now))

    def sizes(self, now: float) -> set[NodeSize]:
        """The sizes of all nodes that are attached, or were within `SIZE_REMEMBERED_S`, of versions that may serve."""
        recent = {size for size, seen_at in self._sizes.items() if now - seen_at < SIZE_REMEMBERED_S}
        all_sizes, served_by = recent | {size_of(node) for node in self.descriptions()}, self.served_by()
        other_bits = {node.bits for node in self.descriptions()} - {node.bits for node in served_by}
        return {size for size in all_sizes if size.bits not in other_bits}

    def dispatched(self, incarnation: str, attempt: AttemptKey, num_sequences: int = 1, num_tokens: int = 0) -> None:
        """A leg with so many sequences was sent to a node. `num_tokens`: the tokens for which it needs blocks there; 0:
        it has all that it needs.
        """
        node = self._nodes.get(incarnation)
        if node is None:
            return
        if node.description is not None and (seats := node.description.max_num_seqs):
            # Its further sequences are held back on the node, and take no room from other requests.
            num_sequences = min(num_sequences, most_at_once(seats))
        if node.description is not None and num_tokens:
            stripes = num_tokens // node.description.block_size + num_sequences
            node.unreported.add(attempt, stripes * max(1, node.description.kv_groups))
        self._chosen += 1
        node.ours += num_sequences - node.in_flight.get(attempt, 0)
        node.in_flight[attempt] = num_sequences
        node.last_chosen = self._chosen
        self._candidate_changed(node)

    def released(self, incarnation: str, attempt: AttemptKey) -> None:
        """A leg has ended. Idempotent."""
        node = self._nodes.get(incarnation)
        if node is not None and attempt in node.in_flight:
            node.ours -= node.in_flight.pop(attempt)
            node.unreported.remove(attempt)
            self._candidate_changed(node)
            if node.cordoned:
                self.on_cordoned_work()

    def forget_lost(self, now: float) -> None:
        """Drop nodes that are neither registered nor attached and have been shown long enough."""
        if now < self._forget_at:
            return
        self._forget_at = math.inf
        for incarnation, node in list(self._nodes.items()):
            if node.registered or node.attached:
                continue
            if node.lost_at is None or now - node.lost_at >= LOST_SHOWN_S:
                del self._nodes[incarnation]
                self._ordered = self._described = None
            else:
                self._forget_at = min(self._forget_at, node.lost_at + LOST_SHOWN_S)

    def candidates(self) -> Candidates:
        """The nodes that take work now, in a stable order; the same object until one of them changes.

        Those with `is_left_out` take only streams that nodes of their version began.
        """
        self._why_left_out()
        if self._ordered is None or self._changed:
            self._candidates = self._updated_candidates(self._candidates)
        return self._candidates

    def _updated_candidates(self, before: Candidates) -> Candidates:
        are_same = self._ordered is not None
        if self._ordered is None:
            self._ordered = {incarnation: number for number, incarnation in enumerate(sorted(self._nodes))}
            self._slots = [None] * len(self._ordered)
            self._with_free_seats.clear()
            self._changed = set(self._ordered)
        changed = []
        for incarnation in self._changed:
            number, is_left_out = self._ordered[incarnation], incarnation in self._left_out
            candidate = self._nodes[incarnation].candidate(self._rules, is_left_out=is_left_out)
            self._count_full(self._slots[number], candidate)
            are_same &= (candidate is None) is (self._slots[number] is None)
            self._slots[number] = candidate
            (self._with_free_seats.add if has_free_seat(candidate) else self._with_free_seats.discard)(incarnation)
            if candidate is not None:
                changed.append(candidate)
        self._changed.clear()
        if not are_same:
            return Candidates(filter(None, self._slots), before.marker, None)
        has_all = len(before) == len(self._slots)
        nodes = cast("list[Candidate]", self._slots) if has_all else filter(None, self._slots)
        return Candidates(nodes, before.marker, changed)

    def _why_left_out(self) -> Mapping[str, str]:
        """Why nodes that take work get no new requests, by incarnation."""
        if self._is_left_out_known and self._passes_at < math.inf and self._clock() >= self._passes_at:
            self._takers_changed()
            # Requests that wait for a node may have one now.
            self._described = None
        if not self._is_left_out_known:
            ready = [node for node in self._nodes.values() if node.runs_legs and node.state is NodeState.READY]
            is_mixed = len({node.version for node in ready}) > 1
            nodes = [
                Registered(entry.description, entry.record.start_number)
                for entry in ready
                if entry.description is not None
            ]
            across = self._across
            self._serving = serving_versions(
                nodes, self._serving, self._clock(), needs_pairs=self._needs_pairs, across=across
            )
            self._passes_at = min((version.passes_at for version in self._serving.values()), default=math.inf)
            before, self._left_out = self._left_out, {}
            if is_mixed:
                self._left_out = left_out(nodes, self._serving, across=across)
            self._changed.update(
                incarnation for incarnation in before.keys() ^ self._left_out.keys() if incarnation in self._nodes
            )
            self._is_left_out_known = True
        return self._left_out

    @property
    def has_free_seats(self) -> bool:
        """Whether a node that takes work could run one more stream at once."""
        self.candidates()
        return bool(self._with_free_seats)

    def may_continue(self, origin: Origin) -> bool:
        """Whether a node that takes work may continue a stream of this origin."""
        origin = origin.widened or origin
        return any(origin.allows(candidate.node) for candidate in self.candidates())

    def _count_full(self, before: Candidate | None, after: Candidate | None) -> None:
        if after is not None and after.lack is not None and (before is None or before.lack is None):
            self.num_full[after.lack] += 1

    def takes_hand_offs(self, incarnation: str) -> bool:
        """Whether this is a decode node, and there are prefill nodes."""
        node = self._nodes.get(incarnation)
        is_decode = node is not None and node.description is not None and node.description.role is Role.DECODE
        if self._has_prefills is None:
            self._has_prefills = any(each.role is Role.PREFILL for each in self.descriptions())
        return is_decode and self._has_prefills

    def why_full(self, incarnation: str, *, has_prompt: bool = True, goes_ahead: bool = False) -> str:
        """Why a further request would only wait on the node, as the rest of a sentence; empty: it has room.

        `has_prompt`: its prompt is to be computed there; `goes_ahead`: it goes ahead of those that wait there for
        seats.
        """
        node = self._nodes.get(incarnation)
        if node is None or node.description is None:
            return "is gone"
        lack = node.lack(self._rules, goes_ahead=goes_ahead)
        return "" if lack is None or (lack is Lack.TOKENS and not has_prompt) else lack.story

    def descriptions(self) -> tuple[NodeDescription, ...]:
        """The descriptions of all attached nodes that run legs; the same tuple until one comes or goes."""
        if self._described is None:
            attached = (node for node in self._nodes.values() if node.attached and node.runs_legs)
            self._described = tuple(node.description for node in attached if node.description is not None)
        return self._described

    @property
    def num_attached(self) -> int:
        """Number of attached nodes, encode nodes included."""
        return sum(node.attached for node in self._nodes.values())

    def encoders(self) -> Sequence[LoadedEncoder]:
        """The encode nodes that take work."""
        ready = (node for node in self._nodes.values() if not node.runs_legs and node.state is NodeState.READY)
        loads = ((node.description, node.load.running + node.load.waiting) for node in ready)
        return [LoadedEncoder(description, load) for description, load in loads if description is not None]

    def served_by(self) -> tuple[NodeDescription, ...]:
        """The descriptions of the attached nodes of the versions that get new requests, whether or not they take work.

        Of a model without a node that takes work, all attached ones. The same tuple until something changes.
        """
        self._why_left_out()
        if self._served_by is None or self._described is None:
            served = [candidate.node for candidate in self.candidates() if not candidate.is_left_out]
            models, versions = {node.model for node in served}, {(node.model, node.bits) for node in served}
            self._served_by = tuple(
                node for node in self.descriptions() if node.model not in models or (node.model, node.bits) in versions
            )
        return self._served_by

    def attached_nodes(self) -> Sequence[KnownNode]:
        """The attached nodes of the versions that get new requests; not to be changed."""
        left_out = self._why_left_out()
        return [node for incarnation, node in self._nodes.items() if node.attached and incarnation not in left_out]

    def state(self, incarnation: str) -> NodeState | None:
        """The state of one incarnation; None if it is unknown."""
        node = self._nodes.get(incarnation)
        return None if node is None else node.state

    def statuses(self, now: float, wall: float) -> tuple[NodeStatus, ...]:
        """All nodes as operators see them, by name. `wall`: wall-clock time in seconds."""
        self.forget_lost(now)
        nodes = sorted(self._nodes.values(), key=lambda n: (n.record.name, n.record.started_at))
        partners: dict[str, dict[tuple[Role, KVFormat], NodeDescription]] = {}
        for node in self._nodes.values():
            if node.attached and node.runs_legs and node.description is not None and node.version is not None:
                version, of_role = version_of(node.description, across=self._across), node.description.role
                partners.setdefault(version, {}).setdefault((of_role, node.version[2]), node.description)
        return tuple(self._status(node, wall, partners) for node in nodes)

    def _status(self, node: KnownNode, wall: float, partners: Partners) -> NodeStatus:
        record, load = node.record, node.load
        state, why_left_out = node.state, self._why_left_out().get(record.incarnation, "")
        if why_left_out:
            state = NodeState.INCOMPATIBLE
        return NodeStatus(
            name=record.name,
            role=record.role,
            status=state.value,
            incarnation=record.incarnation,
            address=record.address,
            pid=record.pid,
            model=record.model,
            running=load.running if node.attached else 0,
            waiting=load.waiting + load.waiting_for_remote_kvs if node.attached else 0,
            kv_usage=load.kv_usage if node.attached else 0.0,
            version=record.version,
            age_s=max(0.0, wall - record.started_at),
            total_blocks=load.total_blocks,
            free_blocks=load.free_blocks,
            leased_blocks=load.leased_blocks,
            quarantined_blocks=load.quarantined_blocks,
            detail=node.detail
            or self._role_change(node)
            or node.notice
            or why_left_out
            or self._limits(node, partners),
            bit_exact=record.bit_exact,
            is_verified=record.is_verified,
            cordoned=node.cordoned,
            desired_role=self._desired.role_of(record.name) or "",
            in_flight=len(node.in_flight),
            tp=record.tp,
            capabilities=in_order(node.description.can) if node.description is not None else (),
            pp=record.pp,
            bits=node.description.bits if node.description is not None else "",
        )

    def _limits(self, node: KnownNode, partners: Partners) -> str:
        """What a node that gets new requests can't do, or does not promise."""
        description = node.description
        if description is None or not node.attached or not node.runs_legs:
            return ""
        others = [*partners[version_of(description, across=self._across)].values()]
        if why_alone := disagreement(description, others, across=self._across):
            return why_alone
        if not description.bit_exact:
            return "is not bit-exact: a stream that it began goes on at no other node"
        if self._across and disagreement(description, others):
            return "pairs across numerics alone: what it computes with others is not bit-exact"
        return ""

    def _role_change(self, node: KnownNode) -> str:
        role = self._desired.role_of(node.record.name)
        is_changing = node.attached and role not in (None, node.record.role)
        return f"becomes a {role} node when its work is done" if is_changing else ""

    def leaving(self) -> frozenset[str]:
        """The incarnations of attached nodes that are to be empty: they drain, or are cordoned."""
        states = (NodeState.DRAINING, NodeState.CORDONED)
        return frozenset(name for name, node in self._nodes.items() if node.runs_legs and node.state in states)

    def crowded(self) -> str:
        """The incarnation of a decode node that is full while another one of its version has much room; empty: there
        is none."""
        ready = [node for node in self._nodes.values() if node.state is NodeState.READY and node.runs_legs]
        decodes = [node for node in ready if node.record.role == Role.DECODE.value]
        full = [node for node in decodes if node.lack(self._rules) in (Lack.SEATS, Lack.KV)]
        if not full:
            return ""
        source = max(full, key=lambda node: node.pressure)
        others = [node.pressure for node in decodes if node.version == source.version and node is not source]
        is_crowded = min(others, default=math.inf) <= source.pressure - CROWDED_BY
        return source.record.incarnation if is_crowded else ""

    @property
    def cordoned(self) -> list[str]:
        """The names of cordoned nodes that are attached."""
        return sorted({node.record.name for node in self._nodes.values() if node.cordoned and node.attached})

    def node_snapshots(self) -> Iterator[tuple[str, tuple[str, str, str, NodeState, str, str, bool, str]]]:
        """For each incarnation its name, role, address, state, why it is lost, its notice, whether it drained, and why
        it gets no new requests though it takes work.
        """
        left_out = self._why_left_out()
        for incarnation, node in self._nodes.items():
            record, state = node.record, node.state
            drained = node.load.draining or record.state == "draining"
            named = record.name, record.role, record.address
            yield incarnation, (*named, state, node.detail, node.notice, drained, left_out.get(incarnation, ""))
