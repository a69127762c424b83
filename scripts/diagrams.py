"""Renders the diagrams of docs/states.md from the tables that the code runs on. Run by scripts/diagrams."""

from __future__ import annotations

import sys
from pathlib import Path

from generated_parts import keep, names_in, rendered

from baton.cli.cluster.supervisor.child import CHILD_TABLE, ChildState
from baton.engine.request import ENDS_OF_ALL, REQUEST_TABLE, RequestStatus
from baton.machine import render_mermaid
from baton.node.adapters.adapter_cache import ADAPTER_TABLE, AdapterState
from baton.node.attempts.attempts import ATTEMPT_TABLE, AttemptState
from baton.node.lifecycle import NODE_TABLE, NodeState
from kv_transfer.mover.merge_values import MERGE_TABLE, MergeState
from kv_transfer.receiver.probe_values import PROBE_TABLE, ProbeState
from kv_transfer.receiver.transfer_values import TRANSFER_TABLE, TransferState
from kv_transfer.sender.lease_values import LEASE_TABLE, LeaseState
from router.flight.flight_table import FLIGHT_TABLE, FlightState
from router.placement.breaker import BREAKER_TABLE, BreakerState
from router.planner.moves import MOVE_TABLE, MoveState
from router.planner.scaling import GROWTH_TABLE, GrowthState

PAGE = Path(__file__).parent.parent / "docs" / "states.md"
DIAGRAMS = {
    "request": render_mermaid(
        RequestStatus.WAITING,
        {(state, event): after for (state, event), after in REQUEST_TABLE.items() if event not in ENDS_OF_ALL},
    ),
    "flight": render_mermaid(FlightState.PLACING, FLIGHT_TABLE),
    "breaker": render_mermaid(BreakerState.CLOSED, BREAKER_TABLE),
    "move": render_mermaid(MoveState.PLANNED, MOVE_TABLE),
    "growth": render_mermaid(GrowthState.ASKING, GROWTH_TABLE),
    "attempt": render_mermaid(AttemptState.RUNNING, ATTEMPT_TABLE),
    "lease": render_mermaid(LeaseState.UNKNOWN, LEASE_TABLE),
    "probe": render_mermaid(ProbeState.ASKED, PROBE_TABLE),
    "transfer": render_mermaid(TransferState.PLANNED, TRANSFER_TABLE),
    "divided_read": render_mermaid(MergeState.READING, MERGE_TABLE),
    "adapter": render_mermaid(AdapterState.QUEUED, ADAPTER_TABLE),
    "node": render_mermaid(NodeState.STARTING, NODE_TABLE),
    "child": render_mermaid(ChildState.STARTING, CHILD_TABLE),
}


def main() -> int:
    """Writes the page, or compares it with `--check`; returns 1 if a diagram has no place or the page is outdated."""
    before = PAGE.read_text(encoding="utf-8")
    places = names_in(before, "diagram")
    if wrong := [f"no place for {name}" for name in DIAGRAMS if name not in places]:
        print(f"scripts/diagrams: docs/states.md has {', '.join(wrong)}", file=sys.stderr)
        return 1
    if wrong := [name for name in places if name not in DIAGRAMS]:
        print(
            f"scripts/diagrams: docs/states.md has a place for {', '.join(wrong)}, which has no table", file=sys.stderr
        )
        return 1
    after = rendered(before, "diagram", {name: f"```mermaid\n{text}\n```\n" for name, text in DIAGRAMS.items()})
    return keep(PAGE, after, only_compare="--check" in sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
