"""Metrics of hand-offs, for a node's metrics page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from baton.errors import TransferCause
from baton.messages.node_report import FailedProbe, HandoffReport, MeasuredPair, RefusedLink
from baton.observe.metrics import Distribution, Figure, Histogram, by_label, declared_figures
from kv_transfer.receiver.transfer_values import TRANSFER_TABLE, ReadHistograms, TransferState

_LIVE_STATES = [state for state in TransferState if any(before is state for before, _ in TRANSFER_TABLE)]


def transfer_figures(report: HandoffReport) -> list[Figure]:
    """Metrics of a reader's transfers: those that are open, by state, and those that ended, by sender and outcome."""
    states = Counter(handoff.state for handoff in report.open)
    by_state = {state.name.lower(): states[state.name] for state in _LIVE_STATES}
    oldest_s = max((handoff.age_s for handoff in report.open), default=0.0)
    ended = "Transfers that ended, by sender and outcome: arrived, or the cause of the failure."
    return [
        *by_label("kv_open_transfers", "Transfers that are not over, by state.", "state", by_state),
        Figure("kv_transfer_age_seconds", "Age of the oldest open transfer; 0: there is none.", oldest_s, {}),
        *(Figure("kv_transfers_total", ended, e.count, {"peer": e.peer, "outcome": e.outcome}) for e in report.ended),
    ]


def failure_figures(failures: Mapping[tuple[str, TransferCause], int]) -> list[Figure]:
    """Metrics of prompts whose KV did not come to a reader, by cause and by each sender that had any."""
    text = "Prompts whose KV did not come, by cause and sender."
    wrong = sum(count for (_, cause), count in failures.items() if cause is TransferCause.DIGEST_MISMATCH)
    return [
        Figure("kv_digest_mismatch_total", "Prompts whose blocks were not what their sender computed.", wrong, {}),
        *(
            Figure("kv_transfer_failures_total", text, count, {"cause": cause.value, "peer": peer})
            for (peer, cause), count in sorted(failures.items(), key=lambda item: (item[0][0], item[0][1].value))
        ),
    ]


def handshake_figures(handshakes: Mapping[str, Histogram]) -> list[Distribution]:
    """Metrics of how long it took until senders could be used."""
    text = "Time from opening a link until the sender could be used, including the join probe if there was one."
    return [seconds.now("kv_handshake_seconds", text, {"peer": peer}) for peer, seconds in sorted(handshakes.items())]


def read_figures(reads: Mapping[str, ReadHistograms]) -> list[Figure | Distribution]:
    """Metrics of a reader's reads, by sender; the sum of bytes over the sum of seconds is the bandwidth."""
    return [
        figure for peer, histograms in sorted(reads.items()) for figure in declared_figures(histograms, {"peer": peer})
    ]


def refusal_figures(refused: Sequence[RefusedLink]) -> list[Figure]:
    """Metrics of links that were refused and have not opened since."""
    text = "Links to this peer that were refused since the last one that opened."
    return [Figure("kv_refused_links", text, link.count, {"peer": link.peer, "cause": link.cause}) for link in refused]


def pair_figures(pairs: Sequence[MeasuredPair]) -> list[Figure]:
    """Metrics of how fast KV of each peer is read."""
    text = "Bytes of this peer's KV that are read in a second, by the latest probe, by the transport that moves them."
    return [
        Figure("kv_pair_bytes_per_second", text, pair.bytes_per_second, {"peer": pair.peer, "lane": pair.lane})
        for pair in pairs
    ]


def probe_figures(outcomes: Mapping[tuple[str, str], int], failed: Sequence[FailedProbe]) -> list[Figure]:
    """Metrics of join probes: how they ended, by peer and outcome, and peers whose last one failed."""
    ended = "Probes of known bytes with this peer that ended, by outcome: passed, or the fault."
    stands = "Probes of known bytes with this peer that failed in a row; the pair is not used before one passes."
    return [
        *(
            Figure("kv_probes_total", ended, count, {"peer": peer, "outcome": outcome})
            for (peer, outcome), count in sorted(outcomes.items())
        ),
        *(
            Figure("kv_failed_probes", stands, failure.count, {"peer": failure.peer, "fault": failure.fault.value})
            for failure in failed
        ),
    ]
