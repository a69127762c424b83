"""The diagrams of ARCHITECTURE.md, made from the tables that the code runs on. Run by scripts/diagrams."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from baton.cli.cluster.supervisor.restart import CHILD_TABLE, ChildState
from baton.engine.request import ENDS_OF_ALL, REQUEST_TABLE, RequestStatus
from baton.machine import render_mermaid
from baton.node.attempts.attempts import ATTEMPT_TABLE, AttemptState
from baton.node.lifecycle import NODE_TABLE, NodeState
from kv_transfer.receiver.transfer_machine import TRANSFER_TABLE, TransferState
from kv_transfer.sender.lease_machine import LEASE_TABLE, LeaseState
from router.flight.flight_table import FLIGHT_TABLE, FlightState
from router.placement.breaker import BREAKER_TABLE, BreakerState

PAGE = Path(__file__).parent.parent / "ARCHITECTURE.md"
DIAGRAMS = {
    "request": render_mermaid(
        RequestStatus.WAITING,
        {(state, event): after for (state, event), after in REQUEST_TABLE.items() if event not in ENDS_OF_ALL},
    ),
    "flight": render_mermaid(FlightState.PLACING, FLIGHT_TABLE),
    "breaker": render_mermaid(BreakerState.CLOSED, BREAKER_TABLE),
    "attempt": render_mermaid(AttemptState.RUNNING, ATTEMPT_TABLE),
    "lease": render_mermaid(LeaseState.GRANTED, LEASE_TABLE),
    "transfer": render_mermaid(TransferState.PLANNED, TRANSFER_TABLE),
    "node": render_mermaid(NodeState.STARTING, NODE_TABLE),
    "child": render_mermaid(ChildState.STARTING, CHILD_TABLE),
}


def render(page: str) -> str:
    """The page with each diagram between its markers; raises KeyError for a marker without a machine."""
    pattern = re.compile(r"(<!-- diagram: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
    return pattern.sub(lambda m: f"{m[1]}```mermaid\n{DIAGRAMS[m[2]]}\n```\n{m[3]}", page)


def main() -> int:
    """Write the page, or compare it with `--check`."""
    before = PAGE.read_text(encoding="utf-8")
    missing = [name for name in DIAGRAMS if f"<!-- diagram: {name} -->" not in before]
    if missing:
        print(f"scripts/diagrams: ARCHITECTURE.md has no place for {', '.join(missing)}", file=sys.stderr)
        return 1
    after = render(before)
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(after, encoding="utf-8")
    elif after != before:
        print("scripts/diagrams: ARCHITECTURE.md is out of date; run scripts/diagrams", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
