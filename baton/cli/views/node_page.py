"""One node, with all that it says of itself: as text for people, as JSON for programs. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from baton.cli.output import duration, fine_duration
from baton.cli.views.lease_rows import lease_json, oldest_first
from baton.messages.cluster import NodeStatus
from baton.messages.node import LoadReport, NodeDescription
from baton.messages.node_report import HandoffReport, NodeReport

Field = tuple[str, str]


def node_lines(status: NodeStatus, report: NodeReport | None) -> list[str]:
    """`report` is None for a router, and for a node that does not answer."""
    lines = _fields(_identity(status))
    if report is None:
        return lines
    sections = {
        "Model": _fields(_model(report.node)),
        **({"Computed by": _fields(_compute_paths(report))} if report.compute_paths else {}),
        "KV cache": _fields(_kv_cache(report)),
        "Load": _fields(_load(report.load, report.waiting_by_reason)),
        **_handoff_sections(report),
    }
    for title, section in sections.items():
        lines += ["", f"{title}:", *(f"  {line}" for line in section)]
    return lines


def node_json(status: NodeStatus, report: NodeReport | None) -> dict[str, Any]:
    """`status` is the router's view, `report` the node's own or null."""
    if report is None:
        return {"status": asdict(status), "report": None}
    description, handoff = report.node, report.handoff
    said = {
        "description": asdict(description)
        | {"role": description.role.value, "eos_token_ids": sorted(description.eos_token_ids)},
        "load": asdict(report.load),
        "waiting_by_reason": dict(report.waiting_by_reason),
        "compute_paths": [asdict(path) for path in report.compute_paths],
        "layout": handoff.layout,
        "leases": [lease_json(report, one) for one in oldest_first(report)],
        "leases_by_state": _by_state(handoff),
        "oldest_lease_age_s": _oldest_s(handoff),
        "ended_transfers": [asdict(ended) for ended in handoff.ended],
        "refused_links": [asdict(link) for link in handoff.refused_links],
    }
    return {"status": asdict(status), "report": said}


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
        ("Fingerprint", description.model_fingerprint),
        ("Dtype", description.dtype),
        ("Numerics", description.numerics),
        ("Bit-exact", "yes" if description.bit_exact else "no"),
        ("Longest", f"{description.max_model_len} tokens"),
        ("Vocabulary", f"{description.vocab_size} tokens"),
    ]


def _compute_paths(report: NodeReport) -> list[Field]:
    return [
        (path.part, f"{path.runs} (not faster: {path.why_not_faster})" if path.why_not_faster else path.runs)
        for path in report.compute_paths
    ]


def _kv_cache(report: NodeReport) -> list[Field]:
    load, used = report.load, round(100 * report.load.kv_usage)
    blocks = f"{load.total_blocks}: {load.free_blocks} free, {load.leased_blocks} leased"
    return [
        ("Block size", f"{report.node.block_size} tokens"),
        ("Blocks", f"{blocks}, {load.quarantined_blocks} quarantined ({used} % in use)"),
        ("Layout", report.handoff.layout),
        # What becomes of a prompt whose KV does not come is for its reader to say.
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
    return sections


def _ended(handoff: HandoffReport) -> list[str]:
    """A line for each peer."""
    peers: dict[str, dict[str, int]] = {}
    for ended in handoff.ended:
        peers.setdefault(ended.peer, {})[ended.outcome] = ended.count
    return _fields([(f"From {peer}", _counts(outcomes)) for peer, outcomes in peers.items()])


def _refused(handoff: HandoffReport) -> list[str]:
    lines = []
    for link in handoff.refused_links:
        times = "once" if link.count == 1 else f"{link.count} times, last"
        lines += [f"{link.peer}: {link.cause}, {times} {fine_duration(link.age_s)} ago", f"  {link.story}"]
    return lines


def _by_state(handoff: HandoffReport) -> dict[str, int]:
    return dict(Counter(one.state for one in handoff.open))


def _oldest_s(handoff: HandoffReport) -> float:
    return max((one.age_s for one in handoff.open), default=0.0)


def _is_reader(report: NodeReport) -> bool:
    return report.node.role.value == "decode"


def _counts(counts: Mapping[str, int]) -> str:
    """`2 READING, 1 SUSPECT`; nothing for zeros."""
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count)


def _fields(fields: Sequence[Field]) -> list[str]:
    """`Name:  value`, aligned; what is empty is a dash."""
    width = max((len(name) for name, _ in fields), default=0) + 1
    return [f"{name + ':':<{width}}  {value or '-'}" for name, value in fields]
