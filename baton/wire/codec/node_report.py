"""The codec of a node's report about itself, to Protocol Buffers and back."""

from __future__ import annotations

from baton.messages.node_report import FailedProbe, HandoffReport, HandoffSide, NodeReport, OpenHandoff, ProbeFault
from baton.v1 import node_pb2 as node
from baton.wire.codec.derived import Codec, FieldConversion, enum_numbers
from baton.wire.codec.node import NODE_DESCRIPTION

_SIDES = set(enum_numbers(HandoffSide, node.HandoffSide.DESCRIPTOR).values())
_OPEN = Codec(OpenHandoff, node.OpenHandoff)
_FAULTS = set(enum_numbers(ProbeFault, node.ProbeFault.DESCRIPTOR).values())
_FAILED_PROBE = Codec(FailedProbe, node.FailedProbe)
_HANDOFF = Codec(
    HandoffReport,
    node.HandoffReport,
    # Hand-offs with a side that only a newer version knows are left out.
    FieldConversion("open", read=lambda pbs: tuple([_OPEN.from_pb(pb) for pb in pbs if pb.side in _SIDES])),
    FieldConversion(
        "failed_probes", read=lambda pbs: tuple([_FAILED_PROBE.from_pb(pb) for pb in pbs if pb.fault in _FAULTS])
    ),
)
NODE_REPORT = Codec(
    NodeReport,
    node.DescribeResponse,
    nested=(NODE_DESCRIPTION, _HANDOFF),
)
