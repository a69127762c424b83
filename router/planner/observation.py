"""What a router shows its planner of the cluster: its view, the rates that it has learnt, and what waits. No I/O."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from statistics import fmean

from baton.messages.node import NodeDescription, Role
from router.attainment import Kept
from router.flight.active_request import ActiveRequest
from router.live_requests import LiveRequests
from router.placement.cost_model import ServiceLevel, chunk_of
from router.placement.fleet_rates import UsualRates
from router.placement.known_node import KnownNode, NodeState
from router.placement.placement import Candidate, takes_no_stream
from router.placement.rates import StepRates
from router.placement.view import ClusterView
from router.planner.capacity import USUAL_TARGET_MS, Capacity, NodeCapacity
from router.planner.demand import DemandMeter
from router.planner.moves import PlannedNode
from router.planner.planner import Backlog, Observation
from router.timers import Timers


def observe(
    view: ClusterView, requests: LiveRequests, cordoned: Set[str], assigned: Set[str], settle_s: float
) -> Observation:
    """What a planner is to know now.

    `cordoned` and `assigned`: names of nodes that operators have cordoned, or given a role. `settle_s`: within so many
    seconds all routers know that a node is cordoned.
    """
    attached = [(node, node.description) for node in view.attached_nodes() if node.description is not None]
    # An encode node has its model's encoder alone: it neither moves nor sustains tokens.
    nodes = [(node, one) for node, one in attached if one.role is not Role.ENCODE]
    usual = {one.incarnation: requests.placer.usual_rates(one.incarnation) for _, one in nodes}
    target = requests.placer.target
    knows_both = all(one.num_prompt_steps and one.num_decode_steps for one in usual.values())
    return Observation(
        nodes=[_planned(node, one, cordoned, assigned) for node, one in nodes],
        capacity=_capacity([one for _, one in nodes], usual, target),
        num_steps=min((one.num_steps for one in usual.values()), default=0) if knows_both else 0,
        backlog=_backlog(view.candidates(), requests.num_waiting),
        settle_s=settle_s,
        encoders=[_planned(node, one, cordoned, assigned) for node, one in attached if one.role is Role.ENCODE],
    )


def _planned(node: KnownNode, description: NodeDescription, cordoned: Set[str], assigned: Set[str]) -> PlannedNode:
    name, load = description.node_id, node.load
    num_requests = load.running + load.waiting + load.waiting_for_remote_kvs + node.ours
    encodes, num_inputs = description.role is Role.ENCODE, load.running + load.waiting
    return PlannedNode(
        name=name,
        incarnation=description.incarnation,
        role=description.role,
        work=float(num_inputs if encodes else load.context_tokens + load.uncomputed_tokens),
        is_idle=not (num_requests or load.leased_blocks or load.quarantined_blocks),
        is_ready=node.state in (NodeState.READY, NodeState.CORDONED) and name not in cordoned,
        is_operators=name in cordoned or name in assigned,
    )


def _backlog(candidates: Sequence[Candidate], num_waiting: int) -> Backlog:
    """What waits at the router waits for the role of which all nodes are full."""
    prefills = [one for one in candidates if one.node.role is Role.PREFILL]
    decodes = [one for one in candidates if one.node.role is Role.DECODE]
    return Backlog(
        prompt_tokens=sum(one.uncomputed_tokens for one in prefills),
        num_for_prefill=num_waiting if all(one.lack is not None for one in prefills) else 0,
        num_for_decode=num_waiting if all(map(takes_no_stream, decodes)) else 0,
    )


def _capacity(
    nodes: Sequence[NodeDescription], usual: Mapping[str, UsualRates], target: ServiceLevel
) -> Capacity | None:
    """What the nodes of each role sustain; None without any node. A role without nodes has those of the other one."""
    if not nodes:
        return None
    prefills = [node for node in nodes if node.role is Role.PREFILL]
    decodes = [node for node in nodes if node.role is Role.DECODE]
    first_token_ms = target.first_token_ms if target.first_token_ms < math.inf else USUAL_TARGET_MS
    usual_prefill, usual_decode = _usual(prefills or decodes, usual), _usual(decodes or prefills, usual)
    return Capacity(usual_prefill, usual_decode, target.token_ms, first_token_ms)


def _usual(nodes: Sequence[NodeDescription], usual: Mapping[str, UsualRates]) -> NodeCapacity:
    """The mean of these nodes."""
    rates = [usual[node.incarnation].rates for node in nodes]
    return NodeCapacity(
        rates=StepRates(
            fmean(one.step_ms for one in rates),
            fmean(one.token_ms for one in rates),
            fmean(one.sequence_ms for one in rates),
            fmean(one.context_ms for one in rates),
            fmean(one.rows for one in rates),
            fmean(one.tokens for one in rates),
        ),
        chunk=round(fmean(map(chunk_of, nodes))),
        kv_tokens=fmean(node.num_blocks * node.block_size for node in nodes),
        seats=fmean(node.max_num_seqs or float("inf") for node in nodes),
    )


def meter_requests(meter: DemandMeter, requests: LiveRequests, timers: Timers) -> None:
    """Count the requests of a router as they arrive and end."""

    def on_admitted(active: ActiveRequest) -> None:
        meter.arrived(active.request.num_prompt_tokens, timers.monotonic())

    def on_ended(active: ActiveRequest, kept: Kept | None) -> None:
        now = timers.monotonic()
        if kept is not None:
            meter.kept(kept, now)
        if active.finish is not None:
            finish, finished = active.finish
            meter.ended(finished.prompt_tokens, finish.timings.cached_tokens, finished.completion_tokens, now)

    requests.on_admitted.add(on_admitted)
    requests.on_ended.add(on_ended)
