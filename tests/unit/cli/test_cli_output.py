"""What commands print: tables, YAML and progress, and the combined view of a cluster."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from baton.cli.cluster.log_files import LogLine
from baton.cli.cluster.state import ClusterState, ProcessState
from baton.cli.commands.logs import format_line
from baton.cli.output import (
    Format,
    duration,
    print_answer,
    print_document,
    print_note,
    print_table,
    print_text,
    print_yaml,
    size,
)
from baton.cli.views.answer import Answer, summary
from baton.cli.views.cluster_view import combine
from baton.cli.waiting import ProgressLine
from baton.cli.yaml_text import yaml_text
from baton.errors import BatonError
from baton.messages.generation import Accepted, Chunk, Finished, GenerateEvent, Path, SequenceFinished
from baton.messages.operator import ClusterStatus, NodeStatus
from baton.messages.speculation import DraftCounts

TEXT = st.text(st.characters(codec="utf-8")) | st.text("ab \n:#-'\"\t|>%@`!&*{}[],?01ey.~=<\u2028\x85\r")
FINISHED = Finished(
    *("length", None, 5, 2, 1, 0.5, 2.0, 1.5, 3.0, 13.0, 2048, Path("p0", "d0", 1, "disaggregated")),
    draft_counts=DraftCounts(4, 1),
    bit_exact=False,
)


HOSTILE = "a\x1b]52;c;aGk=\x07\x1b[2J\r\x9b1m\x7f\u202eb\u2066"
HARMLESS = r"a\u001b]52;c;aGk=\u0007\u001b[2J\u000d\u009b1m\u007f\u202eb\u2066"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_no_text_of_others_is_obeyed_by_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    print_text(f"{HOSTILE}\n\té")
    print_note(HOSTILE)
    print_table(["NAME", "X"], [[HOSTILE, "y"]], gap=1)
    print_answer(HOSTILE)
    found = capsys.readouterr()
    table = [f"{'NAME':{len(HARMLESS)}} X", f"{HARMLESS} y"]
    assert found.out == "\n".join([HARMLESS, "\té", *table, f"{HOSTILE}\n"])  # an answer in a pipe is as it was
    assert found.err == f"{HARMLESS}\n"
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    print_answer(HOSTILE, end="")
    assert terminal.getvalue() == HARMLESS


@pytest.mark.parametrize(("output", "read"), [(Format.JSON, json.loads), (Format.YAML, yaml.safe_load)])
@pytest.mark.parametrize("text", [HOSTILE, f"{HOSTILE}\n: second"])
def test_documents_mean_the_same_without_what_a_terminal_obeys(
    capsys: pytest.CaptureFixture[str], output: Format, read: Callable[[str], dict[str, str]], text: str
) -> None:
    print_document(output, {"text": text, text: "key"})
    found = capsys.readouterr().out
    assert not set(HOSTILE) - set(HARMLESS) & set(found)
    assert read(found) == {"version": 1, "text": text, text: "key"}


def test_logs_keep_their_colours_alone() -> None:
    line = LogLine(1.0, HOSTILE, "error", HOSTILE, {"name": HOSTILE, "exception": HOSTILE})
    text = format_line(line, 5, coloured=True)
    assert not set(HOSTILE) - set(HARMLESS) & set(re.sub(r"\x1b\[[0-9;]*m", "", text))


def test_generate_json_has_exactly_the_documented_keys() -> None:
    answer = Answer()
    events: list[GenerateEvent] = [Accepted("r", 1, 5), Chunk(0, [7], "a"), Chunk(1, [8], "b"), FINISHED]
    assert "".join(answer.add(event) for event in events) == "ab"
    assert answer.to_json() == {
        "text": "ab",
        "token_ids": [7, 8],
        "finish_reason": "length",
        "usage": {
            "prompt_tokens": 5,
            "completion_tokens": 2,
            "cached_tokens": 1,
            "draft_tokens": 4,
            "accepted_draft_tokens": 1,
        },
        "path": {"prefill_node": "p0", "decode_node": "d0", "attempts": 1, "reason": "disaggregated"},
        "timings": {"queue_ms": 0.5, "prefill_ms": 2.0, "transfer_ms": 1.5, "ttft_ms": 3.0, "total_ms": 13.0},
        "kv_bytes": 2048,
        "bit_exact": False,
    }


def test_generate_json_has_choices_when_there_are_several() -> None:
    answer = Answer()
    events: list[GenerateEvent] = [
        Accepted("r", 1, 5),
        Chunk(0, [7], "a"),
        Chunk(0, [9], "x", sequence_index=1),
        Chunk(1, [8], "b"),
        SequenceFinished(1, "stop", 9, 1),
        SequenceFinished(0, "length", None, 2),
        FINISHED,
    ]
    for event in events:
        answer.add(event)
    result = answer.to_json()
    assert list(result) == ["choices", "usage", "path", "timings", "kv_bytes", "bit_exact"]
    assert result["choices"] == [
        {"index": 0, "text": "ab", "token_ids": [7, 8], "finish_reason": "length"},
        {"index": 1, "text": "x", "token_ids": [9], "finish_reason": "stop"},
    ]
    assert answer.text == "[1/2] ab\n[2/2] x"


def test_a_stream_without_an_end_is_an_error() -> None:
    answer = Answer()
    answer.add(Chunk(0, [7], "a"))
    with pytest.raises(BatonError, match="the stream ended"):
        answer.to_json()


def test_the_summary_of_a_request() -> None:
    assert summary(FINISHED) == (
        "[p0 → d0, 2.0 KiB of KV in 1.5 ms; 5 + 2 tokens, first after 3 ms, 100 tokens/s, length, not bit-exact]"
    )


@pytest.mark.parametrize(
    "value",
    [
        {"a": 1, "b": [], "c": {}, "d": None, "e": True, "f": "x: y # z", "g": "no", "h": 'q"\n'},
        [{"name": "n", "list": [1, [2, 3]], "inner": {"k": [{"x": 1.5}, "s"]}}, {"name": "m"}],
        [],
        {"outer": {"inner": {"leaf": "l"}}},
    ],
)
def test_yaml_can_be_read_back(value: object, capsys: pytest.CaptureFixture[str]) -> None:
    print_yaml(value)
    assert yaml.safe_load(capsys.readouterr().out) == value


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
        lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner),
        max_leaves=8,
    )
)
def test_yaml_is_read_as_it_was_written(value: object) -> None:
    assert yaml.safe_load(yaml_text(value)) == value


@pytest.mark.parametrize(
    "text", ["no", "y", "null", "", "1e3", "12e45678", "08", "0o17", ".5", "1:30", "2026-01-31", "~", "=", "a: b"]
)
def test_text_that_a_yaml_reader_could_take_for_another_type_is_quoted(text: str) -> None:
    assert yaml_text([text]) == f"- '{text}'\n"
    assert yaml_text({text: 1}) == f"'{text}': 1\n"


def test_yaml_has_no_anchors_and_keeps_the_order_of_keys() -> None:
    twice = ["x"]
    assert yaml_text({"b": twice, "a": twice}) == "b:\n- x\na:\n- x\n"


def test_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["NAME", "X"], [["longer", "1"], ["b", "22"]])
    assert capsys.readouterr().out == "NAME     X\nlonger   1\nb        22\n"
    print_table(["NAME", "X"], [["b", "22"]], headers=False)
    assert capsys.readouterr().out == "b   22\n"


class TerminalBuffer(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_progress_line_is_redrawn_and_fits_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "20")
    terminal = TerminalBuffer()
    monkeypatch.setattr(sys, "stderr", terminal)
    line = ProgressLine()
    line.show("waiting for node-0, node-1")
    line.show("waiting for node-0, node-1")
    line.show("node-1")
    line.clear()
    redraw = "\r\x1b[2K"
    assert terminal.getvalue() == f"{redraw}waiting for node-0,…{redraw}node-1{redraw}"


def test_progress_without_a_terminal_is_at_most_one_line_a_second(capsys: pytest.CaptureFixture[str]) -> None:
    line = ProgressLine()
    line.show("first")
    line.show("second")
    line.clear()
    assert capsys.readouterr().err == "first\n"


def test_durations_and_sizes_as_text() -> None:
    assert [duration(s) for s in (0.4, 59, 60, 3725, 90061)] == ["0s", "59s", "1m00s", "1h02m", "1d1h"]
    assert [size(n) for n in (0, 1, 1023, 1024, 3 << 20)] == ["0 B", "1 B", "1023 B", "1.0 KiB", "3.0 MiB"]


def node(name: str, role: str, status: str = "Ready") -> NodeStatus:
    return NodeStatus(name, role, status, f"{name}.a", "h:1", 7, "m", 1, 2, 0.5)


def child(name: str, role: str, status: str = "Ready", restarts: int = 0) -> ProcessState:
    return ProcessState(
        name, role, status, 9, 0, restarts, f"{name}.b", "h:2", "", "log", "SIGKILL" if restarts else ""
    )


def supervised(*processes: ProcessState) -> ClusterState:
    return ClusterState("c", "ready", 1, 0, 0.0, "m", "auto", "h:1", "h:2", processes)


ROUTER = ClusterStatus("c", "ok", "", [node("router-0", "router"), node("d0", "decode"), node("p0", "prefill")])


def test_a_healthy_cluster() -> None:
    state = supervised(*(child(n.name, n.role) for n in ROUTER.nodes), child("redis", "redis"))
    view = combine(ROUTER, "", state)
    assert (view.health, view.detail) == ("ok", "")
    assert [n.name for n in view.nodes] == ["p0", "d0", "router-0"]
    assert list(view.nodes) == sorted(ROUTER.nodes, key=lambda n: ["p0", "d0", "router-0"].index(n.name))
    assert json.loads(json.dumps(view.to_json()))["nodes"][0]["kv_usage"] == 0.5


def test_a_crash_loop_is_shown_although_the_router_does_not_know_of_it() -> None:
    looping = replace(child("d1", "decode", "CrashLoop", 4), pid=0)
    view = combine(ROUTER, "", supervised(child("d0", "decode", "CrashLoop", 3), looping))
    assert (view.health, view.detail) == (
        "degraded",
        "d0 is CrashLoop after 3 restarts; d1 is CrashLoop after 4 restarts",
    )
    shown = {n.name: (n.status, n.detail) for n in view.nodes}
    assert shown["d0"] == shown["d1"] == ("CrashLoop", "SIGKILL")


def test_a_dead_redis_degrades_the_cluster_and_is_not_a_node() -> None:
    view = combine(ROUTER, "", supervised(child("redis", "redis", "Starting", 1)))
    assert view.health == "degraded"
    assert "redis" not in {n.name for n in view.nodes}


def test_without_a_router_the_state_of_the_supervisor_is_shown() -> None:
    view = combine(None, "no answer", supervised(child("p0", "prefill"), child("router-0", "router", "Starting", 1)))
    assert (view.health, view.detail) == ("unavailable", "no answer; router-0 is Starting after 1 restarts")
    assert {n.name: n.status for n in view.nodes} == {"p0": "Starting", "router-0": "Starting"}


def test_the_health_that_the_router_reports_is_kept() -> None:
    degraded = replace(ROUTER, health="degraded", detail="the registry does not answer")
    view = combine(degraded, "", None)
    assert (view.health, view.detail) == ("degraded", "the registry does not answer")


def test_a_document_has_the_version_of_its_fields(capsys: pytest.CaptureFixture[str]) -> None:
    print_document(Format.JSON, {"a": 1})
    assert json.loads(capsys.readouterr().out) == {"version": 1, "a": 1}
    print_document(Format.YAML, {"a": 1})
    assert capsys.readouterr().out == "version: 1\na: 1\n"
