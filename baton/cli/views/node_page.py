"""Renders one node with its report, as text and as JSON. Does no I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from baton.cli.output import duration, fine_duration, size, table_lines
from baton.cli.views.rows import lease_json, oldest_first
from baton.messages.adapters import NodeAdapter
from baton.messages.node import LoadReport, NodeDescription
from baton.messages.node_model import in_order
from baton.messages.node_report import (
    KV_PAIR_SLOW,
    KV_PROBE_FAILED,
    HandoffReport,
    MeasuredPair,
    NodeReport,
    RankReport,
)
from baton.messages.operator import NodeStatus
from baton.model_formats.model_types import registered_types

Field = tuple[str, str]


def node_lines(status: NodeStatus, report: NodeReport | None) -> list[str]:
    """The node as lines of text. `report` is None for a router and for a node that does not answer."""
    lines = _fields(_identity(status))
    if report is None:
        return lines
    sections = {
        "Model": _fields(_model(report.node)),
        **({"Computed by": computed_by} if (computed_by := _fields(_computed_by(report))) else {}),
        **({"Ranks": _ranks(report.ranks)} if report.ranks else {}),
        "KV cache": _fields(_kv_cache(report)),
        "Load": _fields(_load(report.load, report.waiting_by_reason)),
        **({"Adapters": _adapters(report.adapters)} if report.adapters else {}),
        **_handoff_sections(report),
    }
    for title, section in sections.items():
        lines += ["", f"{title}:", *(f"  {line}" for line in section)]
    return lines


_SMALL_READ = 1 << 20
"""A read of fewer bytes takes longer than these do."""


def node_json(status: NodeStatus, report: NodeReport | None) -> dict[str, Any]:
    """The node as a JSON object: `status` is what the router knows, `report` what the node says, or null."""
    if report is None:
        return {"status": asdict(status), "report": None}
    description, handoff = report.node, report.handoff
    document = {
        "description": asdict(description)
        | {
            "role": description.role.value,
            "eos_token_ids": sorted(description.eos_token_ids),
            "capabilities": in_order(description.can),
            "bits": description.bits,
        },
        "load": asdict(report.load),
        "waiting_by_reason": dict(report.waiting_by_reason),
        "compute_paths": [asdict(path) for path in report.compute_paths],
        "ranks": [asdict(rank) for rank in report.ranks],
        "adapters": [asdict(adapter) for adapter in report.adapters],
        "layout": handoff.layout,
        "leases": [lease_json(report, handoff) for handoff in oldest_first(report)],
        "leases_by_state": _by_state(handoff),
        "oldest_lease_age_s": _oldest_s(handoff),
        "ended_transfers": [asdict(ended) for ended in handoff.ended],
        "refused_links": [asdict(link) for link in handoff.refused_links],
        "pairs": [asdict(pair) for pair in handoff.pairs],
        "failed_probes": [asdict(probe) | {"fault": probe.fault.value} for probe in handoff.failed_probes],
    }
    return {"status": asdict(status), "report": document}


def _identity(status: NodeStatus) -> list[Field]:
    return [
        ("Name", status.name),
        ("Role", status.role),
        ("Status", status.status),
        ("Detail", status.detail),
        ("Incarnation", status.incarnation),
        ("Address", status.address),
        ("PID", str(status.pid or "")),
        ("Version", status.version),
        ("Age", duration(status.age_s)),
    ]


def _model(description: NodeDescription) -> list[Field]:
    return [
        ("Name", description.model),
        ("Type", description.model_type),
        ("Fingerprint", description.model_fingerprint),
        ("Dtype", description.dtype),
        ("Numerics", description.numerics),
        ("Bit-exact", _yes_or_why_not(description.bit_exact, description.bit_exact_reason)),
        ("Bits", description.bits),
        ("Crosses", f"to any numerics with KV of {description.kv_shape}" if description.kv_shape else "no"),
        ("Verified", _verified(description)),
        ("Longest", f"{description.max_model_len} tokens"),
        ("Can", ", ".join(in_order(description.can))),
        ("Vocabulary", f"{description.vocab_size} tokens"),
    ]


def _verified(description: NodeDescription) -> str:
    if not description.is_verified:
        return _yes_or_why_not(False, description.why_unverified)
    return "at start, and its type by tests" if description.model_type in registered_types() else "at start"


def _yes_or_why_not(is_so: bool, why_not: str) -> str:
    return "yes" if is_so else f"no: {why_not}" if why_not else "no"


def _computed_by(report: NodeReport) -> list[Field]:
    threads = [("threads", str(report.node.num_threads))] if report.node.num_threads else []
    shape = report.node.shape
    divided = [("shape", f"{shape}: {shape.num_ranks} ranks")] if shape.num_ranks > 1 else []
    return [
        *threads,
        *divided,
        *(
            (path.part, f"{path.runs} (not faster: {path.why_not_faster})" if path.why_not_faster else path.runs)
            for path in report.compute_paths
        ),
    ]


def _adapters(adapters: Sequence[NodeAdapter]) -> list[str]:
    rows = [[adapter.name, adapter.digest[:12], adapter.state, adapter.directory] for adapter in adapters]
    lines = table_lines(["NAME", "DIGEST", "STATE", "DIRECTORY"], rows)
    return [*lines, *(f"{adapter.name}: {adapter.refusal}" for adapter in adapters if adapter.refusal)]


def _ranks(ranks: Sequence[RankReport]) -> list[str]:
    on_hosts = any(rank.host for rank in ranks)
    rows = [
        [
            str(rank.rank),
            str(rank.pid),
            "yes" if rank.is_up else "no",
            size(rank.resident_bytes - rank.shared_bytes),
            size(rank.shared_bytes),
            duration(rank.cpu_s),
            str(rank.num_threads),
            *([rank.host or "-"] if on_hosts else []),
        ]
        for rank in ranks
    ]
    columns = ["RANK", "PID", "UP", "MEMORY", "SHARED", "CPU", "THREADS", *(["HOST"] if on_hosts else [])]
    return table_lines(columns, rows)


def _kv_cache(report: NodeReport) -> list[Field]:
    load, used = report.load, round(100 * report.load.kv_usage)
    blocks = f"{load.total_blocks}: {load.free_blocks} free, {load.leased_blocks} leased"
    return [
        ("Block size", f"{report.node.block_size} tokens"),
        ("Blocks", f"{blocks}, {load.quarantined_blocks} quarantined ({used} % in use)"),
        ("Layout", report.handoff.layout),
        # The decode node, which reads, decides what happens to a prompt whose KV does not arrive.
        *([("On transfer failure", report.node.on_transfer_failure)] if _is_reader(report) else []),
    ]


def _load(load: LoadReport, waiting_by_reason: Mapping[str, int]) -> list[Field]:
    reasons = _counts(waiting_by_reason)
    waiting = load.waiting + load.waiting_for_remote_kvs
    return [
        ("Running", str(load.running)),
        ("Waiting", f"{waiting} ({reasons})" if reasons else str(waiting)),
        ("Draining", "yes" if load.draining else "no"),
    ]


def _handoff_sections(report: NodeReport) -> dict[str, list[str]]:
    handoff = report.handoff
    open_now = [("Open", _counts(_by_state(handoff)) or "none")]
    if handoff.open:
        open_now.append(("Oldest", fine_duration(_oldest_s(handoff))))
    sections = {"Transfers" if _is_reader(report) else "Leases": _fields(open_now) + _ended(handoff)}
    if handoff.refused_links:
        sections["Refused links"] = _refused(handoff)
    if handoff.pairs:
        sections["Reads"] = _pairs(handoff)
    if handoff.failed_probes:
        sections[KV_PROBE_FAILED] = _failed(handoff)
    return sections


def _ended(handoff: HandoffReport) -> list[str]:
    """How many transfers or leases have ended with each outcome: a line for each peer."""
    peers: dict[str, dict[str, int]] = {}
    for ended in handoff.ended:
        peers.setdefault(ended.peer, {})[ended.outcome] = ended.count
    return _fields([(f"From {peer}", _counts(outcomes)) for peer, outcomes in peers.items()])


def _refused(handoff: HandoffReport) -> list[str]:
    lines = []
    for link in handoff.refused_links:
        lines += [_latest(link.peer, link.cause, link.count, link.age_s), f"  {link.story}"]
    return lines


def _pairs(handoff: HandoffReport) -> list[str]:
    """How fast the KV of each peer is read, and over what."""
    lines = _fields([(f"From {pair.peer}", _rate(pair)) for pair in handoff.pairs])
    return lines + [f"{KV_PAIR_SLOW}: {pair.why_slow}" for pair in handoff.pairs if pair.why_slow]


def _rate(pair: MeasuredPair) -> str:
    least, lane = "at least " if pair.num_bytes < _SMALL_READ else "", pair.lane or "a lane that UCX does not name"
    return f"{least}{pair.bytes_per_second / 1e9:.2f} GB/s, {pair.from_memory} to {pair.to_memory} over {lane}"


def _failed(handoff: HandoffReport) -> list[str]:
    lines = []
    for probe in handoff.failed_probes:
        lines += [_latest(probe.peer, probe.fault.value, probe.count, probe.age_s), f"  {probe.detail}"]
    return lines


def _latest(peer: str, what: str, count: int, age_s: float) -> str:
    times = "once" if count == 1 else f"{count} times, last"
    return f"{peer}: {what}, {times} {fine_duration(age_s)} ago"


def _by_state(handoff: HandoffReport) -> dict[str, int]:
    return dict(Counter(open_handoff.state for open_handoff in handoff.open))


def _oldest_s(handoff: HandoffReport) -> float:
    return max((open_handoff.age_s for open_handoff in handoff.open), default=0.0)


def _is_reader(report: NodeReport) -> bool:
    return report.node.role.value == "decode"


def _counts(counts: Mapping[str, int]) -> str:
    """Counts as text, without zeros: `2 READING, 1 SUSPECT`."""
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count)


def _fields(fields: Sequence[Field]) -> list[str]:
    """Aligned lines `Name:  value`. An empty value is shown as a dash."""
    width = max((len(name) for name, _ in fields), default=0) + 1
    return [f"{name + ':':<{width}}  {value or '-'}" for name, value in fields]
