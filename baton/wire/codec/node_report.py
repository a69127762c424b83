"""What a node tells operators of itself: messages to Protocol Buffers and back."""

from __future__ import annotations

from baton.messages.node_report import (
    ComputePath,
    EndedHandoffs,
    HandoffReport,
    HandoffSide,
    NodeReport,
    OpenHandoff,
    RefusedLink,
)
from baton.v1 import node_pb2 as node
from baton.wire.codec.node import (
    attempt_from_pb,
    attempt_to_pb,
    description_from_pb,
    description_to_pb,
    load_from_pb,
    load_to_pb,
)

_SIDES = {HandoffSide.SENDER: node.HANDOFF_SIDE_SENDER, HandoffSide.READER: node.HANDOFF_SIDE_READER}
_SIDE_NAMES = {value: side for side, value in _SIDES.items()}


def node_report_to_pb(report: NodeReport) -> node.DescribeResponse:
    return node.DescribeResponse(
        node=description_to_pb(report.description),
        load=load_to_pb(report.load),
        handoff=_handoff_to_pb(report.handoff),
        waiting_by_reason=report.waiting_by_reason,
        compute_paths=[
            node.ComputePath(part=path.part, runs=path.runs, why_not_faster=path.why_not_faster)
            for path in report.compute_paths
        ],
    )


def node_report_from_pb(pb: node.DescribeResponse) -> NodeReport:
    """Raises InvalidRequest for a role that this version does not know."""
    return NodeReport(
        description=description_from_pb(pb.node),
        load=load_from_pb(pb.load),
        waiting_by_reason=dict(pb.waiting_by_reason),
        handoff=_handoff_from_pb(pb.handoff),
        compute_paths=[ComputePath(path.part, path.runs, path.why_not_faster) for path in pb.compute_paths],
    )


def _handoff_to_pb(report: HandoffReport) -> node.HandoffReport:
    return node.HandoffReport(
        layout=report.layout,
        open=[_open_to_pb(handoff) for handoff in report.open],
        ended=[node.EndedHandoffs(peer=e.peer, outcome=e.outcome, count=e.count) for e in report.ended],
        refused_links=[_refused_to_pb(link) for link in report.refused_links],
    )


def _handoff_from_pb(pb: node.HandoffReport) -> HandoffReport:
    """Sides of a newer version are left out."""
    return HandoffReport(
        layout=pb.layout,
        open=[_open_from_pb(handoff) for handoff in pb.open if handoff.side in _SIDE_NAMES],
        ended=[EndedHandoffs(e.peer, e.outcome, e.count) for e in pb.ended],
        refused_links=[RefusedLink(r.peer, r.cause, r.story, r.age_s, r.count) for r in pb.refused_links],
    )


def _open_to_pb(handoff: OpenHandoff) -> node.OpenHandoff:
    return node.OpenHandoff(
        attempt=attempt_to_pb(handoff.attempt),
        side=_SIDES[handoff.side],
        state=handoff.state,
        peer=handoff.peer,
        peer_incarnation=handoff.peer_incarnation,
        num_blocks=handoff.num_blocks,
        age_s=handoff.age_s,
    )


def _open_from_pb(pb: node.OpenHandoff) -> OpenHandoff:
    return OpenHandoff(
        attempt=attempt_from_pb(pb.attempt),
        side=_SIDE_NAMES[pb.side],
        state=pb.state,
        peer=pb.peer,
        peer_incarnation=pb.peer_incarnation,
        num_blocks=pb.num_blocks,
        age_s=pb.age_s,
    )


def _refused_to_pb(link: RefusedLink) -> node.RefusedLink:
    return node.RefusedLink(peer=link.peer, cause=link.cause, story=link.story, age_s=link.age_s, count=link.count)
