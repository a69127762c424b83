"""Requests as operators see them in a list. Never a word of what they say."""

from __future__ import annotations

from dataclasses import asdict

from baton.messages.request_rows import RequestRow
from baton.v1 import operator_pb2 as operator


def row_to_pb(row: RequestRow) -> operator.RequestRow:
    return operator.RequestRow(**asdict(row))


def row_from_pb(pb: operator.RequestRow) -> RequestRow:
    return RequestRow(
        request_id=pb.request_id,
        state=pb.state,
        router=pb.router,
        age_s=pb.age_s,
        prefill_node=pb.prefill_node,
        decode_node=pb.decode_node,
        prompt_tokens=pb.prompt_tokens,
        output_tokens=pb.output_tokens,
        attempts=pb.attempts,
        ttft_ms=pb.ttft_ms if pb.HasField("ttft_ms") else None,
        total_ms=pb.total_ms if pb.HasField("total_ms") else None,
        kv_bytes=pb.kv_bytes,
        detail=pb.detail,
    )
