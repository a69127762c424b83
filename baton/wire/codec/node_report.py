"""What a node tells operators of itself, to Protocol Buffers and back."""

from __future__ import annotations

from baton.messages.node_report import HandoffReport, HandoffSide, NodeReport, OpenHandoff
from baton.v1 import node_pb2 as node
from baton.wire.codec.derived import Codec, Exceptional, numbers
from baton.wire.codec.node import NODE_DESCRIPTION

_SIDES = set(numbers(HandoffSide, node.HandoffSide.DESCRIPTOR).values())
_OPEN = Codec(OpenHandoff, node.OpenHandoff)
_HANDOFF = Codec(
    HandoffReport,
    node.HandoffReport,
    # Sides of a newer version are left out.
    Exceptional("open", read=lambda pbs: tuple([_OPEN.from_pb(pb) for pb in pbs if pb.side in _SIDES])),
)
NODE_REPORT = Codec(
    NodeReport,
    node.DescribeResponse,
    parts=(NODE_DESCRIPTION, _HANDOFF),
)
