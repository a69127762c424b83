"""`baton cache reset`: empties the prefix caches of nodes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from baton.cli.ask import ask_any_router
from baton.cli.output import Format, OutputOption, print_document, print_note, print_text
from baton.cli.steering import NodesArgument
from baton.cli.target import OperatorAddressOption, RunDirOption
from baton.errors import CacheInUse, ExitCode

if TYPE_CHECKING:
    from baton.client import OperatorClient

_ASK_S = 6.0
"""How long to wait for a node, which may have to finish a step first."""


def register(app: typer.Typer, name: str, text: str) -> None:
    """Add the commands."""
    group = typer.Typer(help=text, no_args_is_help=True, rich_markup_mode=None)

    @group.callback()
    def cache() -> None:
        """Empty the prefix caches of nodes."""

    group.command("reset")(reset)
    app.add_typer(group, name=name)


def reset(
    nodes: NodesArgument,
    run_dir: RunDirOption = None,
    address: OperatorAddressOption = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for each node.", metavar="SECONDS", min=0)] = _ASK_S,
    output: OutputOption = Format.TEXT,
) -> int:
    """Empty the prefix caches of these nodes, on the device and in host memory.

    A node refuses while any of its blocks is in use: drain it with `baton drain` first, and uncordon it afterwards. The
    exit code is 1 if a node refused; the caches of the others are empty.
    """
    forgotten: dict[str, int] = {}
    refused: dict[str, str] = {}
    for node in nodes:
        try:
            forgotten[node] = ask_any_router(address, run_dir, partial(_reset, node, timeout))
        except CacheInUse as error:
            refused[node] = str(error)
    found = {"forgotten_blocks": forgotten, "refused": refused}
    if output is not Format.TEXT:
        print_document(output, found)
    else:
        for node, num_blocks in forgotten.items():
            print_text(f"{node} has forgotten {num_blocks} blocks")
        for why in refused.values():
            print_note(f"baton: {why}")
    return int(ExitCode.FAILED if refused else ExitCode.OK)


def _reset(node: str, timeout: float, router: OperatorClient) -> int:
    return router.reset_cache(node, timeout)
