"""`baton get leases`: lists the leases of prefill nodes and the transfers of decode nodes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from baton.cli.ask import ask_nodes, can_be_asked
from baton.cli.output import ListFormat, ListOutputOption, NoHeadersOption, print_list, print_note
from baton.cli.target import (
    ANSWER_TIMEOUT_S,
    EachAnswerTimeoutOption,
    OperatorAddressOption,
    RunDirOption,
    SelectorOption,
    parse_selector,
    select,
)
from baton.cli.views.cluster_view import view_cluster
from baton.cli.views.lease_rows import lease_json, lease_row, oldest_first
from baton.cli.views.watching import WatchedItem, WatchOption, watch
from baton.errors import Unreachable
from baton.messages.node_report import NodeReport, OpenHandoff

_COLUMNS = ["NODE", "REQUEST", "ATTEMPT", "SIDE", "STATE", "PEER", "BLOCKS", "AGE"]
OVER = "OVER"
_WIDE = ["INCARNATION", "PEER-INCARNATION", "FLIGHT"]


def leases(
    run_dir: RunDirOption = None,
    address: OperatorAddressOption = None,
    selector: SelectorOption = "",
    watching: WatchOption = False,
    no_headers: NoHeadersOption = False,
    timeout: EachAnswerTimeoutOption = ANSWER_TIMEOUT_S,
    output: ListOutputOption = ListFormat.TABLE,
) -> None:
    """List the leases and transfers that have not ended.

    With a lease (SIDE sender) a prefill node keeps blocks that a decode node may read; with a transfer (SIDE reader) a
    decode node fills its own blocks. With -w the nodes are asked once a second: a lease or transfer is printed again
    when its state changes, and with the state OVER when it has ended.
    """
    wanted = parse_selector(selector)
    wide = output is ListFormat.WIDE
    columns = _COLUMNS + (_WIDE if wide else [])
    ends = EndTracker()

    def fetch(_known: Collection[str]) -> list[WatchedItem]:
        reports, _ = _ask(address, run_dir, wanted, timeout)
        return [watched_item(report, handoff, wide=wide) for report, handoff in ends.with_ends(reports)]

    if watching:
        watch(fetch, columns, output, headers=not no_headers, retries=address is not None)
    reports, problems = _ask(address, run_dir, wanted, timeout)
    found = [(report, handoff) for report in reports for handoff in oldest_first(report)]
    print_list(
        output,
        (lease_json(report, handoff) for report, handoff in found),
        (f"{report.node.node_id}/{handoff.attempt}" for report, handoff in found),
        columns,
        (lease_row(report, handoff, wide=wide) for report, handoff in found),
        headers=not no_headers,
    )
    for problem in problems:
        print_note(f"baton: {problem}")


def _ask(
    address: str | None, run_dir: Path | None, wanted: dict[str, str], timeout_s: float
) -> tuple[list[NodeReport], list[str]]:
    """The reports of nodes, and the errors of those that gave none. Raises Unreachable if all failed."""
    view = view_cluster(address, run_dir, timeout_s)
    asked = [node for node in select(view.nodes, wanted) if can_be_asked(node)]
    answers = ask_nodes(asked, timeout_s)
    if asked and not answers.reports:
        raise Unreachable("; ".join(answers.problems.values()))
    reports = [answers.reports[node.incarnation] for node in asked if node.incarnation in answers.reports]
    unavailable = [view.detail] if view.health == "unavailable" else []
    return reports, [*unavailable, *answers.problems.values()]


class EndTracker:
    """Finds the leases and transfers that have ended since the previous reports. Does no I/O."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[NodeReport, OpenHandoff]] = {}

    def with_ends(self, reports: Sequence[NodeReport]) -> list[tuple[NodeReport, OpenHandoff]]:
        """The open leases and transfers, and once more, as OVER, those that have ended.

        Those of a node that did not answer count as open until it answers.
        """
        found = {_key(report, handoff): (report, handoff) for report in reports for handoff in oldest_first(report)}
        answered = {report.node.incarnation for report in reports}
        gone = {key: known for key, known in self._open.items() if key not in found}
        ended = {key: known for key, known in gone.items() if known[0].node.incarnation in answered}
        self._open = {key: known for key, known in gone.items() if key not in ended} | found
        return [*found.values(), *((report, replace(handoff, state=OVER)) for report, handoff in ended.values())]


def _key(report: NodeReport, handoff: OpenHandoff) -> str:
    return f"{report.node.incarnation} {handoff.side.value} {handoff.attempt}"


def watched_item(report: NodeReport, handoff: OpenHandoff, *, wide: bool) -> WatchedItem:
    """A lease or transfer for -w. Another age is no change."""
    state, row = replace(handoff, age_s=0.0), lease_row(report, handoff, wide=wide)
    return WatchedItem(_key(report, handoff), state, row, lease_json(report, handoff))
