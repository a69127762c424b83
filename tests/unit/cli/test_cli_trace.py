"""The output of `baton trace`."""

from __future__ import annotations

from dataclasses import replace

from baton.cli.commands.trace import to_json, waterfall
from baton.messages.operator import Timeline, TimelineStage

FOUND = Timeline(
    request_id="r",
    state="finished",
    detail="length",
    age_s=4.2,
    attempts=1,
    prefill_node="prefill-0",
    decode_node="decode-0",
    prompt_tokens=32,
    completion_tokens=8,
    cached_tokens=16,
    kv_bytes=2048,
    kv_read_ns=1_500_000,
    ttft_ns=40_000_000,
    total_ns=100_000_000,
    stages=[
        TimelineStage("queue", "prefill-0", 1_000),
        TimelineStage("prefill", "prefill-0", 39_999_000),
        TimelineStage("decode", "decode-0", 60_000_000, True),
    ],
)


def test_a_waterfall() -> None:
    assert waterfall(FOUND, 69) == [
        "r: finished (length) 4.2s ago by prefill-0 and decode-0",
        "  32 prompt tokens (16 cached), 8 output tokens; 2.0 KiB of KV read in 1.500 ms",
        "  first token after 40.000 ms, end after 100.000 ms",
        "",
        "STAGE           WHERE       START-MS       MS",
        "queue           prefill-0      0.000    0.001   █",
        "prefill         prefill-0      0.001   39.999   ███████████",
        "- first token                 40.000                      ▏",
        "decode          decode-0      40.000   60.000             ████████████████",
    ]


def test_drafts_are_shown_where_there_were_some() -> None:
    lines = waterfall(replace(FOUND, kv_bytes=0, draft_tokens=9, accepted_draft_tokens=4), 69)
    assert lines[1] == "  32 prompt tokens (16 cached), 8 output tokens (4 of 9 drafts right)"


def test_a_request_without_a_token() -> None:
    found = replace(FOUND, state="failed", detail="no node is up", ttft_ns=None, stages=[], decode_node="", kv_bytes=0)
    lines = waterfall(replace(found, prefill_node="", attempts=2, trace_id="ab"), 80)
    assert lines[0] == "r: failed (no node is up) 4.2s ago, attempt 2"
    assert lines[2:4] == ["  no token, end after 100.000 ms", "  trace ab"]


def test_json_has_the_start_of_each_stage() -> None:
    found = to_json(FOUND)
    assert [(stage["start_ns"], stage["duration_ns"]) for stage in found["stages"]] == [
        (0, 1_000),
        (1_000, 39_999_000),
        (40_000_000, 60_000_000),
    ]
    assert sum(stage["duration_ns"] for stage in found["stages"]) == found["total_ns"]
