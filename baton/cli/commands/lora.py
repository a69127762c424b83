"""`baton lora`: names of adapters (LoRA), by which clients ask for them."""

from __future__ import annotations

import os
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from baton.cli.ask import ask_any_router
from baton.cli.commands import add_group
from baton.cli.output import (
    Format,
    ListFormat,
    ListOutputOption,
    NoHeadersOption,
    OutputOption,
    print_document,
    print_list,
    print_note,
    print_text,
    size,
)
from baton.cli.target import ANSWER_TIMEOUT_S, EachAnswerTimeoutOption, OperatorAddressOption, RunDirOption
from baton.errors import BatonError, ExitCode, UnknownModel

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from baton.messages.adapters import AdapterRow, LoadedAdapter
    from baton.wire.clients.operator_client import OperatorClient

_LOAD_S = 90.0
"""How long to wait for the nodes, which read the whole adapter."""
_COLUMNS = ["NAME", "DIGEST", "NODES", "REFUSED", "DIRECTORY"]

NameArgument = Annotated[str, typer.Argument(help="Name for clients.", metavar="NAME", show_default=False)]


class _NoSuchAdapter(BatonError):
    exit_code = ExitCode.NOT_FOUND


def register(app: typer.Typer, name: str, text: str) -> None:
    """Add the commands."""
    about = "Give names to adapters (LoRA), list them, and look into their files."
    commands: Mapping[str, Callable[..., Any]] = {
        "list": list_adapters,
        "load": load,
        "unload": unload,
        "inspect": inspect,
    }
    add_group(app, name, text, about, commands)


def list_adapters(
    run_dir: RunDirOption = None,
    address: OperatorAddressOption = None,
    timeout: EachAnswerTimeoutOption = ANSWER_TIMEOUT_S,
    no_headers: NoHeadersOption = False,
    output: ListOutputOption = ListFormat.TABLE,
) -> None:
    """List the adapters, the nodes that acknowledge each, and why others refuse it."""
    adapters = ask_any_router(address, run_dir, partial(_adapters, timeout))
    documents, rows = (asdict(row) for row in adapters), (_cells(row) for row in adapters)
    print_list(output, documents, (row.name for row in adapters), _COLUMNS, rows, headers=not no_headers)
    if output in (ListFormat.TABLE, ListFormat.WIDE):
        for row in adapters:
            for refusal in row.refusals:
                print_note(f"baton: {row.name} is refused by {refusal.node}: {refusal.reason}")


def load(
    name: NameArgument,
    directory: Annotated[
        Path,
        typer.Argument(
            help="Directory of the adapter on the hosts of the nodes, in one that they allow (--lora-dir).",
            metavar="DIR",
            show_default=False,
        ),
    ],
    replace: Annotated[
        bool, typer.Option("--replace", help="The name may have another adapter already; requests with it keep it.")
    ] = False,
    run_dir: RunDirOption = None,
    address: OperatorAddressOption = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the nodes.", metavar="SECONDS", min=0)] = _LOAD_S,
    output: OutputOption = Format.TEXT,
) -> None:
    """Give a name to the adapter in a directory. All nodes that find it must find the same files there."""
    path = os.path.abspath(directory)
    loaded = ask_any_router(address, run_dir, partial(_load, name, path, replace, timeout))
    if output is not Format.TEXT:
        print_document(output, asdict(loaded) | {"name": name, "directory": path})
    else:
        done = "has this adapter already" if loaded.unchanged else "is served"
        print_text(f"{name} {done}: {loaded.digest:.12}, rank {loaded.rank}, {size(loaded.num_bytes)}")
        for warning in loaded.warnings:
            print_note(f"baton: warning: not served by {warning}")


def unload(
    name: NameArgument,
    run_dir: RunDirOption = None,
    address: OperatorAddressOption = None,
    timeout: EachAnswerTimeoutOption = ANSWER_TIMEOUT_S,
) -> None:
    """Take an adapter's name away. Requests that run with the adapter go on, new ones are refused."""
    try:
        ask_any_router(address, run_dir, partial(_unload, name, timeout))
    except UnknownModel as error:
        raise _NoSuchAdapter(error.reason) from None
    print_text(f"{name} is not served any more")


def inspect(
    directory: Annotated[
        Path, typer.Argument(help="Directory of an adapter on this machine.", metavar="DIR", show_default=False)
    ],
    output: OutputOption = Format.TEXT,
) -> None:
    """Check an adapter's files on this machine as far as that is possible without the model, and show its digest."""
    from baton.model_formats.adapters import open_adapter

    info = open_adapter(directory.absolute()).info()
    if output is not Format.TEXT:
        print_document(output, asdict(info))
        return
    for title, text in (
        ("Digest", info.digest),
        ("Rank", str(info.rank)),
        ("Modules", str(info.num_modules)),
        ("Size", size(info.num_bytes)),
        ("Base model", info.base_model or "not named"),
    ):
        print_text(f"{title + ':':12}{text}")


def _cells(row: AdapterRow) -> list[str]:
    return [row.name, row.digest[:12], ",".join(row.nodes) or "-", str(len(row.refusals)), row.directory]


def _adapters(timeout: float, router: OperatorClient) -> Sequence[AdapterRow]:
    return router.adapters(timeout)


def _load(name: str, directory: str, replace: bool, timeout: float, router: OperatorClient) -> LoadedAdapter:
    return router.load_adapter(name, directory, replaces=replace, timeout_s=timeout)


def _unload(name: str, timeout: float, router: OperatorClient) -> None:
    router.unload_adapter(name, timeout)
