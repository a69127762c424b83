"""`-w` of lists: what counts as a change, and how the columns are aligned."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.cli.commands import get
from baton.cli.main import main
from baton.cli.views.watching import GrowingTable, changed_items
from baton.messages.ids import AttemptKey
from baton.messages.node import LoadReport
from baton.messages.node_report import HandoffReport, HandoffSide, NodeReport, OpenHandoff
from baton.messages.operator import NodeStatus, RequestRow
from tests.support.router_parts import prefill

NODE = NodeStatus("d0", "decode", "Ready", "d0.1", "h:1", 7, "m", running=1, waiting=0, kv_usage=0.5, age_s=3.0)
ROW = RequestRow("a", "Decoding", "r0", 1.25, "p0", "d0", 5, 2, 1, 31.0, None)


@pytest.mark.parametrize(
    ("change", "in_table", "by_load"),
    [({"age_s": 4.0}, 0, 0), ({"running": 2}, 0, 1), ({"status": "Lost"}, 1, 1), ({"incarnation": "d0.2"}, 1, 1)],
)
def test_a_node_changes(change: dict[str, object], in_table: int, by_load: int) -> None:
    for load, count in ((False, in_table), (True, by_load)):
        before = get.watched_item(NODE, wide=False, by_load=load)
        after = get.watched_item(replace(NODE, **change), wide=False, by_load=load)  # type: ignore[arg-type]
        assert len(changed_items({before.key: before.state}, [after])) == count


def test_a_request_changes_with_its_state() -> None:
    before = get.watched_request(ROW, wide=False)
    older = get.watched_request(replace(ROW, age_s=9.0, output_tokens=70), wide=False)
    over = get.watched_request(replace(ROW, state="Finished", total_ms=9.0), wide=False)
    other = get.watched_request(replace(ROW, request_id="b"), wide=False)
    assert changed_items({before.key: before.state}, [older, over, other]) == [over, other]


def test_a_lease_changes_and_ends() -> None:
    ends = get.EndTracker()
    known: dict[str, object] = {}

    def changes(*handoffs: OpenHandoff) -> list[tuple[str, str]]:
        report = NodeReport(prefill(), LoadReport(), {}, HandoffReport("", list(handoffs), [], []))
        nonlocal known
        found = [get.watched_lease(*each, wide=False) for each in ends.with_ends([report])]
        news = changed_items(known, found)
        known = {each.key: each.state for each in found}
        return [(str(each.cells[1]), str(each.cells[4])) for each in news]

    lease = OpenHandoff(AttemptKey("a", 1), HandoffSide.SENDER, "GRANTED", "", "", 2, 0.5)
    other = replace(lease, attempt=AttemptKey("b", 1))
    assert changes(lease, other) == [("a", "GRANTED"), ("b", "GRANTED")]
    assert changes(replace(lease, age_s=2.0), replace(other, state="READING")) == [("b", "READING")]
    assert ends.with_ends([]) == [], "leases of a node that does not answer have not ended"
    assert changes(lease) == [("b", get.OVER)]
    assert changes() == [("a", get.OVER)]
    assert changes() == []


def test_a_column_grows_and_never_shrinks() -> None:
    table = GrowingTable(["A", "B"])
    table.widen([["xx", "y"]])
    assert table.line(["A", "B"]) == "A    B"
    table.widen([["xxxx", "y"]])
    table.widen([["x", "y"]])
    assert table.line(["x", "y"]) == "x      y"


def test_nodes_are_sorted_by_the_given_key(capsys: pytest.CaptureFixture[str]) -> None:
    busy, young = replace(NODE, name="b", running=9), replace(NODE, name="a", age_s=1.0, kv_usage=0.9)
    names = {key: "".join(node.name[0] for node in get.sorted_nodes([NODE, busy, young], key)) for key in get._SORTS}
    assert names == {
        "role": "dba",
        "name": "abd",
        "status": "dba",
        "age": "adb",
        "running": "bda",
        "waiting": "dba",
        "kv": "adb",
    }
    assert main(["get", "nodes", "--sort-by", "agee"]) == 2
    assert "did you mean age" in capsys.readouterr().err
