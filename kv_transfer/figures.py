"""What hand-offs count, for a node's metrics page."""

from __future__ import annotations

from collections import Counter

from baton.observe.metrics import Figure, by_label
from baton.rpc.messages import HandoffReport
from kv_transfer.transfer_machine import TRANSFER_TABLE, TransferState

_LIVE_STATES = [state for state in TransferState if any(before is state for before, _ in TRANSFER_TABLE)]


def transfer_figures(report: HandoffReport) -> list[Figure]:
    """A reader's transfers: those that are open, by state, and those that ended, by sender and outcome."""
    states = Counter(handoff.state for handoff in report.open)
    by_state = {state.name.lower(): states[state.name] for state in _LIVE_STATES}
    oldest_s = max((handoff.age_s for handoff in report.open), default=0.0)
    ended = "Transfers that ended, by sender and outcome: arrived, or why not."
    return [
        *by_label("kv_open_transfers", "Transfers that are not over, by state.", "state", by_state),
        Figure("kv_transfer_age_seconds", "Age of the oldest open transfer; 0: there is none.", oldest_s, {}),
        *(Figure("kv_transfers_total", ended, e.count, {"peer": e.peer, "outcome": e.outcome}) for e in report.ended),
        *refusal_figures(report),
    ]


def refusal_figures(report: HandoffReport) -> list[Figure]:
    """Links that were refused and have not opened since."""
    text = "Links to this peer that were refused since the last one that opened."
    return [
        Figure("kv_refused_links", text, link.count, {"peer": link.peer, "cause": link.cause})
        for link in report.refused_links
    ]
