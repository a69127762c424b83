"""Rows of leases and requests, as lists and pages show them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from baton.cli.output import fine_duration

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
