"""Rows of leases, requests and tenants, as lists and pages show them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from baton.cli.output import fine_duration
from baton.messages.operator import TenantRow, TenantRows

if TYPE_CHECKING:
    from baton.messages.node_report import NodeReport, OpenHandoff

ENDED_STATES = frozenset({"Finished", "Failed", "Cancelled"})


def oldest_first(report: NodeReport) -> list[OpenHandoff]:
    """Returns the node's leases or transfers that are not over, oldest first."""
    return sorted(report.handoff.open, key=lambda handoff: -handoff.age_s)


def lease_json(report: NodeReport, handoff: OpenHandoff) -> dict[str, Any]:
    """Returns a lease or transfer as a JSON object."""
    return {
        "node": report.node.node_id,
        "incarnation": report.node.incarnation,
        "request_id": handoff.attempt.request_id,
        "attempt": handoff.attempt.attempt,
        "flight": f"{handoff.attempt.flight:x}",
        "side": handoff.side.value,
        "state": handoff.state,
        "peer": handoff.peer,
        "peer_incarnation": handoff.peer_incarnation,
        "num_blocks": handoff.num_blocks,
        "age_s": handoff.age_s,
    }


def lease_row(report: NodeReport, handoff: OpenHandoff, *, wide: bool) -> list[str]:
    """Returns a lease or transfer as a line of a table; `wide`: with the columns of `-o wide`."""
    attempt = handoff.attempt
    row = [
        report.node.node_id,
        attempt.request_id,
        str(attempt.attempt),
        handoff.side.value,
        handoff.state,
        handoff.peer or "-",
        str(handoff.num_blocks),
        fine_duration(handoff.age_s),
    ]
    more = [report.node.incarnation, handoff.peer_incarnation or "-", f"{attempt.flight:x}"]
    return row + (more if wide else [])


def brief_ms(milliseconds: float) -> str:
    """Milliseconds as short text: `31ms`, `12s`."""
    return f"{milliseconds:.0f}ms" if milliseconds < 9950 else fine_duration(milliseconds / 1e3)


@dataclass(frozen=True, slots=True)
class TenantShare:
    """One tenant at all routers."""

    row: TenantRow
    """Sums, but the largest weight and lag of any router."""
    share: float | None
    """Its share of what all tenants were served in the last minute, 0 to 1; None: that is nothing."""


_SUMS = (
    *("running", "waiting", "served_tokens", "served_last_minute", "placed_last_minute", "waited_s_last_minute"),
    *("displaced", "refused"),
)


def tenant_shares(answers: Sequence[TenantRows]) -> list[TenantShare]:
    """The tenants of all routers, those first that were served most in the last minute."""
    by_tenant: dict[str, list[TenantRow]] = {}
    for answer in answers:
        for row in answer.tenants:
            by_tenant.setdefault(row.tenant, []).append(row)
    served = sum(answer.served_last_minute for answer in answers)
    shares = []
    for tenant, rows in by_tenant.items():
        sums: dict[str, Any] = {name: sum(getattr(row, name) for row in rows) for name in _SUMS}
        merged = TenantRow(
            tenant=tenant,
            service_class=",".join(sorted({row.service_class for row in rows if row.service_class})),
            weight=max((row.weight for row in rows if row.service_class), default=1.0),
            lag_tokens=max(row.lag_tokens for row in rows),
            **sums,
        )
        shares.append(TenantShare(merged, merged.served_last_minute / served if served else None))
    return sorted(shares, key=lambda each: (-each.row.served_last_minute, -each.row.waiting, each.row.tenant))


def tenant_json(each: TenantShare) -> dict[str, Any]:
    """A tenant as a JSON object."""
    return {**asdict(each.row), "share_last_minute": each.share, "mean_wait_s": each.row.mean_wait_s}
