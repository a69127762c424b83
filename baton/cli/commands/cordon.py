"""`baton cordon` and `baton uncordon`: exclude nodes from new requests, and admit them again."""

from __future__ import annotations

import typer

from baton.cli.ask import ask_any_router
from baton.cli.output import Format, OutputOption, print_document, print_text
from baton.cli.steering import NodesArgument, print_warning
from baton.cli.target import ANSWER_TIMEOUT_S, AnswerTimeoutOption, OperatorAddressOption, RunDirOption


def register(app: typer.Typer, name: str, text: str) -> None:
    """Add the command."""
    app.command(name, help=text)(cordon if name == "cordon" else uncordon)


def cordon(
    nodes: NodesArgument,
    run_dir: RunDirOption = None,
    address: OperatorAddressOption = None,
    timeout: AnswerTimeoutOption = ANSWER_TIMEOUT_S,
    output: OutputOption = Format.TEXT,
) -> None:
    """Stop sending new requests to these nodes, also after restarts, until `uncordon`. Running requests continue."""
    warning = ask_any_router(address, run_dir, lambda router: router.cordon(nodes, timeout))
    _print_result(nodes, output, is_cordoned=True, warning=warning)


def uncordon(
    nodes: NodesArgument,
    run_dir: RunDirOption = None,
    address: OperatorAddressOption = None,
    timeout: AnswerTimeoutOption = ANSWER_TIMEOUT_S,
    output: OutputOption = Format.TEXT,
) -> None:
    """Send new requests to these nodes again."""
    ask_any_router(address, run_dir, lambda router: router.uncordon(nodes, timeout))
    _print_result(nodes, output, is_cordoned=False, warning="")


def _print_result(nodes: list[str], output: Format, *, is_cordoned: bool, warning: str) -> None:
    found = {"nodes": nodes, "cordoned": is_cordoned, "warning": warning}
    if output is not Format.TEXT:
        print_document(output, found)
    else:
        for name in nodes:
            print_text(f"{name} {'cordoned' if is_cordoned else 'uncordoned'}")
        print_warning(warning)
