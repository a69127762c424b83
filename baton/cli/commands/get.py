"""`baton get nodes`. `baton get requests` and `baton get leases` are registered here, too."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from typing import Annotated, Any

import typer

from baton.cli.commands.leases import leases
from baton.cli.commands.requests import requests
from baton.cli.output import ListFormat, ListOutputOption, NoHeadersOption, duration, print_list, print_note
from baton.cli.selector import SelectorOption, parse_selector, select
from baton.cli.target import ANSWER_TIMEOUT_S, AnswerTimeoutOption, OperatorAddressOption, RunDirOption
from baton.cli.views.cluster_view import view_cluster
from baton.cli.views.watching import WatchedItem, WatchOption, watch
from baton.did_you_mean import did_you_mean
from baton.errors import UsageError
from baton.messages.operator import NodeStatus

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


def register(app: typer.Typer, name: str, text: str) -> None:
    """Add the commands."""
    group = typer.Typer(help=text, no_args_is_help=True, rich_markup_mode=None)

    @group.callback()
    def get() -> None:
        """List nodes, requests or leases of the cluster."""

    group.command("nodes")(nodes)
    group.command("requests")(requests)
    group.command("leases")(leases)
    app.add_typer(group, name=name)


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
    found = sorted_nodes(select(view.nodes, wanted), sort_by)
    documents, rows = (asdict(node) for node in found), (_row(node, wide) for node in found)
    print_list(output, documents, (node.name for node in found), columns, rows, headers=not no_headers)
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
