"""What a router tells operators of its planner: the answer to `baton get plan`, and the metrics. No I/O."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from baton.messages.node import Role
from baton.messages.operator import PlannedMove, PlanReport
from baton.observe.metrics import Figure
from router.planner.encoders import EncoderDemand
from router.planner.moves import ENDS, OUT
from router.planner.planner import Plan, Planner
from router.planner.scaling import GROWTH_ENDS, Growth
from router.scalers.scaler import ScalerFault

_MOST_SHOWN = 1e6
"""The pressure that is shown where a role has no node."""
_POOLS = ("prefill", "decode")
"""The pools that grow."""


def plan_report(planner: Planner, plan: Plan | None, mode: str, *, leads: bool, why_not: str, now: float) -> PlanReport:
    """What was decided last. `why_not`: why this router does not plan."""
    if not leads or plan is None:
        return PlanReport(mode, leads, why_not)
    moves = _changes_of(planner, now)
    encoders = planner.encoders
    rows = f"encode: pressure {encoders.pressure:.2f}, {encoders.num_nodes} nodes, {encoders.wanted} wanted"
    also = _joined("" if planner.scaling is None else planner.scaling.told(now), rows if encoders.num_nodes else "")
    if plan.verdict is None or plan.situation is None:
        return PlanReport(mode, leads=True, reason=_joined(plan.why_not, also), moves=moves)
    verdict, situation = plan.verdict, plan.situation
    return PlanReport(
        mode=mode,
        leads=True,
        reason=_joined(verdict.reason, also),
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
        moves=moves,
    )


def plan_figures(planner: Planner, report: PlanReport) -> Iterator[Figure]:
    """The metrics, for the metrics page."""
    yield Figure("planner_leads", "Whether this router plans moves.", float(report.leads), {})
    encoders = planner.encoders if report.leads else EncoderDemand()
    of_roles = (
        (Role.PREFILL, report.prefill_pressure, report.prefill_nodes, report.wanted_prefill_nodes),
        (Role.DECODE, report.decode_pressure, report.decode_nodes, report.wanted_decode_nodes),
        (Role.ENCODE, encoders.pressure, encoders.num_nodes, encoders.wanted),
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


def _changes_of(planner: Planner, now: float) -> tuple[PlannedMove, ...]:
    """The changes that go on and those that have ended, the latest first; a growth of a pool looks like a move."""
    book, scaling = planner.book, planner.scaling
    moves = [
        PlannedMove(
            move.name,
            move.origin.value,
            OUT if move.to is None else move.to.value,
            move.state.value,
            move.reason,
            now - move.began_at,
            (now if move.ended_at is None else move.ended_at) - move.began_at,
        )
        for move in reversed([*book.ended, *book.moves])
    ]
    growths = [] if scaling is None else [_row_of(growth, now) for growth in [*scaling.ended, *scaling.growths]]
    return tuple(sorted([*moves, *growths], key=lambda row: row.age_s))


def _row_of(growth: Growth, now: float) -> PlannedMove:
    return PlannedMove(
        f"pool {growth.pool}",
        f"{growth.before} nodes",
        f"{growth.after} nodes",
        growth.state.value,
        growth.reason,
        now - growth.began_at,
        (now if growth.ended_at is None else growth.ended_at) - growth.began_at,
    )
