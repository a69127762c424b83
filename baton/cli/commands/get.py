"""`baton get nodes`, `get requests`, `get tenants`, `get leases`; `get_plan` has `get plan`.

`get nodes` is what scripts call every second: what only the others need is imported by them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from baton.cli.ask import ask_all_routers, ask_nodes, can_be_asked, requests_of_all_routers
from baton.cli.commands import add_group
from baton.cli.commands.get_plan import plan
from baton.cli.output import (
    ListFormat,
    ListOutputOption,
    NoHeadersOption,
    duration,
    fine_duration,
    print_list,
    print_note,
    size,
)
from baton.cli.target import (
    ANSWER_TIMEOUT_S,
    AnswerTimeoutOption,
    EachAnswerTimeoutOption,
    OperatorAddressOption,
    RunDirOption,
    SelectorOption,
    parse_selector,
    select,
)
from baton.cli.views.cluster_view import view_cluster
from baton.cli.views.rows import (
    ENDED_STATES,
    TenantShare,
    brief_ms,
    lease_json,
    lease_row,
    oldest_first,
    tenant_json,
    tenant_shares,
)
from baton.cli.views.watching import WatchedItem, WatchOption, watch
from baton.did_you_mean import did_you_mean
from baton.errors import Unreachable, UsageError
from baton.messages.operator import NodeStatus

if TYPE_CHECKING:
    from baton.messages.node_report import NodeReport, OpenHandoff
    from baton.messages.operator import RequestRow

_REQUEST_COLUMNS = ["REQUEST", "STATE", "AGE", "PREFILL", "DECODE", "PROMPT", "OUTPUT", "ATTEMPTS", "TTFT"]
_WIDE_REQUEST_COLUMNS = ["ROUTER", "TOTAL", "KV", "DETAIL"]
_REQUEST_SORTS = ("age", "state", "request", "output", "ttft", "attempts")
_TENANT_COLUMNS = ["TENANT", "CLASS", "WEIGHT", "RUN", "WAIT", "SHARE", "TOKENS/MIN", "QUEUED", "LAG", "TOKENS"]
_WIDE_TENANT_COLUMNS = ["DISPLACED", "REFUSED"]
_LEASE_COLUMNS = ["NODE", "REQUEST", "ATTEMPT", "SIDE", "STATE", "PEER", "BLOCKS", "AGE"]
OVER = "OVER"
_WIDE_LEASE_COLUMNS = ["INCARNATION", "PEER-INCARNATION", "FLIGHT"]
_COLUMNS = ["NAME", "ROLE", "STATUS", "READY", "VERSION", "AGE"]
_WIDE = [
    "INCARNATION",
    "ADDRESS",
    "PID",
    "MODEL",
    "SHAPE",
    "RUN",
    "WAIT",
    "KV%",
    "BLOCKS",
    "FREE",
    "LEASED",
    "BIT-EXACT",
    "BITS",
    "VERIFIED",
    "CAN",
    "DETAIL",
]
_SORTS = ("role", "name", "status", "age", "running", "waiting", "kv")


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
    columns = _LEASE_COLUMNS + (_WIDE_LEASE_COLUMNS if wide else [])
    ends = EndTracker()

    def fetch(_known: Collection[str]) -> list[WatchedItem]:
        reports, _ = _ask(address, run_dir, wanted, timeout)
        return [watched_lease(report, handoff, wide=wide) for report, handoff in ends.with_ends(reports)]

    if watching:
        watch(fetch, columns, output, headers=not no_headers, retries=address is not None)
    reports, problems = _ask(address, run_dir, wanted, timeout)
    handoffs = [(report, handoff) for report in reports for handoff in oldest_first(report)]
    print_list(
        output,
        (lease_json(report, handoff) for report, handoff in handoffs),
        (f"{report.node.node_id}/{handoff.attempt}" for report, handoff in handoffs),
        columns,
        (lease_row(report, handoff, wide=wide) for report, handoff in handoffs),
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
        now_open = {_key(report, handoff): (report, handoff) for report in reports for handoff in oldest_first(report)}
        answered = {report.node.incarnation for report in reports}
        gone = {key: known for key, known in self._open.items() if key not in now_open}
        ended = {key: known for key, known in gone.items() if known[0].node.incarnation in answered}
        self._open = {key: known for key, known in gone.items() if key not in ended} | now_open
        return [*now_open.values(), *((report, replace(handoff, state=OVER)) for report, handoff in ended.values())]


def _key(report: NodeReport, handoff: OpenHandoff) -> str:
    return f"{report.node.incarnation} {handoff.side.value} {handoff.attempt}"


def watched_lease(report: NodeReport, handoff: OpenHandoff, *, wide: bool) -> WatchedItem:
    """A lease or transfer for -w. Another age is no change."""
    state, row = replace(handoff, age_s=0.0), lease_row(report, handoff, wide=wide)
    return WatchedItem(_key(report, handoff), state, row, lease_json(report, handoff))


def register(app: typer.Typer, name: str, text: str) -> None:
    """Add the commands."""
    add_group(
        app,
        name,
        text,
        "List nodes, requests, tenants or leases of the cluster, or what its planner wants.",
        {"nodes": nodes, "requests": requests, "tenants": tenants, "leases": leases, "plan": plan},
    )


def nodes(
    run_dir: RunDirOption = None,
    address: OperatorAddressOption = None,
    selector: SelectorOption = "",
    watching: WatchOption = False,
    sort_by: Annotated[str, typer.Option(help=f"Sort key: {', '.join(_SORTS)}.", metavar="KEY")] = "role",
    no_headers: NoHeadersOption = False,
    timeout: AnswerTimeoutOption = ANSWER_TIMEOUT_S,
    output: ListOutputOption = ListFormat.TABLE,
) -> None:
    """List the nodes and routers of the cluster. With -w, JSON is one document a line."""
    wanted = parse_selector(selector)
    if sort_by not in _SORTS:
        raise UsageError(f"--sort-by {sort_by}: use {', '.join(_SORTS)}{did_you_mean(sort_by, _SORTS)}")
    wide = output is ListFormat.WIDE
    columns = _COLUMNS + (_WIDE if wide else [])

    def fetch(_known: Collection[str]) -> list[WatchedItem]:
        nodes = sorted_nodes(select(view_cluster(address, run_dir, timeout).nodes, wanted), sort_by)
        by_load = output not in (ListFormat.TABLE, ListFormat.NAME)
        return [watched_item(node, wide=wide, by_load=by_load) for node in nodes]

    if watching:
        watch(fetch, columns, output, headers=not no_headers, retries=address is not None)
    view = view_cluster(address, run_dir, timeout)
    listed = sorted_nodes(select(view.nodes, wanted), sort_by)
    documents, rows = (asdict(node) for node in listed), (_row(node, wide) for node in listed)
    print_list(output, documents, (node.name for node in listed), columns, rows, headers=not no_headers)
    if view.health == "unavailable":
        print_note(f"baton: {view.detail}")


def sorted_nodes(nodes: Sequence[NodeStatus], sort_by: str) -> list[NodeStatus]:
    """The nodes sorted by one of the keys: the largest number first, but the youngest node."""

    def key(node: NodeStatus) -> Any:
        match sort_by:
            case "name":
                return node.name
            case "status":
                return node.status
            case "age":
                return node.age_s
            case "running":
                return -node.running
            case "waiting":
                return -node.waiting
            case "kv":
                return -node.kv_usage
            case _:
                # The order of the view, which is by role.
                return 0

    return sorted(nodes, key=key)


def watched_item(node: NodeStatus, *, wide: bool, by_load: bool) -> WatchedItem:
    """A node for -w. Another age is no change; another load is one only with `by_load`."""
    state = replace(node, age_s=0.0)
    if not by_load:
        state = replace(
            state, running=0, waiting=0, in_flight=0, kv_usage=0.0, free_blocks=0, leased_blocks=0, quarantined_blocks=0
        )
    return WatchedItem(f"{node.name} {node.incarnation}", state, _row(node, wide), asdict(node))


def _row(node: NodeStatus, wide: bool) -> Sequence[str]:
    ready = "yes" if node.status == "Ready" else "no"
    row = [node.name, node.role, node.status, ready, node.version or "-", duration(node.age_s)]
    if not wide:
        return row
    router = node.role == "router"
    return [
        *row,
        node.incarnation or "-",
        node.address or "-",
        str(node.pid or "-"),
        node.model or "-",
        "-" if router else str(node.shape),
        str(node.running),
        str(node.waiting),
        "-" if router else f"{100 * node.kv_usage:.0f}",
        "-" if router else str(node.total_blocks),
        "-" if router else str(node.free_blocks),
        "-" if router else str(node.leased_blocks),
        "-" if router else "yes" if node.bit_exact else "no",
        node.bits or "-",
        "-" if router else "yes" if node.is_verified else "no",
        ",".join(node.capabilities) or "-",
        node.detail or "-",
    ]


def requests(
    run_dir: RunDirOption = None,
    address: OperatorAddressOption = None,
    running: Annotated[bool, typer.Option("--running", help="Only requests that have not ended.")] = False,
    limit: Annotated[
        int,
        typer.Option(
            help="Largest number of running requests, and of ended ones, from each router.", min=1, metavar="N"
        ),
    ] = 100,
    watching: WatchOption = False,
    sort_by: Annotated[str, typer.Option(help=f"Sort key: {', '.join(_REQUEST_SORTS)}.", metavar="KEY")] = "age",
    no_headers: NoHeadersOption = False,
    timeout: EachAnswerTimeoutOption = ANSWER_TIMEOUT_S,
    output: ListOutputOption = ListFormat.TABLE,
) -> None:
    """List the running requests and the latest that have ended, without their text.

    With -w a request is printed again when its state changes. With both -w and --running, requests that had ended
    before are left out.
    """
    if sort_by not in _REQUEST_SORTS:
        raise UsageError(f"--sort-by {sort_by}: use {', '.join(_REQUEST_SORTS)}")
    wide = output is ListFormat.WIDE
    columns = _REQUEST_COLUMNS + (_WIDE_REQUEST_COLUMNS if wide else [])

    def fetch(known: Collection[str]) -> list[WatchedItem]:
        listed, _ = requests_of_all_routers(address, run_dir, limit, timeout)
        rows = sorted(listed, key=_request_sort_key(sort_by))
        every = [watched_request(row, wide=wide) for row in rows]
        return [
            item
            for item, row in zip(every, rows, strict=True)
            if not running or row.state not in ENDED_STATES or item.key in known
        ]

    if watching:
        watch(fetch, columns, output, headers=not no_headers, retries=address is not None)
    listed, problems = requests_of_all_routers(address, run_dir, limit, timeout)
    rows = sorted(
        (row for row in listed if not (running and row.state in ENDED_STATES)), key=_request_sort_key(sort_by)
    )
    documents, cells = (asdict(row) for row in rows), (_request_cells(row, wide) for row in rows)
    print_list(output, documents, (row.request_id for row in rows), columns, cells, headers=not no_headers)
    for problem in problems:
        print_note(f"baton: {problem}")


def watched_request(row: RequestRow, *, wide: bool) -> WatchedItem:
    """A request for -w. Another age or another number of tokens is no change."""
    state = replace(row, age_s=0.0, output_tokens=0)
    return WatchedItem(f"{row.request_id} {row.router}", state, _request_cells(row, wide), asdict(row))


def _request_sort_key(sort_by: str) -> Any:
    """The sort key of a row. Running requests come first."""
    never = float("inf")

    def key(row: RequestRow) -> tuple[bool, Any]:
        values = {
            "age": row.age_s,
            "state": row.state,
            "request": row.request_id,
            "output": -row.output_tokens,
            "ttft": -(row.ttft_ms if row.ttft_ms is not None else never),
            "attempts": -row.attempts,
        }
        return (row.state in ENDED_STATES, values[sort_by])

    return key


def _request_cells(row: RequestRow, wide: bool) -> Sequence[str]:
    cells = [
        row.request_id,
        row.state,
        fine_duration(row.age_s),
        row.prefill_node or "-",
        row.decode_node or "-",
        str(row.prompt_tokens),
        str(row.output_tokens),
        str(row.attempts),
        "-" if row.ttft_ms is None else brief_ms(row.ttft_ms),
    ]
    if not wide:
        return cells
    total = "-" if row.total_ms is None else brief_ms(row.total_ms)
    return [*cells, row.router, total, size(row.kv_bytes) if row.kv_bytes else "-", row.detail or "-"]


def tenants(
    run_dir: RunDirOption = None,
    address: OperatorAddressOption = None,
    limit: Annotated[
        int, typer.Option(help="Largest number of tenants from each router; 0: all.", min=0, metavar="N")
    ] = 1000,
    no_headers: NoHeadersOption = False,
    timeout: EachAnswerTimeoutOption = ANSWER_TIMEOUT_S,
    output: ListOutputOption = ListFormat.TABLE,
) -> None:
    """List the tenants and the shares of the service that they got in the last minute, over all routers.

    Tokens are those that count for shares: of prompts, without cached ones, and generated ones times
    `--fair-output-weight`. They count when their request ends. QUEUED is what the requests that got nodes in the last
    minute had waited on average; LAG is how far the tenant is ahead of the waiting one that got least.
    """
    wide = output is ListFormat.WIDE
    answers, problems = ask_all_routers(address, run_dir, lambda router: router.tenants(limit, timeout))
    shares = tenant_shares(answers)
    print_list(
        output,
        (tenant_json(each) for each in shares),
        (each.row.tenant or "-" for each in shares),
        _TENANT_COLUMNS + (_WIDE_TENANT_COLUMNS if wide else []),
        (_tenant_cells(each, wide) for each in shares),
        headers=not no_headers,
    )
    for problem in problems:
        print_note(f"baton: {problem}")


def _tenant_cells(each: TenantShare, wide: bool) -> Sequence[str]:
    row = each.row
    cells = [
        row.tenant or "-",
        row.service_class or "-",
        f"{row.weight:g}",
        str(row.running),
        str(row.waiting),
        "-" if each.share is None else f"{100 * each.share:.1f}%",
        f"{row.served_last_minute:.0f}",
        "-" if each.row.mean_wait_s is None else brief_ms(1e3 * each.row.mean_wait_s),
        f"{row.lag_tokens:.0f}",
        f"{row.served_tokens:.0f}",
    ]
    return [*cells, str(row.displaced), str(row.refused)] if wide else cells
