"""Mooncake's traces (Qin et al., FAST 2025): JSON lines {timestamp, input_length, output_length, hash_ids}.

Timestamps are milliseconds. A hash id names a block of 512 tokens (the last block may be shorter) together with all
tokens before it.
"""

from __future__ import annotations

import json

from baton.bench.workloads.trace import TraceFormat, TraceLine, whole_number

_BLOCK_TOKENS = 512


def _parse(text: str) -> TraceLine:
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise ValueError("not JSON: nested too deeply") from None
    if not isinstance(fields, dict):
        raise ValueError("not a JSON object")
    for name in ("timestamp", "input_length", "output_length", "hash_ids"):
        if name not in fields:
            raise ValueError(f"{name} is missing")
    timestamp = fields["timestamp"]
    if isinstance(timestamp, bool) or not isinstance(timestamp, int | float) or not 0 <= timestamp < 1e15:
        raise ValueError(f"timestamp is {timestamp!r}, which is not a number of milliseconds")
    hash_ids = fields["hash_ids"]
    if not isinstance(hash_ids, list):
        raise ValueError("hash_ids is not a list")
    return TraceLine(
        timestamp / 1e3,
        whole_number(fields["input_length"], "input_length", 1),
        whole_number(fields["output_length"], "output_length", 0),
        tuple(whole_number(hash_id, "a hash id", 0) for hash_id in hash_ids),
    )


MOONCAKE = TraceFormat("mooncake", _parse, None, _BLOCK_TOKENS)
