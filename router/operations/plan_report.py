"""What a router tells operators of its planner: the answer to `baton get plan`, and the metrics. No I/O."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from baton.messages.node import Role
from baton.messages.operator import PlannedGrowth, PlannedMove, PlannedPool, PlanReport
from baton.observe.metrics import Figure
from router.planner.moves import ENDS, OUT
from router.planner.planner import Plan, Planner
from router.planner.scaling import GROWTH_ENDS, Scaling
from router.scalers.scaler import ScalerFault

_MOST_SHOWN = 1e6
"""The pressure that is shown where a role has no node."""
_POOLS = ("prefill", "decode", "encode")
"""The pools that grow."""


def plan_report(planner: Planner, plan: Plan | None, mode: str, *, leads: bool, why_not: str, now: float) -> PlanReport:
    """What was decided last. `why_not`: why this router does not plan."""
    if not leads or plan is None:
        return PlanReport(mode, leads, why_not)
    encoders, scaling = planner.encoders, planner.scaling
    common = PlanReport(
        mode,
        leads=True,
        reason=_joined(plan.why_not, "" if scaling is None else scaling.told(now)),
        moves=_moves_of(planner, now),
        pools=() if scaling is None else _pools_of(scaling, now),
        growths=() if scaling is None else _growths_of(scaling, now),
        encode_nodes=encoders.num_nodes,
        wanted_encode_nodes=encoders.wanted,
        encode_pressure=encoders.pressure,
        wanted_encode_pressure=encoders.pressure_with(encoders.wanted),
    )
    if plan.verdict is None or plan.situation is None:
        return common
    verdict, situation = plan.verdict, plan.situation
    return replace(
        common,
        reason=_joined(verdict.reason, common.reason),
        prefill_nodes=situation.num_prefill,
        decode_nodes=situation.num_decode,
        wanted_prefill_nodes=verdict.wanted_prefill,
        wanted_decode_nodes=verdict.size.wanted - verdict.wanted_prefill,
        prefill_pressure=min(verdict.now.prefill, _MOST_SHOWN),
        decode_pressure=min(verdict.now.decode, _MOST_SHOWN),
        wanted_prefill_pressure=verdict.wanted.prefill,
        wanted_decode_pressure=verdict.wanted.decode,
        requests_per_s=situation.load.requests_per_s,
        prompt_tokens=situation.load.prompt_tokens,
        output_tokens=situation.load.output_tokens,
        attained=situation.attained.share,
    )


def plan_figures(planner: Planner, report: PlanReport) -> Iterator[Figure]:
    """The metrics, for the metrics page."""
    yield Figure("planner_leads", "Whether this router plans moves.", float(report.leads), {})
    of_roles = (
        (Role.PREFILL, report.prefill_pressure, report.prefill_nodes, report.wanted_prefill_nodes),
        (Role.DECODE, report.decode_pressure, report.decode_nodes, report.wanted_decode_nodes),
        (Role.ENCODE, report.encode_pressure, report.encode_nodes, report.wanted_encode_nodes),
    )
    for role, pressure, present, wanted in of_roles:
        labels = {"role": role.value}
        text = "How busy the nodes of a role are with the load that is expected; 1: fully; 0 where nothing is planned."
        yield Figure("planner_pressure", text, pressure, labels)
        text = "Nodes of a role, once all moves have ended; 0 at routers that don't plan."
        yield Figure("planner_nodes", text, present, labels)
        text = "Nodes of a role that the planner wants; 0 at routers that don't plan."
        yield Figure("planner_nodes_wanted", text, wanted, labels)
    text = "Moves of nodes to a role, or out of the cluster (none), that have ended, by how."
    for to, end in product((*Role, None), ENDS):
        labels = {"to": OUT if to is None else to.value, "end": end.value}
        yield Figure("planner_moves_total", text, planner.book.num_ended[to, end], labels)
    scaling = planner.scaling
    text = "Growths of a pool of nodes that have ended, by how."
    for pool, growth_end in product(_POOLS, GROWTH_ENDS):
        count = 0 if scaling is None else scaling.num_ended[pool, growth_end]
        yield Figure("planner_growths_total", text, count, {"pool": pool, "end": growth_end.value})
    text = "Calls of a scaler that failed, by why."
    for fault in ScalerFault:
        count = 0 if scaling is None else scaling.num_failures[fault]
        yield Figure("planner_scaler_failures_total", text, count, {"fault": fault.value})


def _joined(*parts: str) -> str:
    return "; ".join(filter(None, parts))


def _moves_of(planner: Planner, now: float) -> tuple[PlannedMove, ...]:
    book = planner.book
    return tuple(
        PlannedMove(
            move.name,
            move.origin.value,
            OUT if move.to is None else move.to.value,
            move.state.value,
            move.reason,
            now - move.began_at,
            (now if move.ended_at is None else move.ended_at) - move.began_at,
        )
        for move in sorted([*book.ended, *book.moves], key=lambda one: -one.began_at)
    )


def _growths_of(scaling: Scaling, now: float) -> tuple[PlannedGrowth, ...]:
    return tuple(
        PlannedGrowth(
            growth.pool,
            growth.before,
            growth.after,
            growth.state.value,
            growth.reason,
            now - growth.began_at,
            (now if growth.ended_at is None else growth.ended_at) - growth.began_at,
        )
        for growth in sorted([*scaling.ended, *scaling.growths], key=lambda one: -one.began_at)
    )


def _pools_of(scaling: Scaling, now: float) -> tuple[PlannedPool, ...]:
    return tuple(PlannedPool(name, size.want, size.have, size.next_out) for name, size in scaling.known(now).items())
