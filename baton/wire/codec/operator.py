"""The codecs of a router's answers to operators, to Protocol Buffers and back."""

from __future__ import annotations

from baton.messages.adapters import AdapterRow, LoadedAdapter
from baton.messages.operator import (
    ClusterEvent,
    ClusterStatus,
    DrainProgress,
    MovedStream,
    PlanReport,
    RequestExplanation,
    RequestRow,
    TenantRows,
    Timeline,
)
from baton.v1 import operator_pb2 as operator
from baton.wire.codec.derived import Codec

CLUSTER_STATUS = Codec(ClusterStatus, operator.GetStatusResponse)
REQUEST_EXPLANATION = Codec(RequestExplanation, operator.ExplainResponse)
TENANT_ROWS = Codec(TenantRows, operator.ListTenantsResponse)
PLAN_REPORT = Codec(PlanReport, operator.GetPlanResponse)
REQUEST_ROW = Codec(RequestRow, operator.RequestRow)
DRAIN_PROGRESS = Codec(DrainProgress, operator.DrainNodeResponse)
CLUSTER_EVENT = Codec(ClusterEvent, operator.ClusterEvent)
ADAPTER_ROW = Codec(AdapterRow, operator.AdapterRow)
LOADED_ADAPTER = Codec(LoadedAdapter, operator.LoadAdapterResponse)
MOVED_STREAM = Codec(MovedStream, operator.MoveStreamResponse)
TIMELINE = Codec(Timeline, operator.Timeline)
