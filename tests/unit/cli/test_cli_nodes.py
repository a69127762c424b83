"""Commands that ask the nodes themselves, and how they show the answers."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from baton.cli.ask import ask_nodes_async, can_be_asked
from baton.cli.cluster.run_dir import RunDir
from baton.cli.cluster.state import ClusterState, ProcessState, start_time
from baton.cli.commands.describe import find_node
from baton.cli.commands.get import _COLUMNS, _WIDE, watched_item
from baton.cli.output import fine_duration, print_json, print_yaml
from baton.cli.views.cluster_view import view_cluster
from baton.cli.views.node_page import node_json, node_lines
from baton.cli.views.rows import lease_json, lease_row, oldest_first
from baton.errors import DeadlineExceeded, NodeNotFound
from baton.messages.ids import AttemptKey
from baton.messages.node import LoadReport
from baton.messages.node_model import Capability
from baton.messages.node_report import (
    ComputePath,
    EndedHandoffs,
    FailedProbe,
    HandoffReport,
    HandoffSide,
    MeasuredPair,
    NodeReport,
    OpenHandoff,
    ProbeFault,
    RankReport,
    RefusedLink,
)
from baton.messages.operator import NodeStatus
from baton.wire.server.server import RpcServer
from baton.wire.services import node_service
from baton.wire.services.node_service import NodeServicer
from tests.support.router_parts import decode, prefill

OLD = OpenHandoff(AttemptKey("a", 2, 0xBEEF), HandoffSide.SENDER, "SUSPECT", "d1", "d1.1", 5, 75.0)
YOUNG = OpenHandoff(AttemptKey("b", 1, 2**64 - 1), HandoffSide.SENDER, "GRANTED", "", "", 2, 0.25)
SENDER = NodeReport(
    prefill(),
    LoadReport(running=1, waiting=2, total_blocks=64, free_blocks=48, leased_blocks=7),
    {"capacity": 2, "remote_kv": 0},
    HandoffReport("dtype=float32 block_size=4", (YOUNG, OLD)),
)
READER = NodeReport(
    decode(on_transfer_failure="recompute"),
    LoadReport(total_blocks=64, free_blocks=64, quarantined_blocks=3),
    {},
    HandoffReport(
        "dtype=float32 block_size=4",
        (),
        (EndedHandoffs("p1", "arrived", 12), EndedHandoffs("p1", "lease_lost", 1), EndedHandoffs("p2", "arrived", 3)),
        (RefusedLink("p3", "layout_mismatch", "KV layouts differ in dtype: p3 [dtype=x], d1 [dtype=y]", 12.0, 4),),
        (FailedProbe("p4", ProbeFault.TIMED_OUT, "d1 could not read known bytes of p4 (p4.x)", 3.0, 1),),
        (
            MeasuredPair("p1", 4.9e8, 8 << 20, "tcp/eth0", "VRAM", "VRAM", "through the host"),
            MeasuredPair("p2", 5.7e8, 49152, "", "DRAM", "VRAM"),
        ),
    ),
)


def status_of(report: NodeReport, **changes: object) -> NodeStatus:
    description = report.node
    status = NodeStatus(
        name=description.node_id,
        role=description.role.value,
        status="Ready",
        incarnation=description.incarnation,
        address=description.address,
        pid=description.pid,
        model=description.model,
        running=0,
        waiting=0,
        kv_usage=0.0,
        version=description.version,
        age_s=100.0,
    )
    return replace(status, **changes)  # type: ignore[arg-type]


def test_rows_of_leases_oldest_first() -> None:
    assert oldest_first(SENDER) == [OLD, YOUNG]
    assert lease_row(SENDER, OLD, wide=False) == ["p1", "a", "2", "sender", "SUSPECT", "d1", "5", "1m15s"]
    wide = ["p1", "b", "1", "sender", "GRANTED", "-", "2", "0.2s", "p1.1", "-", "f" * 16]
    assert lease_row(SENDER, YOUNG, wide=True) == wide


def test_a_lease_as_json_has_all_fields() -> None:
    assert lease_json(SENDER, OLD) == {
        "node": "p1",
        "incarnation": "p1.1",
        "request_id": "a",
        "attempt": 2,
        "flight": "beef",
        "side": "sender",
        "state": "SUSPECT",
        "peer": "d1",
        "peer_incarnation": "d1.1",
        "num_blocks": 5,
        "age_s": 75.0,
    }


@pytest.mark.parametrize(
    ("seconds", "text"), [(-1, "0.0s"), (0.04, "0.0s"), (9.94, "9.9s"), (9.95, "9s"), (10, "10s"), (75, "1m15s")]
)
def test_fine_durations(seconds: float, text: str) -> None:
    assert fine_duration(seconds) == text


def test_a_prefill_node_as_text() -> None:
    lines = node_lines(status_of(SENDER, detail="a word"), SENDER)
    assert lines[:4] == ["Name:         p1", "Role:         prefill", "Status:       Ready", "Detail:       a word"]
    assert "  Blocks:      64: 48 free, 7 leased, 0 quarantined (25 % in use)" in lines
    assert "  Layout:      dtype=float32 block_size=4" in lines
    assert "  Waiting:   2 (2 capacity)" in lines
    assert lines[-4:] == ["", "Leases:", "  Open:    1 GRANTED, 1 SUSPECT", "  Oldest:  1m15s"]
    assert not any("On transfer failure" in line for line in lines)


def test_a_decode_node_as_text() -> None:
    lines = node_lines(status_of(READER), READER)
    assert "  On transfer failure:  recompute" in lines
    assert lines[lines.index("Transfers:") :] == [
        "Transfers:",
        "  Open:  none",
        "  From p1:  12 arrived, 1 lease_lost",
        "  From p2:  3 arrived",
        "",
        "Refused links:",
        "  p3: layout_mismatch, 4 times, last 12s ago",
        "    KV layouts differ in dtype: p3 [dtype=x], d1 [dtype=y]",
        "",
        "Reads:",
        "  From p1:  0.49 GB/s, VRAM to VRAM over tcp/eth0",
        "  From p2:  at least 0.57 GB/s, DRAM to VRAM over a lane that UCX does not name",
        "  KvPairSlow: through the host",
        "",
        "KvProbeFailed:",
        "  p4: timed_out, once 3.0s ago",
        "    d1 could not read known bytes of p4 (p4.x)",
    ]


@pytest.mark.parametrize(("bit_exact", "verified"), [("", "its logits differ"), ("its rope", "")])
def test_what_the_checks_at_start_found_is_shown_with_its_reason(bit_exact: str, verified: str) -> None:
    node = replace(
        SENDER.node,
        bit_exact=not bit_exact,
        bit_exact_reason=bit_exact,
        is_verified=not verified,
        why_unverified=verified,
    )
    report = replace(SENDER, node=node)
    fields = [line.split(maxsplit=1) for line in node_lines(status_of(report), report) if ":" in line]
    shown = {field[0]: field[1] for field in fields if len(field) == 2}
    assert shown["Bit-exact:"] == (f"no: {bit_exact}" if bit_exact else "yes")
    assert shown["Verified:"] == (f"no: {verified}" if verified else "at start")


def test_a_type_that_tests_have_verified_is_shown_as_such() -> None:
    report = replace(SENDER, node=replace(SENDER.node, is_verified=True, model_type="llama"))
    lines = [line.split(maxsplit=1) for line in node_lines(status_of(report), report)]
    assert ["Type:", "llama"] in lines
    assert ["Verified:", "at start, and its type by tests"] in lines


def test_compute_paths_are_shown_with_the_reason_why_they_are_not_faster() -> None:
    paths = [ComputePath("products", "C kernels, avx2"), ComputePath("decoder", "transformers' loop", "no part model")]
    report = replace(SENDER, compute_paths=paths, node=replace(SENDER.node, num_threads=3))
    lines = node_lines(status_of(report), report)
    assert lines[lines.index("Computed by:") + 1 :][:3] == [
        "  threads:   3",
        "  products:  C kernels, avx2",
        "  decoder:   transformers' loop (not faster: no part model)",
    ]
    found = node_json(status_of(report), report)["report"]["compute_paths"]
    assert found[1] == {"part": "decoder", "runs": "transformers' loop", "why_not_faster": "no part model"}


def test_what_the_model_can_do_is_shown() -> None:
    assert "  Can:          generate" in node_lines(status_of(SENDER), SENDER)
    can = frozenset((Capability.LORA, Capability.GENERATE))
    report = replace(SENDER, node=replace(SENDER.node, capabilities=can))
    assert "  Can:          generate, lora" in node_lines(status_of(report), report)
    assert node_json(status_of(report), report)["report"]["description"]["capabilities"] == ["generate", "lora"]


def test_the_shape_of_a_node_of_several_ranks_is_shown() -> None:
    report = replace(SENDER, node=replace(SENDER.node, tp=2, pp=3))
    lines = node_lines(status_of(report), report)
    assert lines[lines.index("Computed by:") + 1] == "  shape:  tp2 pp3: 6 ranks"
    found = node_json(status_of(report, tp=2, pp=3), report)
    assert (found["status"]["tp"], found["report"]["description"]["pp"]) == (2, 3)


def test_the_ranks_of_a_node_are_shown() -> None:
    ranks = (RankReport(0, 70, True, 3 << 30, 1 << 30, 75.5, 12), RankReport(1, 71, False))
    report = replace(SENDER, ranks=ranks)
    lines = node_lines(status_of(report), report)
    assert lines[lines.index("Ranks:") + 1 :][:3] == [
        "  RANK   PID   UP    MEMORY    SHARED    CPU     THREADS",
        "  0      70    yes   2.0 GiB   1.0 GiB   1m15s   12",
        "  1      71    no    0 B       0 B       0s      0",
    ]
    assert node_json(status_of(report), report)["report"]["ranks"][1]["is_up"] is False
    assert "Ranks:" not in node_lines(status_of(SENDER), SENDER)


@pytest.mark.parametrize(("status", "shape"), [({"tp": 2, "pp": 3}, "tp2 pp3"), ({}, "tp1"), ({"role": "router"}, "-")])
def test_wide_rows_have_the_shape(status: dict[str, object], shape: str) -> None:
    cells = watched_item(status_of(SENDER, **status), wide=True, by_load=False).cells
    assert cells[[*_COLUMNS, *_WIDE].index("SHAPE")] == shape


def test_a_node_that_does_not_answer_is_described_by_what_its_router_knows() -> None:
    status = status_of(READER, status="Suspect", pid=0)
    lines = node_lines(status, None)
    assert lines[2] == "Status:       Suspect"
    assert lines[6] == "PID:          -"
    assert lines[-1] == "Age:          1m40s"
    assert node_json(status, None)["report"] is None


def test_a_description_is_the_same_in_json_and_yaml(capsys: pytest.CaptureFixture[str]) -> None:
    for report in (SENDER, READER):
        value = node_json(status_of(report), report)
        print_json(value)
        as_json = json.loads(capsys.readouterr().out)
        print_yaml(value)
        assert yaml.safe_load(capsys.readouterr().out) == as_json
    reader = as_json["report"]
    assert reader["description"]["role"] == "decode"
    assert reader["description"]["eos_token_ids"] == [2]
    assert reader["load"]["quarantined_blocks"] == 3
    assert reader["failed_probes"][0]["fault"] == "timed_out"
    assert reader["refused_links"][0]["story"] == "KV layouts differ in dtype: p3 [dtype=x], d1 [dtype=y]"
    sender = node_json(status_of(SENDER), SENDER)["report"]
    assert sender["leases_by_state"] == {"GRANTED": 1, "SUSPECT": 1}
    assert (sender["oldest_lease_age_s"], sender["waiting_by_reason"]["capacity"]) == (75.0, 2)
    assert [lease["state"] for lease in sender["leases"]] == ["SUSPECT", "GRANTED"]


def test_a_node_is_found_by_its_name() -> None:
    lost, now = status_of(READER, status="Lost", age_s=1.0), status_of(READER)
    other = status_of(SENDER)
    assert find_node([lost, other, now], "d1") is now
    assert find_node([lost, other], "d1") is lost
    with pytest.raises(NodeNotFound, match=r"no node is called decode-1 \(did you mean decode-0\?\)") as missing:
        find_node([status_of(READER, name="decode-0"), other], "decode-1")
    assert missing.value.exit_code == 3


@pytest.mark.parametrize(
    ("changes", "asked"),
    [
        ({}, True),
        ({"address": ""}, False),
        ({"incarnation": ""}, False),
        ({"role": "router"}, False),
        ({"status": "Lost"}, False),
        ({"status": "Suspect"}, True),
    ],
)
def test_which_nodes_can_be_asked(changes: dict[str, object], asked: bool) -> None:
    assert can_be_asked(status_of(SENDER, **changes)) is asked


class Handler:
    """A node that answers with its report."""

    def report(self) -> NodeReport:
        return SENDER


async def test_a_node_that_does_not_answer_does_not_hide_the_others() -> None:
    server = RpcServer((node_service.SERVICE_NAME,))
    address = f"127.0.0.1:{server.bind('127.0.0.1', 0)}"
    NodeServicer(Handler()).add_to_server(server.server)  # type: ignore[arg-type]
    await server.start()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        quiet = f"127.0.0.1:{silent.getsockname()[1]}"
        nodes = [
            status_of(READER, name="quiet", incarnation="quiet.1", address=quiet),
            status_of(SENDER, address=address),
            status_of(READER, name="gone", incarnation="gone.1", address="127.0.0.1:1"),
            status_of(SENDER, incarnation="p1.0", address=address),
        ]
        answers = await ask_nodes_async(nodes, 1.0)
    await server.stop(0.0)
    assert answers.reports == {"p1.1": SENDER}
    assert list(answers.problems) == ["quiet.1", "gone.1", "p1.0"]
    assert answers.problems["quiet.1"] == f"quiet at {quiet} did not answer within 1 s"
    assert answers.problems["gone.1"].startswith("gone: 127.0.0.1:1 does not answer")
    assert answers.problems["p1.0"] == f"p1: p1.1 answers at {address}, not p1.0"


def test_a_router_that_does_not_answer_does_not_hide_the_nodes(tmp_path: Path) -> None:
    place = RunDir(tmp_path / "run")
    place.create()
    place.lock()
    place.write_owner()
    child = ProcessState(
        "p1", "prefill", "Ready", os.getpid(), start_time(os.getpid()), 0, "p1.1", "h:1", "", "log", ""
    )
    with socket.create_server(("127.0.0.1", 0)) as silent:
        quiet = f"127.0.0.1:{silent.getsockname()[1]}"
        place.write_state(ClusterState("c", "ready", 1, 0, 0.0, "m", "auto", "h:1", quiet, (child,)))
        view = view_cluster(None, place.path, 0.2)
        with pytest.raises(DeadlineExceeded, match=f"the router at {quiet} did not answer within 0.2 s"):
            view_cluster(quiet, None, 0.2)
    place.release()
    assert (view.health, view.detail) == ("unavailable", f"the router at {quiet} did not answer within 0.2 s")
    assert [(node.name, node.incarnation, can_be_asked(node)) for node in view.nodes] == [("p1", "p1.1", True)]
