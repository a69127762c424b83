"""What hand-offs count, for a node's metrics page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from baton.errors import TransferCause
from baton.observe.metrics import Figure, by_label
from baton.rpc.messages import HandoffReport
from kv_transfer.read_totals import ReadTotals
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


def failure_figures(failures: Mapping[tuple[str, TransferCause], int]) -> list[Figure]:
    """Prompts whose KV did not come to a reader; those of each sender that had any."""
    text = "Prompts whose KV did not come, by cause and sender."
    wrong = sum(count for (_, cause), count in failures.items() if cause is TransferCause.DIGEST_MISMATCH)
    return [
        Figure("kv_digest_mismatch_total", "Prompts whose blocks were not what their sender computed.", wrong, {}),
        *(
            Figure("kv_transfer_failures_total", text, count, {"cause": cause.value, "peer": peer})
            for (peer, cause), count in sorted(failures.items(), key=lambda item: (item[0][0], item[0][1].value))
        ),
    ]


def handshake_figures(handshakes: Mapping[str, float]) -> list[Figure]:
    """What it took to have a sender's memory readable, the latest of each."""
    text = "From opening the latest link to its sender's memory being readable."
    return [
        Figure("kv_handshake_seconds", text, seconds, {"peer": peer}) for peer, seconds in sorted(handshakes.items())
    ]


def read_figures(totals: Mapping[str, ReadTotals]) -> list[Figure]:
    """What a reader's reads took, by sender; bytes over seconds are the bandwidth."""
    said: list[tuple[str, str, Callable[[ReadTotals], float]]] = [
        ("kv_reads_total", "Reads that brought their bytes.", lambda total: total.num_reads),
        ("kv_transfer_seconds_total", "What they took, on this node's clock.", lambda total: total.read_s),
        ("kv_transfer_post_seconds_total", "Of it, what posting them took.", lambda total: total.post_s),
        ("kv_transfer_bytes_total", "Bytes that they brought.", lambda total: total.num_bytes),
        ("kv_transfer_descriptors_total", "Descriptors that were posted for them.", lambda total: total.num_ranges),
    ]
    return [
        Figure(name, text, of(total), {"peer": peer})
        for name, text, of in said
        for peer, total in sorted(totals.items())
    ]


def refusal_figures(report: HandoffReport) -> list[Figure]:
    """Links that were refused and have not opened since."""
    text = "Links to this peer that were refused since the last one that opened."
    return [
        Figure("kv_refused_links", text, link.count, {"peer": link.peer, "cause": link.cause})
        for link in report.refused_links
    ]
