"""`baton get nodes`; the other lists are registered here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from baton.cli.cluster_view import view_cluster
from baton.cli.leases import leases
from baton.cli.output import ListFormat, duration, note, print_json, print_table, print_yaml, say
from baton.cli.selector import SelectorOption, parse_selector, select
from baton.cli.target import OperatorAddressOption, RunDirOption
from baton.rpc.messages import NodeStatus

_COLUMNS = ["NAME", "ROLE", "STATUS", "READY", "VERSION", "AGE"]
_WIDE = [
    "INCARNATION",
    "ADDRESS",
    "PID",
    "MODEL",
    "RUN",
    "WAIT",
    "KV%",
    "BLOCKS",
    "FREE",
    "LEASED",
    "BIT-EXACT",
    "DETAIL",
]


def register(app: typer.Typer, name: str, text: str) -> None:
    """Add the commands."""
    group = typer.Typer(help=text, no_args_is_help=True, rich_markup_mode=None)

    @group.callback()
    def get() -> None:
        """List what the cluster has."""

    group.command("nodes")(nodes)
    group.command("leases")(leases)
    app.add_typer(group, name=name)


def nodes(
    run_dir: RunDirOption = None,
    address: OperatorAddressOption = None,
    selector: SelectorOption = "",
    no_headers: Annotated[bool, typer.Option("--no-headers", help="Leave the header line out.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for an answer.", metavar="SECONDS", min=0)] = 5.0,
    output: Annotated[ListFormat, typer.Option("-o", "--output", help="Output format.")] = ListFormat.TABLE,
) -> None:
    """List the cluster's nodes and routers."""
    wanted = parse_selector(selector)
    view = view_cluster(address, run_dir, timeout)
    found = select(view.nodes, wanted)
    if output is ListFormat.JSON:
        print_json([asdict(node) for node in found])
    elif output is ListFormat.YAML:
        print_yaml([asdict(node) for node in found])
    elif output is ListFormat.NAME:
        for node in found:
            say(node.name)
    else:
        wide = output is ListFormat.WIDE
        print_table(_COLUMNS + (_WIDE if wide else []), [_row(node, wide) for node in found], headers=not no_headers)
    if view.health == "unavailable":
        note(f"baton: {view.detail}")


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
        str(node.running),
        str(node.waiting),
        "-" if router else f"{100 * node.kv_usage:.0f}",
        "-" if router else str(node.total_blocks),
        "-" if router else str(node.free_blocks),
        "-" if router else str(node.leased_blocks),
        "-" if router else "yes" if node.bit_exact else "no",
        node.detail or "-",
    ]
